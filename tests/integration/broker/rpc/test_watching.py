"""Watching queues over the wire."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from services.broker.core.settings import QueueSettings
from slatemq.v1 import assignment_pb2, queue_pb2
from tests.integration.broker.queue_calls import delete, update
from tests.integration.broker.rig import Disk, memory_root, refusal, running
from tests.manual_clock import ManualClock


class OneSyncAtATime(Disk):
    """A disk that can let single syncs pass."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[asyncio.Event] = []

    def hold(self) -> None:
        self.free.clear()

    async def sync(self) -> None:
        turn = asyncio.Event()
        self._waiting.append(turn)
        ways = [asyncio.create_task(way.wait()) for way in (self.free, turn)]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        self._waiting.remove(turn)

    async def let_pass_until(self, durable: asyncio.Future[None]) -> None:
        """Let syncs pass one by one, those of other writes than commits too, and none after it."""
        while not durable.done():
            for turn in self._waiting[:1]:
                turn.set()
            await asyncio.sleep(0.001)


INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def test_a_watch_shows_all_queues_first_and_then_every_later_change() -> None:
    async with running() as rig:
        await rig.create("a")
        await rig.create("b")
        await update(rig, ["max_attempts"], "a", max_attempts=2)
        watch: Any = rig.queues.WatchQueues(queue_pb2.WatchQueuesRequest())

        first = await watch.read()
        assert [c.queue.queue_id for c in first.changes] == ["b", "a"]
        assert first.revision == 3
        assert not first.changes[0].queue.HasField("counts")
        await delete(rig, "b")
        second = await watch.read()
        assert [c.deleted_queue_id for c in second.changes] == ["b"]
        assert second.revision == 4
        later: Any = rig.queues.WatchQueues(queue_pb2.WatchQueuesRequest(after_revision=3))
        assert await later.read() == second
        rest: Any = rig.queues.WatchQueues(queue_pb2.WatchQueuesRequest(after_revision=4))
        assert await rest.read() == queue_pb2.WatchQueuesResponse(revision=4)


async def test_a_watch_shows_durable_changes_only() -> None:
    disk = Disk()
    async with running(memory_root(disk), disk=disk) as rig:
        await rig.create("a")
        watch: Any = rig.queues.WatchQueues(queue_pb2.WatchQueuesRequest())
        await watch.read()
        disk.free.clear()
        creating = asyncio.create_task(rig.create("b"))
        while "b" not in rig.owner.shard.queues:
            await asyncio.sleep(0.001)
        reading = asyncio.ensure_future(watch.read())
        other: Any = rig.queues.WatchQueues(queue_pb2.WatchQueuesRequest())
        assert (await other.read()).revision == 1

        done, _ = await asyncio.wait([reading, creating], timeout=0.2)

        assert not done
        disk.free.set()
        assert [c.queue.queue_id for c in (await reading).changes] == ["b"]
        await creating


async def test_a_revision_comes_with_what_each_queue_was_at_it_whatever_changed_since() -> None:
    """Else a crash that takes back the later change leaves a router without the queue."""
    disk = OneSyncAtATime()
    async with running(memory_root(disk), disk=disk) as rig:
        disk.hold()
        creating = asyncio.create_task(rig.create("q"))
        while "q" not in rig.owner.shard.queues:
            await asyncio.sleep(0.001)
        commits = rig.owner.commits
        while commits.overdue_ms() == 0 or commits._gathering is not None:
            await asyncio.sleep(0.001)
        created_durably = commits.newest()
        assert created_durably is not None
        pause = queue_pb2.PauseQueueRequest(queue_id="q")
        pausing = asyncio.ensure_future(rig.queues.PauseQueue(pause))
        while rig.owner.shard.revision < 2:
            await asyncio.sleep(0.001)
        updating = asyncio.create_task(update(rig, ["filter"], filter='headers.kind == "later"'))
        while rig.owner.shard.revision < 3:
            await asyncio.sleep(0.001)
        deleting = asyncio.create_task(delete(rig, "q"))
        while rig.owner.shard.queues:
            await asyncio.sleep(0.001)

        await disk.let_pass_until(created_durably)

        created = await creating
        assert (created.revision, created.paused) == (1, False)
        watch: Any = rig.queues.WatchQueues(queue_pb2.WatchQueuesRequest())
        first = await watch.read()
        state = await rig.assignments.GetRoutingState(assignment_pb2.GetRoutingStateRequest())
        assert (first.revision, state.config_revision) == (1, 1)
        assert list(first.changes) == list(state.changes) == [queue_pb2.QueueChange(queue=created)]
        assert {pausing.done(), updating.done(), deleting.done()} == {False}
        disk.free.set()
        await asyncio.gather(pausing, updating, deleting)
        while (later := await watch.read()).revision < 4:
            assert later.changes[0].queue.paused
        assert [one.deleted_queue_id for one in later.changes] == ["q"]


async def test_what_a_queue_is_after_a_restart_is_reported_as_it_was_before() -> None:
    root, clock = memory_root(Disk()), ManualClock()
    everything = assignment_pb2.GetRoutingStateRequest()
    async with running(root, clock) as rig:
        for queue_id in "abc":
            await rig.create(queue_id)
        await update(rig, ["filter"], "a", filter="true")
        await delete(rig, "b")
        before = await rig.assignments.GetRoutingState(everything)
    async with running(root, clock) as rig:
        assert await rig.assignments.GetRoutingState(everything) == before
        assert [one.WhichOneof("change") for one in before.changes] == [
            "queue",
            "queue",
            "deleted_queue_id",
        ]


@pytest.mark.parametrize("revision", [-1, 2])
async def test_a_watch_from_a_revision_that_never_was_is_refused(revision: int) -> None:
    async with running() as rig:
        await rig.create()
        watch: Any = rig.queues.WatchQueues(queue_pb2.WatchQueuesRequest(after_revision=revision))
        assert (await refusal(watch.read()))[::2] == (INVALID, "after_revision")


async def test_a_watch_of_very_many_queues_comes_in_several_answers() -> None:
    async with running() as rig:
        for i in range(2100):
            rig.owner.shard.create_queue(f"q{i}", QueueSettings(filter="true"))
        await rig.owner.run(lambda _: None)
        await rig.owner.durable()
        watch: Any = rig.queues.WatchQueues(queue_pb2.WatchQueuesRequest())
        pages = [await watch.read() for _ in range(3)]
        assert [len(page.changes) for page in pages] == [1000, 1000, 100]
        assert [page.revision for page in pages] == [2100] * 3
        assert [page.more for page in pages] == [True, True, False]


async def test_a_drain_ends_watches_and_says_why() -> None:
    async with running() as rig:
        watch: Any = rig.queues.WatchQueues(queue_pb2.WatchQueuesRequest())
        await watch.read()
        rig.signals.first.set()
        assert (await refusal(watch.read()))[:2] == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
