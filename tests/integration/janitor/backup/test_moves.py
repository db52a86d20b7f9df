"""A backup of an instance whose queues move has each of them once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from libs.storage.database.roots import open_root
from libs.storage.objects.queue_names import UNCLAIMED, NameClaim, QueueNames
from services.janitor.backup.catalogue import Catalogue
from services.janitor.backup.restoring import Restoring
from services.janitor.backup.shards import ShardSnapshots, snapshots_of_stopped
from services.janitor.backup.taking import BackupSource, Taking
from services.janitor.runs.history import RunStore
from tests.forms import shortly
from tests.integration.broker.moves.movers import (
    Steps,
    begin_move,
    claimed,
    create_partitions,
    gone,
    has_queue,
    queue_on,
    route_all,
)
from tests.integration.broker.rig import running
from tests.made_instances import make_instance
from tests.manual_clock import ManualClock

STEPS = 23


@pytest.mark.parametrize("is_partition", [False, True])
@pytest.mark.parametrize("step", shortly(range(1, STEPS + 1), 4, 8, 12, 16, 20))
async def test_a_restored_move_ends_on_one_side(
    tmp_path: Path, step: int, is_partition: bool
) -> None:
    folder, fresh = tmp_path / "root", tmp_path / "fresh"
    clock = ManualClock()
    async with (
        running(folder, shard=0, clock=clock) as source,
        running(folder, shard=1, clock=clock) as target,
        running(folder, shard=2, clock=clock) as beside,
    ):
        if is_partition:
            await create_partitions(beside, source)
        else:
            await source.create("q")
        for rig in (source, target):
            await route_all(rig, 10)
        steps = Steps(step)
        steps.of_source(source.broker.departures)
        moving = asyncio.create_task(begin_move(source, target))
        reached = asyncio.create_task(steps.reached.wait())
        await asyncio.wait([moving, reached], return_when=asyncio.FIRST_COMPLETED)
        if moving.done() and not reached.done():
            over = asyncio.create_task(gone(source))
            await asyncio.wait([over, reached], return_when=asyncio.FIRST_COMPLETED)
            over.cancel()
        for task in (moving, reached):
            task.cancel()
        await asyncio.gather(moving, reached, return_exceptions=True)
    root, backups = open_root(folder.as_uri()), open_root((tmp_path / "backups").as_uri())
    await make_instance(root)
    runs = RunStore(root.objects)
    source_of = BackupSource(root, lambda: snapshots_of_stopped(root, clock.now_ms()), runs)
    backup = await Taking(source_of, backups, 5).take()
    await Restoring(Catalogue(backups.objects), backup, open_root(fresh.as_uri())).restore()

    clock.advance(10**9)
    async with (
        running(fresh, shard=0, clock=clock) as source,
        running(fresh, shard=1, clock=clock) as target,
    ):
        async with asyncio.timeout(60):
            while [await has_queue(rig) for rig in (source, target)].count(True) != 1:
                await asyncio.sleep(0.05)
        there = target if await has_queue(target) else source
        for rig in (source, target):
            await route_all(rig, 20)
        assert not (await queue_on(there)).HasField("quarantine")
        assert sorted(await claimed(there)) == list(range(1, 21))
        claim = await QueueNames(open_root(fresh.as_uri()).objects).get("q")
        shard = there.service._config.shard
        assert claim.broker_shards == ((2, shard) if is_partition else (shard,))


async def test_a_queue_that_moves_meanwhile_has_the_snapshots_taken_again(tmp_path: Path) -> None:
    folder = tmp_path / "root"
    root, backups = open_root(folder.as_uri()), open_root((tmp_path / "backups").as_uri())
    await make_instance(root)
    async with running(folder, shard=0) as rig:
        await rig.create("q")
    names, tries = QueueNames(root.objects), 0

    @asynccontextmanager
    async def snapshots() -> AsyncIterator[ShardSnapshots]:
        nonlocal tries
        async with snapshots_of_stopped(root, 1) as taken:
            tries += 1
            assert await names.claim(f"new-{tries}", (0,), UNCLAIMED)
            if tries == 1:
                assert await names.claim("q", (1,), NameClaim(1, (0,), (1,)))
            yield taken

    await Taking(BackupSource(root, snapshots, RunStore(root.objects)), backups, 5).take()

    assert tries == 2
