"""Routers and replays over a log out of which messages were purged."""

from __future__ import annotations

import asyncio
from pathlib import Path

from libs.storage.database.roots import open_root
from slatemq.v1 import queue_pb2
from tests.integration.broker.entry_calls import AVAILABLE, ids
from tests.integration.broker.rig import Rig, running
from tests.integration.ingest.server import message, serving
from tests.integration.ingest.test_purge_epochs import epoch
from tests.integration.ingest.test_purging import purged, short
from tests.integration.router.stack import running_router
from tests.integration.waiting import eventually

WAIT_SECONDS = 30


async def create(rig: Rig, queue_id: str, *, from_beginning: bool = False) -> None:
    queue = queue_pb2.Queue(queue_id=queue_id, filter="true")
    request = queue_pb2.CreateQueueRequest(queue=queue)
    if from_beginning:
        request.start_from_beginning = True
    await rig.queues.CreateQueue(request)


async def has(rig: Rig, queue_id: str, expected: list[int]) -> None:
    """Wait until a queue has as many messages, and look whether they are these."""
    async with asyncio.timeout(WAIT_SECONDS):
        while len(found := await ids(rig, AVAILABLE, queue_id=queue_id)) < len(expected):
            await asyncio.sleep(0.01)
    assert sorted(found) == expected


async def replayed(rig: Rig, queue_id: str) -> None:
    request = queue_pb2.GetQueueRequest(queue_id=queue_id)
    async with asyncio.timeout(WAIT_SECONDS):
        while (queue := (await rig.queues.GetQueue(request)).queue).HasField("replay"):
            if queue.replay.done:
                return
            await asyncio.sleep(0.01)


async def test_what_is_purged_before_it_is_routed_or_replayed_is_passed_over(
    tmp_path: Path,
) -> None:
    url = tmp_path.as_uri()
    async with serving(url, purge_grace_s=0) as ingest, running(tmp_path) as rig:
        # Given a queue, messages that no router has seen, and some of them purged: the first
        # entries, some in between, parts of others, and the last ones
        await create(rig, "all")
        going: list[int] = []
        staying: list[int] = []
        for n in range(40):
            kept = 10 <= n < 36 and n % 5 > 0
            batch = [short(b"s"), *([message(b"m"), short(b"s")] if kept else [])]
            published = await ingest.publish(*batch)
            staying += published[1:2]
            going += [published[0], *published[2:]]
        assert await purged(ingest, going, epoch=await epoch(ingest)) == len(going)
        # When a router comes, and a queue that starts in the past
        async with running_router(open_root(url)):
            await has(rig, "all", staying)
            await create(rig, "late", from_beginning=True)
            await replayed(rig, "late")
            await has(rig, "late", staying)
            # Then the log goes on for both
            more = await ingest.send(b"more")
            await has(rig, "all", staying + more)
            await has(rig, "late", staying + more)


async def test_a_log_of_which_nothing_is_left_holds_up_no_replay(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    async with serving(url, purge_grace_s=0) as ingest, running(tmp_path) as rig:
        await create(rig, "all")
        published = [one for _ in range(5) for one in await ingest.publish(short(b"s"))]
        async with running_router(open_root(url)):
            await has(rig, "all", published)
            assert await purged(ingest, published, epoch=await epoch(ingest)) == 5
            await create(rig, "late", from_beginning=True)
            await replayed(rig, "late")
            assert await ids(rig, AVAILABLE, queue_id="late") == []
            more = await ingest.send(b"more")
            await has(rig, "late", more)
    async with serving(url, purge_grace_s=0) as ingest, running(tmp_path) as rig:
        assert await purged(ingest, published, epoch=await epoch(ingest)) == 0
        async with running_router(open_root(url)):
            more += await ingest.send(b"and more")
            await has(rig, "late", more)


async def test_a_broker_that_comes_after_the_end_of_a_log_was_purged_catches_up(
    tmp_path: Path,
) -> None:
    url = tmp_path.as_uri()
    async with serving(url, purge_grace_s=0) as ingest, running(tmp_path) as rig:
        # Given a log of which the end is gone, and one of which nothing is left
        await create(rig, "all")
        kept = await ingest.send(b"kept")
        going = await ingest.publish(message(b"m"), short(b"s"), short(b"s"))
        going += await ingest.publish(short(b"s"))
        async with running_router(open_root(url)) as router:
            await has(rig, "all", kept + going)
            assert await purged(ingest, going[1:], epoch=await epoch(ingest)) == 3
            # When another broker comes, then it gets to the end of the log
            async with running(tmp_path, shard=1) as other:
                ends = [(0, going[-1]), (1, going[-1])]
                await eventually(
                    lambda: [(one.broker_shard, one.cursor) for one in router.progress()] == ends
                )
                await create(other, "late")
                more = await ingest.send(b"more")
                await has(other, "late", more)
                await has(rig, "all", kept + going + more)
