"""Watching queues over the wire."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from services.broker.queue_settings import QueueSettings
from slatemq.v1 import queue_pb2
from tests.integration.broker.queue_calls import delete, update
from tests.integration.broker.rig import Disk, memory_root, refusal, running

INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def test_a_watch_tells_all_queues_first_and_then_every_later_change() -> None:
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


async def test_a_watch_tells_durable_changes_only() -> None:
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
        assert [page.revision for page in pages] == [1000, 2000, 2100]


async def test_a_drain_ends_watches_and_says_why() -> None:
    async with running() as rig:
        watch: Any = rig.queues.WatchQueues(queue_pb2.WatchQueuesRequest())
        await watch.read()
        rig.signals.first.set()
        assert (await refusal(watch.read()))[:2] == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
