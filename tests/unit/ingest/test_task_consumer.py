"""What the consumer counts as an attempt of a task, with a backend that gives out a list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar, cast

import pytest

from libs.events.tasks import WriteTask
from libs.serving.telemetry import Telemetry
from libs.storage.database.commits import AT_ONCE_BYTES
from libs.storage.database.roots import Root, open_root
from libs.storage.database.slate import Batch
from libs.storage.layout.own_keys import task_request_key
from libs.storage.layout.primitives import KeyRange
from libs.storage.records.task_records import (
    AppliedTask,
    TaskRequestRecord,
    decode_task_request,
    encode_task_request,
)
from services.ingest import wire
from services.ingest.batches import Accepted
from services.ingest.shard import Shard
from services.ingest.tasks.backend import TaskBackend
from services.ingest.tasks.bodies import TaskBodies, within_task
from services.ingest.tasks.consumer import TaskConsumer
from services.ingest.tasks.outcomes import KEPT_MS, TaskOutcomes
from services.ingest.tasks.plain import STEP
from services.ingest.tasks.traces import TaskTraces
from services.ingest.write.publishing import STEP_BYTES
from slatemq._admin.task_ids import TaskIds, task_id_of
from slatemq.v1.ingest_pb2 import PublishRequest, PublishRun
from tests.integration.waiting import eventually
from tests.manual_clock import ManualClock
from tests.unit.ingest.shards import opened, sequences

T = TypeVar("T")

UNSTORABLE = b"unstorable"


class Listed:
    """A backend with these tasks.

    Attributes:
        failed: The tasks of which an attempt was counted, and why.
        completed: Those that are finished.
    """

    def __init__(self, tasks: list[WriteTask]) -> None:
        self._tasks = tasks
        self._more = asyncio.Event()
        self.failed: dict[str, str] = {}
        self.completed: list[str] = []
        self.is_empty = asyncio.Event()

    def add(self, task: WriteTask) -> None:
        self._tasks.append(task)
        self.is_empty.clear()
        self._more.set()

    async def until_done(self, call: Callable[[Listed], Awaitable[T]]) -> T:
        return await call(self)

    async def dequeue_task(self) -> WriteTask:
        while not self._tasks:
            self._more.clear()
            self.is_empty.set()
            await self._more.wait()
        return self._tasks.pop(0)

    async def complete_task(self, task_id: str) -> None:
        self.completed.append(task_id)

    async def fail_task(self, task_id: str, error: str) -> bool:
        self.failed[task_id] = error
        return True


class Rig:
    """A consumer of a shard's tasks."""

    def __init__(self, root: Root, shard: Shard) -> None:
        self.shard = shard
        self.bodies = TaskBodies(root.objects, 0, "none")
        self.outcomes = TaskOutcomes(shard.database, shard.publisher, shard.clock)
        self._ids = TaskIds(0)

    def task(self, request: PublishRequest, attempts: int, max_retries: int) -> WriteTask:
        task_id = self._ids.make(self.shard.clock.now_ms())
        return WriteTask(
            task_id=task_id,
            operation="Publish",
            created_at="2026-02-22T12:00:00.000Z",
            attempts=attempts,
            max_retries=max_retries,
            payload=within_task(request.SerializeToString()),
        )

    def consumer(self, backend: Listed) -> TaskConsumer:
        shard = self.shard
        return TaskConsumer(
            shard.publisher,
            cast("TaskBackend", backend),
            self.bodies,
            self.outcomes,
            accept,
            TaskTraces(Telemetry()),
            shard.clock,
        )


def accept(body: bytes) -> Accepted:
    rules = wire.Rules(64 << 20, 3600, 900_000)
    accepted = wire.accept(PublishRequest.FromString(body), rules)
    if accepted.payloads[0].startswith(UNSTORABLE):
        accepted.columns.retention_s = [1 << 32]  # which has 32 bits on disk
    return accepted


def request_of(payload: bytes, request_id: str = "") -> PublishRequest:
    return PublishRequest(runs=[PublishRun(payloads=[payload])], request_id=request_id)


async def failed_by_then(
    backend: Listed, first: WriteTask, running: asyncio.Task[None]
) -> dict[str, str]:
    """The tasks of which an attempt was counted after that one's, up to the end of the process."""
    await eventually(lambda: first.task_id in backend.failed)
    for _ in range(100):  # Steps that the others would need, too.
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    return backend.failed


async def test_tasks_behind_one_that_cannot_be_encoded_lose_no_attempt_by_it() -> None:
    root = open_root("memory:///")
    async with opened(root) as shard:
        # Given tasks that have failed before: the first cannot be encoded, the next one is stored
        rig = Rig(root, shard)
        stored = request_of(b"stored", "known")
        await shard.publisher.publish(accept(stored.SerializeToString()))
        requests = [request_of(UNSTORABLE), stored, *[request_of(b"good")] * 5]
        tasks = [rig.task(one, attempts=1, max_retries=1) for one in requests]
        backend = Listed([*tasks])

        # When all wait for the commit of the first, and it fails
        async with shard.publisher.commits.hold:
            running = asyncio.create_task(rig.consumer(backend).run())
            await backend.is_empty.wait()

        # Then the attempt is of that one alone, and it is still so when the process ends
        failed = await failed_by_then(backend, tasks[0], running)
        assert failed.keys() == {tasks[0].task_id}
        assert backend.completed == []
        assert "log entry" in failed[tasks[0].task_id]


async def test_a_task_in_the_commit_behind_one_that_fails_loses_no_attempt_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = open_root("memory:///")
    async with opened(root) as shard:
        is_written, goes_on = asyncio.Event(), asyncio.Event()
        write = shard.database.write

        async def held(batch: Batch, alone: bool) -> bool:
            is_written.set()
            await goes_on.wait()
            return await write(batch, alone)

        # Given a task that cannot be encoded, so long that this is tried as its commit is written
        monkeypatch.setattr(shard.database, "write", held)
        rig = Rig(root, shard)
        long = UNSTORABLE + bytes(STEP_BYTES)
        first = rig.task(request_of(long), attempts=0, max_retries=0)
        backend = Listed([first])
        running = asyncio.create_task(rig.consumer(backend).run())
        await is_written.wait()

        # When another one waits for the next commit meanwhile
        in_flight_bytes = shard.publisher.commits.uncommitted_bytes
        backend.add(rig.task(request_of(b"good"), attempts=0, max_retries=0))
        await backend.is_empty.wait()
        await eventually(lambda: shard.publisher.commits.uncommitted_bytes > in_flight_bytes)
        goes_on.set()

        # Then the attempt is of the first alone
        failed = await failed_by_then(backend, first, running)
        assert failed.keys() == {first.task_id}
        assert backend.completed == []
        assert "log entry" in failed[first.task_id]


async def test_a_task_in_the_commit_before_one_that_fails_loses_no_attempt_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = open_root("memory:///")
    async with opened(root) as shard:
        is_written, goes_on = asyncio.Event(), asyncio.Event()

        async def held() -> None:
            is_written.set()
            await goes_on.wait()

        # Given a task whose commit is written, and too large to be durable at once
        monkeypatch.setattr(shard.database, "flush", held)
        rig = Rig(root, shard)
        large = request_of(b"good" + bytes(AT_ONCE_BYTES))
        backend = Listed([rig.task(large, attempts=0, max_retries=0)])
        running = asyncio.create_task(rig.consumer(backend).run())
        await is_written.wait()

        # When the next commit cannot be encoded, then the attempt is of its task alone
        bad = rig.task(request_of(UNSTORABLE), attempts=0, max_retries=0)
        backend.add(bad)
        failed = await failed_by_then(backend, bad, running)
        goes_on.set()
        assert failed.keys() == {bad.task_id}
        assert backend.completed == []


async def test_tasks_that_are_refused_as_they_are_stored_fail_each_by_itself() -> None:
    root = open_root("memory:///")
    async with opened(root) as shard:
        # Given a shard that is being drained
        shard.publisher.is_draining = True
        rig = Rig(root, shard)
        tasks = [
            rig.task(request_of(b"%d" % number), attempts=0, max_retries=1)
            for number in range(2 * STEP)
        ]
        backend = Listed([*tasks])
        running = asyncio.create_task(rig.consumer(backend).run())

        # Then each task has failed once, and the shard takes them once it is no more drained
        await eventually(lambda: len(backend.failed) == len(tasks))
        assert all("is being drained" in error for error in backend.failed.values())
        shard.publisher.is_draining = False
        good = rig.task(request_of(b"good"), attempts=0, max_retries=1)
        backend.add(good)
        await eventually(lambda: bool(backend.completed))
        assert backend.completed == [good.task_id]
        running.cancel()
        await asyncio.wait([running])


async def test_tasks_wait_for_room_instead_of_failing() -> None:
    root = open_root("memory:///")
    async with opened(root, uncommitted_bytes_max=1 << 16) as shard:
        rig = Rig(root, shard)
        tasks = [rig.task(request_of(bytes(40_000)), attempts=0, max_retries=0) for _ in range(6)]
        backend = Listed([*tasks])
        running = asyncio.create_task(rig.consumer(backend).run())

        await eventually(lambda: len(backend.completed) == len(tasks))

        assert backend.failed == {}
        first_ids = []
        for task in tasks:
            record = await rig.outcomes.find(task.task_id)
            assert isinstance(record, AppliedTask)
            first_ids.append(record.first_message_id)
        assert first_ids == sorted(first_ids)
        running.cancel()
        await asyncio.wait([running])


START_MS = 1_771_761_600_000
DAY_MS = 24 * 3600 * 1000


@asynccontextmanager
async def consuming(root: Root, clock: ManualClock) -> AsyncIterator[tuple[Rig, Listed]]:
    async with opened(root, clock) as shard:
        rig, backend = Rig(root, shard), Listed([])
        running = asyncio.create_task(rig.consumer(backend).run())
        yield rig, backend
        running.cancel()
        await asyncio.wait([running])


async def finish(backend: Listed, task: WriteTask) -> None:
    """Give out a task; wait until it is completed or has failed."""
    backend.add(task)
    ended = [*backend.completed, *backend.failed]
    await eventually(lambda: len([*backend.completed, *backend.failed]) > len(ended))


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_task_that_waits_for_days_is_not_applied_where_its_repeat_was(
    restarted: bool,
) -> None:
    root, clock = open_root("memory:///"), ManualClock(START_MS)
    async with consuming(root, clock) as (rig, backend):
        # Given a publish without an answer that is repeated, and whose repeat is applied first
        request = request_of(b"once", "its ID")
        waiting = rig.task(request, attempts=0, max_retries=0)
        clock.advance(1000)
        repeat = rig.task(request, attempts=0, max_retries=0)
        await finish(backend, repeat)
        clock.advance(3 * DAY_MS)
        if not restarted:
            # When the first one comes days later, then it has the answer of its repeat
            await finish(backend, waiting)
            await check_once(rig, backend, waiting, repeat)
    if restarted:  # or does so in another process
        async with consuming(root, clock) as (rig, backend):
            await finish(backend, waiting)
            await check_once(rig, backend, waiting, repeat)


async def check_once(rig: Rig, backend: Listed, *tasks: WriteTask) -> None:
    assert backend.failed == {}
    assert await sequences(rig.shard) == [1]
    records = [await rig.outcomes.find(task.task_id) for task in tasks]
    assert all(isinstance(record, AppliedTask) for record in records)
    (ids,) = {(one.first_message_id, one.message_count) for one in records if one}  # type: ignore[union-attr]
    assert ids[1] == 1


async def test_a_late_task_with_the_request_id_of_other_content_fails() -> None:
    clock = ManualClock(START_MS)
    async with consuming(open_root("memory:///"), clock) as (rig, backend):
        waiting = rig.task(request_of(b"first", "its ID"), attempts=0, max_retries=0)
        other = rig.task(request_of(b"second", "its ID"), attempts=0, max_retries=0)
        await finish(backend, other)
        clock.advance(DAY_MS)
        await finish(backend, waiting)
        assert "other content" in backend.failed[waiting.task_id]
        assert await sequences(rig.shard) == [1]


async def test_a_request_id_is_free_again_after_its_window_though_its_next_task_is_late() -> None:
    clock = ManualClock(START_MS)
    async with consuming(open_root("memory:///"), clock) as (rig, backend):
        request = request_of(b"daily", "its ID")
        await finish(backend, rig.task(request, attempts=0, max_retries=0))
        # Given a day later the same request, which waits for long
        clock.advance(DAY_MS)
        again = rig.task(request, attempts=0, max_retries=0)
        clock.advance(DAY_MS)
        await rig.shard.publisher.publish(accept(request_of(b"other").SerializeToString()))
        await finish(backend, again)
        assert await sequences(rig.shard) == [1, 2, 3]


async def test_the_request_id_of_a_task_is_forgotten_with_its_record() -> None:
    clock = ManualClock(START_MS)
    async with consuming(open_root("memory:///"), clock) as (rig, backend):
        task = rig.task(request_of(b"once", "its ID"), attempts=0, max_retries=0)
        await finish(backend, task)
        span = KeyRange(task_request_key(bytes(16)), task_request_key(b"\xff" * 16))
        kept = [row async for rows in rig.shard.database.scan(*span) for row in rows]
        assert len(kept) == 1
        clock.advance(KEPT_MS + 1)
        assert await rig.outcomes.sweep(clock.now_ms()) == 1
        assert [rows async for rows in rig.shard.database.scan(*span)] == []


async def test_a_request_id_that_was_used_again_is_known_for_as_long_as_its_later_task() -> None:
    clock = ManualClock(START_MS)
    async with consuming(open_root("memory:///"), clock) as (rig, backend):
        # Given two tasks with one request ID, the second one days after the window of the first
        request = request_of(b"daily", "its ID")
        first = rig.task(request, attempts=0, max_retries=0)
        await finish(backend, first)
        clock.advance(KEPT_MS + 1)
        await rig.shard.publisher.publish(accept(request_of(b"other").SerializeToString()))
        later = rig.task(request, attempts=0, max_retries=0)
        await finish(backend, later)

        # When the record of the first one is removed, then the ID names the second one
        assert await rig.outcomes.sweep(clock.now_ms()) == 1
        assert await rig.outcomes.find(first.task_id) is None
        span = KeyRange(task_request_key(bytes(16)), task_request_key(b"\xff" * 16))
        ((_, value),) = [
            row async for rows in rig.shard.database.scan(*span, durable=True) for row in rows
        ]
        assert task_id_of(decode_task_request(value).ulid) == later.task_id

        # And goes with it
        clock.advance(KEPT_MS + 1)
        assert await rig.outcomes.sweep(clock.now_ms()) == 1
        assert [rows async for rows in rig.shard.database.scan(*span, durable=True)] == []


async def test_a_request_id_that_is_used_again_as_its_first_task_is_removed_stays_known() -> None:
    clock = ManualClock(START_MS)
    async with consuming(open_root("memory:///"), clock) as (rig, backend):
        # Given a task whose record may be removed, and a commit that will write its request's
        task = rig.task(request_of(b"daily", "its ID"), attempts=0, max_retries=0)
        await finish(backend, task)
        clock.advance(KEPT_MS + 1)
        database, publisher = rig.shard.database, rig.shard.publisher
        span = KeyRange(task_request_key(bytes(16)), task_request_key(b"\xff" * 16))
        ((key, _),) = [row async for rows in database.scan(*span, durable=True) for row in rows]
        later = encode_task_request(TaskRequestRecord(bytes(16), bytes(16)))
        async with publisher.commits.hold:
            publisher.put([(key, later)])

            # When that is removed before this commit is made
            sweeping = asyncio.create_task(rig.outcomes.sweep(clock.now_ms()))
            await asyncio.wait([sweeping], timeout=0.1)

        # Then the row of the later one stays
        assert await sweeping == 1
        assert await database.get(key, durable=True) == later
