"""A queue that was to move to a shard which is given up stays where all of it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from libs.storage.database.roots import open_root
from libs.storage.objects.queue_names import QueueNames
from services.janitor.giving_up.command import give_up
from slatemq.v1.move_pb2 import ArriveResponse
from tests.integration.broker.moves.movers import (
    begin_move,
    claimed,
    gone,
    listed_moves,
    move,
    route,
    route_all,
    shard_of,
)
from tests.integration.broker.rig import introduce, running


async def test_a_queue_whose_target_is_given_up_stays(tmp_path: Path) -> None:
    root = open_root(tmp_path.as_uri())
    async with running(tmp_path, shard=0) as source:
        async with running(tmp_path, shard=1) as target:
            await introduce(source, target)
            await source.create("q")
            await route_all(source, 10)
            await route(target, 10)
            # Given a source that has claimed the name for the target, and has no answer from it
            reached, go = asyncio.Event(), asyncio.Event()
            arrive = source.broker.departures._targets.arrive

            async def late(*args: Any) -> ArriveResponse:
                reached.set()
                await go.wait()
                return await arrive(*args)

            source.broker.departures._targets.arrive = late  # type: ignore[method-assign, assignment]
            await begin_move(source, target)
            await reached.wait()

        # When the target is given up
        await give_up(root, "broker/1")
        await introduce(source)
        go.set()

        # Then the queue is served by its source, and can move to another shard
        await gone(source)
        assert [one.problem for one in await listed_moves(source)] == ["broker 1 was given up"]
        assert (await QueueNames(root.objects).get("q")).broker_shards == (0,)
        await route_all(source, 20)
        async with running(tmp_path, shard=2) as other:
            await introduce(source, other)
            await route(other, 20)
            await move(source, other)
            assert shard_of(other) == 2
            assert sorted(await claimed(other)) == list(range(1, 21))


async def test_a_queue_moves_to_a_shard_that_never_knew_an_ingest_that_was_given_up(
    tmp_path: Path,
) -> None:
    root = open_root(tmp_path.as_uri())
    await root.objects.put("ingest/1/manifest/1", b"lost")
    log = (1 << 48) + 10
    async with running(tmp_path, shard=0) as source, running(tmp_path, shard=1) as target:
        await introduce(source, target)
        await source.create("q")
        await route_all(source, 10)
        await route(target, 10)
        await route(source, log, log=1)

        await give_up(root, "ingest/1")
        await source.broker.removed_ingests.look()
        await source.owner.durable()

        await move(source, target)
        assert sorted(await claimed(target)) == list(range(1, 11))
