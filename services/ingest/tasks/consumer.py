"""Applies this shard's write tasks, each once, in the order in which the backend gives them out.

::

    dequeue ─▶ known already? ─▶ body ─▶ publish, its outcome in the same commit ─▶ remove the body,
       ▲            │ yes                    │ refused                                 complete
       └── retry ───┼────────────────────────┴─▶ count the attempt, or dead letter
                    └────────────────────────────────────────────────────────────────▶ complete

A kill between any two of these leads back to the beginning with the same task. The consumer waits
for a store or a backend that is down; that costs no attempt, and neither does a shard that is lost.
A task whose commit cannot be encoded does cost one, though the process ends (decision 0056).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext, suppress
from typing import Any, Final, TypeVar

from libs.events.retrying import Outage
from libs.events.tasks import WriteTask, cut_error
from libs.storage.database.clocks import Clock
from libs.storage.errors import StorageError, StoreFailed, StoreUnavailable, Unstorable
from libs.storage.records.task_records import AppliedTask, FailedTaskRecord, TaskRecord
from services.ingest.batches import Accepted
from services.ingest.tasks.backend import TaskBackend
from services.ingest.tasks.bodies import ENQUEUE_MS_MAX, TaskBodies
from services.ingest.tasks.outcomes import Attempt, TaskOutcomes, TaskWaiting
from services.ingest.tasks.plain import PlainTasks
from services.ingest.tasks.traces import TaskTraces
from services.ingest.write.line import Line
from services.ingest.write.publishing import Publisher
from services.ingest.write.request_ids import Answered
from slatemq._admin.task_ids import is_task_id, parse_task_id
from slatemq._cancelling import end_all
from slatemq.errors import InvalidArgument, ResourceExhausted, SlateMQError, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

OPERATION: Final = "Publish"

SHARD_FULL: Final = "SHARD_FULL"

AT_ONCE_MAX: Final = 256
"""Tasks applied at the same time: they share commits, which may take 100 ms each."""

SETTLE_MS: Final = 15 * 60_000
"""How long after the start of this process tasks of an earlier one may take to come again."""

UNSTORABLE_END_S: Final = 5.0
"""How long the end of the consumer waits for the backend to count attempts that ended it."""

BYTES_MAX: Final = 64 << 20
"""Memory of the tasks being applied, unless one alone needs more."""


class TaskConsumer:
    """The consumer of one shard; `run` works until it is cancelled."""

    def __init__(
        self,
        publisher: Publisher,
        backend: TaskBackend,
        bodies: TaskBodies,
        outcomes: TaskOutcomes,
        accept: Callable[[bytes], Accepted],
        traces: TaskTraces,
        clock: Clock,
    ) -> None:
        """`accept` checks a body."""
        self._publisher = publisher
        self._backend = backend
        self._bodies = bodies
        self._outcomes = outcomes
        self._accept = accept
        self._traces = traces
        self._running: dict[str, asyncio.Task[FailedTaskRecord | None]] = {}
        self._unstorable: set[str] = set()
        self._since_ms: dict[str, int] = {}
        self._began_ms = clock.now_ms()
        self._newest_ms = 0
        self._clock = clock
        self.held_bytes = 0  # of the tasks being applied
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._again = asyncio.Lock()
        self._line = Line()
        self._plain = PlainTasks(
            publisher,
            outcomes,
            lambda task: self._start(task, self._complete(task)),
            self._apply_alone,
        )

    @property
    def finished_ms(self) -> int:
        """Tasks accepted before this time are finished, since backends keep their order.

        Delayed tasks and those of a lost connection may still come later. 0: unknown.
        """
        oldest_ms = next(iter(self._since_ms.values()), self._newest_ms)
        return min(oldest_ms, self._newest_ms)

    @property
    def is_idle(self) -> bool:
        return not self._running

    def is_running(self, task_id: str) -> bool:
        return task_id in self._running

    async def has_passed(self, task_id: str, delay_ms: int = 0) -> bool:
        """Whether the backend would have given out a task by now if it had it.

        Pass the delay of a failed attempt where the task may have failed in an earlier process.
        Raises Unavailable (BACKEND_DOWN).
        """
        accepted_at_ms = parse_task_id(task_id).accepted_at_ms
        is_settled = self._clock.now_ms() >= self._began_ms + SETTLE_MS + delay_ms
        if is_settled and accepted_at_ms + ENQUEUE_MS_MAX < self.finished_ms:
            return True
        return self.is_idle and not (await self._backend.connected.stats()).pending_tasks

    async def run(self) -> None:
        """Apply tasks until cancelled. Raises the error of a failed commit."""
        try:
            while True:
                await self._wait_for_capacity(0)
                task = await self._backend.until_done(lambda backend: backend.dequeue_task())
                await self._check_running()
                if task is None:
                    continue
                # The backend delivers a task again after a long silence, or when it has it twice:
                # each delivery is finished once the outcome of the first one is known.
                failed: FailedTaskRecord | None = None
                while (running := self._running.get(task.task_id)) is not None:
                    await asyncio.wait([running])
                    is_over = not running.cancelled() and running.exception() is None
                    failed = running.result() if is_over else None
                if failed is None:
                    await self._begin(task)
                else:  # its callers know that: it is not applied after all
                    await self._end_failed(task.task_id, failed.error)
        finally:
            await self._end()

    async def _end(self) -> None:
        unstorable = [self._running[task_id] for task_id in self._unstorable]
        if unstorable:
            await asyncio.wait(unstorable, timeout=UNSTORABLE_END_S)
        await end_all(self._running.values())

    async def _wait_for_capacity(self, size_bytes: int) -> None:
        """Wait until one more task of this size may begin."""
        while len(self._running) >= AT_ONCE_MAX or (
            self.held_bytes and self.held_bytes + size_bytes > BYTES_MAX
        ):
            self._changed.clear()
            await self._changed.wait()

    async def _begin(self, task: WriteTask) -> None:
        """Read what a task needs, one task after the other, so that tasks keep their order."""
        size_bytes = _size_of(task)
        await self._wait_for_capacity(size_bytes)
        error: Exception | None = None
        known: TaskRecord | None = None
        accepted: Accepted | None = None
        try:
            known = await self._patiently(lambda: self._outcomes.find_first(task.task_id))
            if isinstance(known, FailedTaskRecord):
                self._outcomes.begin_again(task.task_id)
            if not isinstance(known, AppliedTask):
                accepted = await self._patiently(lambda: self._read(task))
        except Exception as refused:  # noqa: BLE001 - noted with the attempt
            error = refused
        self.held_bytes += size_bytes
        self._since_ms[task.task_id] = self._clock.now_ms()
        ending: asyncio.Task[Any] | None = None
        if accepted is not None and known is None and self._is_plain(task):
            ending = self._plain.enqueue(task, accepted)
        if ending is not None:
            self._running[task.task_id] = ending
        else:
            self._start(task, self._apply(task, known, accepted, error))
        # Let publishes that came meanwhile be accepted first.
        await asyncio.sleep(0)

    def _is_plain(self, task: WriteTask) -> bool:
        """Whether a task waits for no other one, is traced nowhere, and leaves no body behind."""
        is_next = not (task.attempts or self._line.is_taken)
        return is_next and not self._traces.is_on and "data_ref" not in task.payload

    def _apply_alone(
        self, task: WriteTask, accepted: Accepted | None, error: Exception | None
    ) -> None:
        if isinstance(error, Unstorable):
            self._unstorable.add(task.task_id)
        self._start(task, self._apply(task, None, accepted, error))

    def _start(self, task: WriteTask, ending: Coroutine[Any, Any, FailedTaskRecord | None]) -> None:
        running = asyncio.create_task(ending)
        self._running[task.task_id] = running
        running.add_done_callback(lambda done: self._ended(task, done))

    def _ended(self, task: WriteTask, done: asyncio.Task[Any]) -> None:
        task_id = task.task_id
        del self._running[task_id], self._since_ms[task_id]
        self._unstorable.discard(task_id)
        self.held_bytes -= _size_of(task)
        self._changed.set()
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("task %s will come again: %s", task_id, error, exc_info=error)

    async def _read(self, task: WriteTask) -> Accepted:
        if task.operation != OPERATION:
            raise InvalidArgument("operation", f"must be {OPERATION}, not {task.operation!r}")
        return self._accept(await self._bodies.get(task.payload))

    async def _apply(
        self,
        task: WriteTask,
        known: TaskRecord | None,
        accepted: Accepted | None,
        error: Exception | None,
    ) -> FailedTaskRecord | None:
        """Bring a task to its end; returns what its callers get if it failed for the last time."""
        if isinstance(known, AppliedTask):
            self._outcomes.settle(task.task_id, known)
        else:
            try:
                if accepted is None:
                    assert error is not None, "neither a body nor why not"
                    raise error
                with self._traces.applying(task, accepted):
                    outcome = await self._store(task, accepted, known)
            except (SlateMQError, StorageError) as refused:
                if isinstance(refused, Unstorable):
                    self._unstorable.add(task.task_id)
                return await self._fail(task, str(refused))
            except Exception as fault:  # a bug of ours must not bring the task back for ever
                log.exception("applying task %s failed", task.task_id)
                return await self._fail(task, repr(fault))
            self._outcomes.settle(task.task_id, outcome)
        async with self._turn:  # A commit ends many at once: let publishes come between them.
            await asyncio.sleep(0)
        await self._complete(task)
        return None

    async def _complete(self, task: WriteTask) -> None:
        await self._patiently(lambda: self._bodies.remove(task.payload))
        await self._backend.until_done(lambda backend: backend.complete_task(task.task_id))
        accepted_at_ms = parse_task_id(task.task_id).accepted_at_ms
        if accepted_at_ms >= self._began_ms + SETTLE_MS:
            self._newest_ms = max(self._newest_ms, accepted_at_ms)

    async def _store(
        self, task: WriteTask, accepted: Accepted, known: TaskRecord | None
    ) -> AppliedTask:
        task_id = task.task_id

        async def publish() -> tuple[Answered, AppliedTask | None]:
            repeated = await self._outcomes.find_repeated(task_id, accepted)
            if repeated is not None:
                return repeated, None
            # New for each try: a refusal, and the time its blobs were begun, belong to one try.
            one_try = self._traces.of_one_try(accepted)
            waiting = TaskWaiting(one_try, task_id, self._outcomes, known)
            waiting.place = place
            try:
                answered = await self._publisher.publish_waiting(waiting, self._traces.complete)
            except Unstorable:
                if not waiting.was_drained:  # another one's commit failed: it costs no attempt
                    await self._check_running()
                raise
            return answered, waiting.outcome

        # Of tasks that failed before, one at a time: where its commit cannot be encoded, no other
        # one of them is in it, so only that one fails each time. They have lost their places.
        line = Line() if task.attempts else self._line
        with line.place() as place:
            async with self._again if task.attempts else nullcontext():
                answered, applied = await self._patiently(publish)
        if applied is not None:
            return applied
        # Another publish of the same request ID came first: its messages are this task's.
        await self._check_running()  # no commit would have what is put now
        outcome = self._outcomes.note(task_id, answered, known)
        await self._patiently(self._publisher.commits.durable)
        return outcome

    async def _fail(self, task: WriteTask, error: str) -> FailedTaskRecord | None:
        error = cut_error(error)
        attempt = Attempt(task.attempts + 1, error)
        self._outcomes.note_attempt(task.task_id, attempt)
        failed: FailedTaskRecord | None = None
        if not task.has_retries_left:
            log.warning("task %s failed for the last time: %s", task.task_id, error)
            # No record has a key for an ID that no ingest made: its dead letter says it all.
            if is_task_id(task.task_id) and task.task_id not in self._unstorable:
                failed = await self._patiently(lambda: self._outcomes.fail(task.task_id, attempt))
        if not await self._end_failed(task.task_id, error):
            return None  # it comes again, and is pending until then: it may still be applied
        if failed is not None:  # its dead letter is there for the callers that get the answer
            self._outcomes.settle(task.task_id, failed)
        return failed

    async def _end_failed(self, task_id: str, error: str) -> bool:
        """Count an attempt in the backend; False where the delivery was lost before that."""
        return await self._backend.until_done(lambda backend: backend.fail_task(task_id, error))

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call while the store is down or has no room; raises other errors."""
        outage = Outage(log, "the store")
        while True:
            try:
                done = await call()
            except (StoreUnavailable, Unavailable, ResourceExhausted) as error:
                await self._check_running()
                if isinstance(error, ResourceExhausted) and error.reason == SHARD_FULL:
                    raise
                await outage.wait(error)
            except Unstorable:
                raise
            except StorageError as error:
                if isinstance(error, StoreFailed):  # a read may know first that the shard is lost
                    with suppress(StorageError):
                        await self._publisher.commits.prove_ownership()
                await self._check_running()
                raise
            else:
                outage.end()
                return done

    async def _check_running(self) -> None:
        """After a failed commit, wait: the process is about to end, and this with it."""
        if self._publisher.commits.failed is not None:
            await asyncio.Event().wait()


def _size_of(task: WriteTask) -> int:
    """Memory of a task until it is complete: its messages, and a body that travels in it.

    Backends keep that body until then, some of them also in the encoded task.
    """
    size, body = task.payload.get("content_length"), task.payload.get("body")
    encoded_bytes = 2 * len(body) if isinstance(body, str) else 0
    return encoded_bytes + (size if isinstance(size, int) and size > 0 else 0)
