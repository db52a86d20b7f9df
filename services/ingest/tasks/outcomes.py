"""The outcomes of write tasks, durable, so that a task that comes again is not applied again.

A record is written in the batch of the task's messages. It is removed after seven days, and never
while its task may come again: records of failed tasks stay, since the backend may keep a dead
letter of them. Only waiting calls, and the last errors of tasks to be tried again, are in memory.

A publish that is repeated with its request ID is another task. Where one of them waits for longer
than request IDs are known, a record of the request ID, written with that of the task, says that the
other one was applied meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

from libs.events.tasks import cut_error
from libs.storage.database.clocks import Clock
from libs.storage.database.slate import Database
from libs.storage.layout.own_keys import (
    REQUEST_DIGEST_BYTES,
    parse_task_key,
    task_key,
    task_range,
    task_request_key,
)
from libs.storage.records.task_records import (
    AppliedTask,
    FailedTaskRecord,
    TaskRecord,
    TaskRequestRecord,
    WaitingTask,
    decode_task_record,
    decode_task_request,
    encode_task_record,
    encode_task_request,
)
from services.ingest.batches import Accepted, fingerprint_of
from services.ingest.write.publishing import Publisher
from services.ingest.write.request_ids import Answered, answered_of, check_same
from services.ingest.write.waiting import Waiting
from slatemq._admin.task_ids import is_task_id, parse_task_id, task_id_of

KEPT_MS: Final = 7 * 24 * 3600 * 1000
"""How long the record of an applied task stays, at least. A backend delivers a task again when it
did not learn of its end: after our crash, or after its own."""

ERRORS_MAX: Final = 10_000
"""Tasks whose last errors are in memory."""

NEW_MAX: Final = 20_000
"""Tasks known to be new until they come back from the backend: 3 MB."""

RETRIED_MAX: Final = 100_000
"""Retried tasks that are known to be pending before they are given out: 15 MB."""

Outcome = AppliedTask | FailedTaskRecord
"""The end of a task; a waiting one has none yet."""


class Attempt(NamedTuple):
    """The last attempt of a task that waits for the next one."""

    attempts: int
    error: str


class KnownTask(NamedTuple):
    """What is known of a task; `outcome` is None while it waits.

    One in the dead-letter place may have an ID of another program, an unreadable one has none.
    """

    task_id: str
    accepted_at_ms: int
    outcome: Outcome | None
    attempts: int = 0
    error: str = ""


class TaskOutcomes:
    """The outcomes of one shard's tasks. One event loop."""

    def __init__(self, database: Database, publisher: Publisher, clock: Clock) -> None:
        self._database = database
        self._publisher = publisher
        self._clock = clock
        self._waiting: dict[str, list[asyncio.Future[Outcome]]] = {}
        self._attempts: dict[str, Attempt] = {}
        self._entering: set[str] = set()
        self._failing: set[str] = set()
        self._retried: dict[str, None] = {}
        self._new: dict[str, None] = {}
        self._swept = b""
        self._noted: set[bytes] | None = None  # keys of request IDs, while a sweep reads them

    async def find(self, task_id: str) -> TaskRecord | None:
        """The durable record of a task. Raises the errors of the store."""
        value = await self._database.get(task_key(parse_task_id(task_id).ulid), durable=True)
        return None if value is None else decode_task_record(value)

    def begin_new(self, task_id: str) -> None:
        """Call before a new task enters the backend: it has no record yet.

        It is entering until `end_entering`, or the end of `keep`.
        """
        self._entering.add(task_id)
        if len(self._new) >= NEW_MAX:
            del self._new[next(iter(self._new))]
        self._new[task_id] = None

    def end_entering(self, task_id: str) -> None:
        """Call where `keep` does not follow."""
        self._entering.discard(task_id)

    async def find_first(self, task_id: str) -> TaskRecord | None:
        """The record of a task, for the consumer; a new task that comes first needs no read.

        Only this process applies what it has accepted. Raises the errors of the store.
        """
        if task_id in self._new:
            del self._new[task_id]
            return None
        return await self.find(task_id)

    def may_be_repeated(self, task_id: str, accepted: Accepted) -> bool:
        """Whether a task may repeat one of the same request ID that was applied while it waited.

        `RequestIds` knows of it where neither took long: only what has waited for long costs a
        read.
        """
        waited_ms = self._clock.now_ms() - parse_task_id(task_id).accepted_at_ms
        is_old = waited_ms >= self._publisher.requests.window_ms // 2
        return bool(accepted.request_id) and is_old

    async def find_repeated(self, task_id: str, accepted: Accepted) -> Answered | None:
        """The answer of a task of the same request ID that was applied while this one waited.

        Raises InvalidArgument where that one had other content, and the errors of the store.
        """
        if not self.may_be_repeated(task_id, accepted):
            return None
        accepted_at_ms = parse_task_id(task_id).accepted_at_ms
        window_ms = self._publisher.requests.window_ms
        key = task_request_key(_digest_of(accepted.request_id))
        value = await self._database.get(key, durable=True)
        if value is None:
            return None
        request = decode_task_request(value)
        applied = await self.find(task_id_of(request.ulid))
        if not isinstance(applied, AppliedTask) or applied.at_ms + window_ms < accepted_at_ms:
            return None  # The ID was free again when this task was accepted.
        check_same(request.fingerprint, await fingerprint_of(accepted))
        return answered_of(applied)

    async def is_applied(self, task_id: str) -> bool:
        """Whether a task is durably applied; its ID may be from another program."""
        return is_task_id(task_id) and isinstance(await self.find(task_id), AppliedTask)

    def note(
        self,
        task_id: str,
        answered: Answered,
        before: TaskRecord | None = None,
        request_id: str = "",
    ) -> AppliedTask:
        """Put a record into the commit that gathers or is drained now: the task is applied with it.

        `before` is the record until then; `request_id` that of a publish on its way, whose messages
        are stored with the record.
        """
        first, count, duplicates, received_at_ms = answered
        ulid = parse_task_id(task_id).ulid
        digest = _digest_of(request_id) if request_id else b""
        applied = AppliedTask(
            self._clock.now_ms(),
            first,
            count,
            received_at_ms,
            duplicates,
            has_failed(before),
            digest,
        )
        self._entering.discard(task_id)
        rows = [(task_key(ulid), encode_task_record(applied))]
        if request_id:
            key = task_request_key(digest)
            fingerprint = self._publisher.requests.fingerprint(request_id)
            rows.append((key, encode_task_request(TaskRequestRecord(ulid, fingerprint))))
            if self._noted is not None:
                self._noted.add(key)
        self._publisher.put(rows)
        return applied

    def is_over(self, accepted_at_ms: int) -> bool:
        """Whether the record of a task accepted then may be removed."""
        return accepted_at_ms < self._clock.now_ms() - KEPT_MS

    async def keep(self, task_id: str, entering: Awaitable[object]) -> None:
        """Note that the backend has a task whose body is an object, once it has entered it.

        Durable on return. An outcome that the task got since `begin_new` stays.
        """
        try:
            await entering
            if task_id in self._entering:
                self._put(task_id, WaitingTask(self._clock.now_ms(), has_failed=False))
            await self._publisher.commits.durable()
        finally:
            self._entering.discard(task_id)

    async def fail(self, task_id: str, attempt: Attempt) -> FailedTaskRecord:
        """Note that a task has failed for the last time; durable on return.

        Call `settle` once the backend has its dead letter: until then the task is pending.
        """
        self._failing.add(task_id)
        error = cut_error(attempt.error)  # a record has room for 65,535 bytes
        failed = FailedTaskRecord(self._clock.now_ms(), attempt.attempts, error)
        self._put(task_id, failed)
        await self._publisher.commits.durable()
        return failed

    def begin_again(self, task_id: str) -> None:
        """Call when the backend gives out a task that has failed: it is pending until `settle`.

        It may have been retried, or the process ended before the backend had the dead letter.
        """
        self._failing.add(task_id)

    def is_failing(self, task_id: str) -> bool:
        """Whether the backend may still have a task to apply whose record says that it failed."""
        return task_id in self._failing or task_id in self._retried

    @contextmanager
    def moving_back(self, task_ids: Collection[str]) -> Iterator[None]:
        """Enter it while the backend moves dead letters back: their tasks are pending from then on.

        Where it is left with an error, they have failed as before until the backend gives them out.
        Nothing is written: their records say that they have failed until they are applied.
        """
        # No end of a task with another ID is settled.
        own = list(filter(is_task_id, task_ids))
        self._retried.update(dict.fromkeys(own))
        for _ in range(len(self._retried) - RETRIED_MAX):
            del self._retried[next(iter(self._retried))]
        try:
            yield
        except BaseException:
            for task_id in own:
                self._retried.pop(task_id, None)
            raise

    def _put(self, task_id: str, record: TaskRecord) -> None:
        self._entering.discard(task_id)
        key = task_key(parse_task_id(task_id).ulid)
        self._publisher.put([(key, encode_task_record(record))])

    # --- Calls that wait ----------------------------------------------------

    def wait(self, task_id: str) -> asyncio.Future[Outcome]:
        """The outcome that this process settles next; pass it to `leave` in any case."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(task_id, []).append(future)
        return future

    def leave(self, task_id: str, future: asyncio.Future[Outcome]) -> None:
        waiting = self._waiting.get(task_id, [])
        if future in waiting:
            waiting.remove(future)
            if not waiting:
                del self._waiting[task_id]

    def settle(self, task_id: str, outcome: Outcome) -> None:
        """Answer the calls that wait: the outcome is durable."""
        self._attempts.pop(task_id, None)
        self._failing.discard(task_id)
        self._retried.pop(task_id, None)
        for future in self._waiting.pop(task_id, []):
            if not future.done():
                future.set_result(outcome)

    def note_attempt(self, task_id: str, attempt: Attempt) -> None:
        """Keep the error of a task that will be tried again."""
        if len(self._attempts) >= ERRORS_MAX and task_id not in self._attempts:
            del self._attempts[next(iter(self._attempts))]
        self._attempts[task_id] = attempt

    def last_attempt(self, task_id: str) -> Attempt | None:
        return self._attempts.get(task_id)

    def may_be_tried_again(self, task_id: str) -> bool:
        """Whether a task that failed in this process may wait for another attempt."""
        return task_id in self._attempts or len(self._attempts) >= ERRORS_MAX

    # --- Their end ----------------------------------------------------------

    async def sweep(self, finished_ms: int) -> int:
        """Remove the records of tasks that were applied `KEPT_MS` earlier; returns how many.

        The backend has finished all tasks accepted before `finished_ms`, except delayed ones and
        those of lost connections. Keys begin with the time of acceptance, and every outcome is
        later. So a sweep begins at the first record that the one before it left, and ends at what
        was accepted since.
        """
        over_ms = min(self._clock.now_ms(), finished_ms) - KEPT_MS
        first_kept: bytes | None = None
        last = self._swept
        count = 0
        async for rows in self._database.scan(*task_range(last), durable=True):
            old: dict[bytes, bytes] = {}
            for key, value in rows:
                last = parse_task_key(key)
                if int.from_bytes(last[:6], "big") >= over_ms:
                    first_kept = first_kept or last
                    break
                record = decode_task_record(value)
                is_old = isinstance(record, AppliedTask) and record.at_ms < over_ms
                if isinstance(record, AppliedTask) and is_old and not record.has_failed:
                    old[last] = record.request
                else:
                    first_kept = first_kept or last
            if old:
                await self._remove(old)
                count += len(old)
            if int.from_bytes(last[:6], "big") >= over_ms:
                break
        # A scan begins behind the ULID that it is given.
        self._swept = _before(first_kept) if first_kept is not None else last
        return count

    async def _remove(self, tasks: Mapping[bytes, bytes]) -> None:
        """Remove the records of tasks; `tasks` has the digests of their request IDs, by ULID.

        The record of a request ID goes with the task that it names: of an ID that was used again
        after its window that is a later one, which may be applied meanwhile.
        """
        requests = [(task_request_key(one), ulid) for ulid, one in tasks.items() if one]
        self._noted = set()
        try:
            await self._publisher.commits.durable()  # a read passes over what is not
            keys = [key for key, _ in requests]
            named = await self._database.get_many(keys, durable=True)
            over = [
                key
                for (key, ulid), value in zip(requests, named, strict=True)
                if value is not None and decode_task_request(value).ulid == ulid
            ]
            over = [key for key in over if key not in self._noted]
        finally:
            self._noted = None
        self._publisher.put([(key, None) for key in (*map(task_key, tasks), *over)])
        await self._publisher.commits.durable()


class TaskWaiting(Waiting):
    """A publish that is a task: its outcome goes into its commit."""

    __slots__ = ("_before", "_outcomes", "_task_id", "outcome")

    def __init__(
        self,
        accepted: Accepted,
        task_id: str,
        outcomes: TaskOutcomes,
        before: TaskRecord | None = None,
    ) -> None:
        """`outcome` is set when the commit is made; `before` is what was known of the task."""
        super().__init__(accepted)
        self.outcome: AppliedTask | None = None
        self._task_id = task_id
        self._outcomes = outcomes
        self._before = before

    def answer(self, now_ms: int) -> Answered:
        """Called while the commit is drained, so that what is put is in it."""
        answered = super().answer(now_ms)
        request_id = self.accepted.request_id
        self.outcome = self._outcomes.note(self._task_id, answered, self._before, request_id)
        return answered


def has_failed(record: TaskRecord | None) -> bool:
    """Whether a dead letter of a task may be left in the backend."""
    match record:
        case FailedTaskRecord():
            return True
        case AppliedTask() | WaitingTask():
            return record.has_failed
    return False


def _digest_of(request_id: str) -> bytes:
    """Of a cryptographic hash: an ID that another caller makes up has another one."""
    return hashlib.blake2b(request_id.encode(), digest_size=REQUEST_DIGEST_BYTES).digest()


def _before(ulid: bytes) -> bytes:
    return (int.from_bytes(ulid, "big") - 1).to_bytes(len(ulid), "big")
