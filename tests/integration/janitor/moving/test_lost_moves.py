"""A queue that moves is on one side, whole, once the store of the write-ahead logs is lost."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from libs.storage.database.roots import open_root
from libs.storage.objects.instance_records import InstanceRecord, InstanceRecords, WalStoreRecord
from libs.storage.objects.queue_names import QueueNames
from services.janitor.moving.wals import WalMove
from tests.forms import shortly
from tests.integration.broker.moves.movers import (
    Steps,
    begin_move,
    claimed,
    has_queue,
    queue_on,
    route_all,
    settled_move,
    shard_of,
)
from tests.integration.broker.rig import Rig, introduce, running
from tests.manual_clock import ManualClock

STEPS = 23
"""More than a move has: the last ones are after its end."""


async def made(folder: Path) -> None:
    """An instance with its write-ahead logs in a store of their own."""
    named = WalStoreRecord.new((folder / "wals").as_uri())
    record = InstanceRecord(1, 0, {}, named)
    assert await InstanceRecords(open_root((folder / "data").as_uri()).objects).create(record)


async def lost(folder: Path) -> Path:
    """What goes on from the tables that are there at this moment, without the logs."""
    copy = folder / "copy"
    shutil.copytree(folder / "data", copy)
    root = open_root(copy.as_uri(), (folder / "others").as_uri())
    await WalMove(open_root(copy.as_uri()), root, is_lost=True).move()
    return copy


async def moved_until(steps: Steps, source: Rig, target: Rig) -> None:
    """Has q move; returns once a side stands still, or the move is over."""
    moving = asyncio.create_task(begin_move(source, target))
    reached = asyncio.create_task(steps.reached.wait())
    await asyncio.wait([moving, reached], return_when=asyncio.FIRST_COMPLETED)
    over = asyncio.create_task(settled_move(source, target))
    await asyncio.wait([over, reached], return_when=asyncio.FIRST_COMPLETED)
    for task in (moving, reached, over):
        task.cancel()
    await asyncio.gather(moving, reached, over, return_exceptions=True)


async def flush(rig: Rig) -> None:
    assert rig.service.database is not None
    await rig.service.database.flush_memtable()


@pytest.mark.parametrize("flushed", ["source", "target"])
@pytest.mark.parametrize("step", shortly(range(1, STEPS + 1), 9, 13, 17, 19, STEPS))
async def test_a_queue_that_moved_is_whole_on_one_side_without_the_logs(
    tmp_path: Path, step: int, flushed: str
) -> None:
    clock = ManualClock()
    await made(tmp_path)
    async with (
        running(tmp_path / "data", shard=0, clock=clock) as source,
        running(tmp_path / "data", shard=1, clock=clock) as target,
    ):
        await introduce(source, target)
        await source.create("q")
        for rig in (source, target):
            await route_all(rig, 10)
            await flush(rig)
        steps = Steps(step)
        steps.of_source(source.broker.departures)
        await moved_until(steps, source, target)
        # Its tables are newer than those of the other side.
        await flush(source if flushed == "source" else target)
        copy = await lost(tmp_path)
        steps.thawed.set()

    clock.advance(10**9)
    async with (
        running(copy, shard=0, clock=clock) as source,
        running(copy, shard=1, clock=clock) as target,
    ):
        await introduce(source, target)
        async with asyncio.timeout(60):
            while [await has_queue(rig) for rig in (source, target)].count(True) != 1:
                await asyncio.sleep(0.05)
        there = target if await has_queue(target) else source
        for rig in (source, target):
            await route_all(rig, 20)
        assert not (await queue_on(there)).HasField("quarantine")
        assert sorted(await claimed(there)) == list(range(1, 21))
        claim = await QueueNames(open_root(copy.as_uri()).objects).get("q")
        assert claim.broker_shards == (shard_of(there),)
