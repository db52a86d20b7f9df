"""In which order the tasks of a backend are stored, whatever each needs before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from libs.events.tasks import WriteTask
from libs.storage.database.roots import Root
from libs.storage.errors import StoreUnavailable
from libs.storage.objects.small_objects import Objects
from libs.storage.records.task_records import AppliedTask
from services.ingest.batches import HASH_INLINE_BYTES_MAX
from services.ingest.shard import Shard
from services.ingest.tasks.outcomes import TaskOutcomes
from slatemq.v1.ingest_pb2 import PublishRequest, PublishRun
from tests.integration.waiting import eventually
from tests.manual_clock import ManualClock
from tests.unit.ingest.shards import batch, opened
from tests.unit.ingest.test_task_consumer import Listed, Rig, request_of

LARGE = bytes(100_000)
HELD = b"held" + LARGE
HOUR_MS = 60 * 60 * 1000


class Completed(Listed):
    """A backend with these tasks.

    Attributes:
        completed: The IDs of those that were applied.
        counts: While it is not set, failed attempts wait to be counted.
    """

    def __init__(self, tasks: Sequence[WriteTask]) -> None:
        super().__init__([*tasks])
        self.completed: list[str] = []
        self.counts = asyncio.Event()
        self.counts.set()

    async def complete_task(self, task_id: str) -> None:
        self.completed.append(task_id)

    async def fail_task(self, task_id: str, error: str) -> bool:
        await self.counts.wait()
        return await super().fail_task(task_id, error)

    async def begun(self) -> None:
        """All are given out, and each has gone as far as it can by itself."""
        await self.is_empty.wait()
        for _ in range(100):
            await asyncio.sleep(0)


class BlobStore(Objects):
    """A real store.

    Attributes:
        writes: How many payloads were to be written.
        failures: How many of the next ones are refused, since it is down.
        gate: Payloads that begin as `HELD` wait for it.
    """

    def __init__(self, objects: Objects) -> None:
        vars(self).update(vars(objects))
        self.writes = self.failures = 0
        self.gate = asyncio.Event()

    async def put(self, path: str, data: bytes) -> None:
        if path.startswith("blobs/"):
            self.writes += 1
            if self.failures:
                self.failures -= 1
                raise StoreUnavailable("the store is down")
            if data.startswith(HELD[:4]):
                await self.gate.wait()
        await super().put(path, data)


@pytest.fixture
def blobs(root: Root) -> BlobStore:
    root.objects = objects = BlobStore(root.objects)
    return objects


@asynccontextmanager
async def consuming(root: Root, shard: Shard, backend: Listed) -> AsyncIterator[None]:
    running = asyncio.create_task(Rig(root, shard).consumer(backend).run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])


async def tasks_of(root: Root, shard: Shard, *requests: PublishRequest) -> list[WriteTask]:
    rig = Rig(root, shard)
    return [rig.task(request, attempts=0, max_retries=0) for request in requests]


async def first_ids(shard: Shard, tasks: Sequence[WriteTask]) -> list[int]:
    """The IDs of their first messages; 0 = not applied."""
    outcomes = TaskOutcomes(shard.database, shard.publisher, shard.clock)
    found = [await outcomes.find(task.task_id) for task in tasks]
    return [one.first_message_id if isinstance(one, AppliedTask) else 0 for one in found]


async def assert_stored_in_order(
    shard: Shard, backend: Completed, tasks: Sequence[WriteTask]
) -> None:
    await eventually(lambda: {task.task_id for task in tasks} <= {*backend.completed})
    ids = await first_ids(shard, tasks)
    assert ids == sorted(ids)


async def test_tasks_are_stored_in_the_order_in_which_they_were_given_out(
    root: Root, blobs: BlobStore
) -> None:
    async with opened(root) as shard:
        # Given tasks that need an upload, nothing, a key, or a long hash
        keyed = PublishRequest(runs=[PublishRun(payloads=[b"k"], dedupe_keys=["k"])])
        parts = [bytes(1 << 10)] * ((HASH_INLINE_BYTES_MAX >> 10) + 1)
        hashed = PublishRequest(runs=[PublishRun(payloads=parts)], request_id="r")
        each = [request_of(HELD), request_of(b"1"), keyed, request_of(b"2"), hashed]
        tasks = await tasks_of(root, shard, *each, request_of(HELD), request_of(b"3"))
        backend = Completed(tasks)

        # When the uploads, which are made beside one another, end last
        async with consuming(root, shard, backend):
            await backend.begun()
            await eventually(lambda: blobs.writes == 2)
            blobs.gate.set()

            # Then each is stored in its place
            await assert_stored_in_order(shard, backend, tasks)


async def test_a_task_that_there_is_no_room_for_keeps_its_place(root: Root) -> None:
    async with opened(root, uncommitted_bytes_max=60_000) as shard:
        tasks = await tasks_of(root, shard, request_of(bytes(50_000)), request_of(b"small"))
        backend = Completed(tasks)

        # Given a publish that leaves room for the second task alone, until it is stored
        await shard.publisher.commits.hold.acquire()
        before = asyncio.create_task(shard.publisher.publish(batch(bytes(40_000))))
        await asyncio.sleep(0)

        # When it is stored after both tasks were given out, then the second waits for the first
        async with consuming(root, shard, backend):
            await backend.begun()
            shard.publisher.commits.hold.release()
            await before
            await assert_stored_in_order(shard, backend, tasks)


async def test_tasks_keep_their_order_while_the_store_is_down(root: Root, blobs: BlobStore) -> None:
    async with opened(root) as shard:
        requests = [request_of(LARGE), request_of(b"small"), request_of(LARGE)]
        tasks = await tasks_of(root, shard, *requests)
        blobs.failures = 3
        backend = Completed(tasks)
        async with consuming(root, shard, backend):
            await assert_stored_in_order(shard, backend, tasks)
        assert not blobs.failures


async def test_a_task_whose_upload_grows_old_behind_another_one_keeps_its_place(
    root: Root, blobs: BlobStore
) -> None:
    clock = ManualClock()
    async with opened(root, clock) as shard:
        # Given one whose upload has ended, behind one whose upload takes over an hour
        requests = [request_of(HELD), request_of(LARGE), request_of(b"small")]
        tasks = await tasks_of(root, shard, *requests)
        backend = Completed(tasks)
        async with consuming(root, shard, backend):
            await backend.begun()
            await eventually(lambda: blobs.writes == 2)
            clock.advance(HOUR_MS + 1)
            blobs.gate.set()

            # Then both are uploaded again, and stored in their places
            await assert_stored_in_order(shard, backend, tasks)
        assert blobs.writes == 4


async def test_of_two_tasks_of_one_request_the_first_may_wait_for_the_second(
    root: Root, blobs: BlobStore
) -> None:
    async with opened(root) as shard:
        # Given a task whose upload fails while a repeat of its request is on its way behind it
        request = request_of(LARGE, "r")
        others = [request_of(b"1"), request_of(b"2")]
        tasks = await tasks_of(root, shard, others[0], request, others[1], request)
        blobs.failures = 1
        backend = Completed(tasks)

        # When it is tried again, and waits for the outcome of the repeat
        async with consuming(root, shard, backend):
            await eventually(lambda: len(backend.completed) == len(tasks))

        # Then neither waits for ever, and both have the same messages
        first, one, between, repeat = await first_ids(shard, tasks)
        assert one == repeat
        assert 0 < first < min(one, between)


async def test_a_task_that_fails_holds_up_others_until_its_attempt_is_over_and_no_longer(
    root: Root,
) -> None:
    async with opened(root) as shard:
        # Given tasks that are refused, or cannot be read, among others
        await shard.publisher.publish(batch(b"first", request_id="r"))
        reused = PublishRequest(runs=[PublishRun(payloads=[b"k"], dedupe_keys=["k"])])
        reused.request_id = "r"
        requests = [request_of(b"1"), reused, PublishRequest(), request_of(LARGE), request_of(b"2")]
        tasks = await tasks_of(root, shard, *requests)
        backend = Completed(tasks)
        good = [tasks[0], *tasks[3:]]

        # When the backend cannot count their attempts, then those behind them are stored
        backend.counts.clear()
        async with consuming(root, shard, backend):
            await assert_stored_in_order(shard, backend, good)
            backend.counts.set()
            await eventually(lambda: len(backend.failed) == 2)


async def test_a_task_that_has_failed_before_holds_up_no_other(
    root: Root, blobs: BlobStore
) -> None:
    async with opened(root) as shard:
        rig = Rig(root, shard)
        again = [rig.task(request_of(HELD), attempts=1, max_retries=3) for _ in range(2)]
        tasks = await tasks_of(root, shard, request_of(LARGE), request_of(b"small"))
        backend = Completed([*again, *tasks])
        async with consuming(root, shard, backend):
            await assert_stored_in_order(shard, backend, tasks)
            blobs.gate.set()
            await eventually(lambda: len(backend.completed) == 4)


async def test_a_task_that_comes_twice_waits_for_itself_and_those_before_it_alone(
    root: Root, blobs: BlobStore
) -> None:
    async with opened(root) as shard:
        tasks = await tasks_of(root, shard, request_of(HELD), request_of(b"1"), request_of(b"2"))
        backend = Completed([tasks[0], tasks[1], tasks[1], tasks[0], tasks[2]])
        async with consuming(root, shard, backend):
            await eventually(lambda: blobs.writes == 1)
            blobs.gate.set()
            await assert_stored_in_order(shard, backend, tasks)
            await eventually(lambda: len(backend.completed) == 5)
