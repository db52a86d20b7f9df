"""A queue that moves between broker shards is whole at each step of its move."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from libs.storage.database.roots import open_root
from libs.storage.database.slate import Batch
from libs.storage.layout.own_keys import move_key
from libs.storage.objects.queue_names import UNCLAIMED, QueueNames
from libs.storage.records.move_records import MoveRecord, MoveStage, encode_move
from services.janitor.verify import objects
from services.janitor.verify.findings import Finding, Kind
from services.janitor.verify.verification import StoppedDatabases, Verification
from tests.forms import shortly
from tests.integration.broker.moves.movers import (
    Steps,
    begin_move,
    create_partitions,
    gone,
    route_all,
)
from tests.integration.broker.rig import running

STEPS = 23


@pytest.fixture(autouse=True)
def old_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name was claimed so long ago that it is a leftover without a queue."""
    monkeypatch.setattr(objects, "CLAIM_AGE_MS", 0)


async def found(folder: Path) -> list[Finding]:
    """What is wrong, but that there are no ingests, and no record of the instance."""
    root = open_root(folder.as_uri())
    began_ms = time.time_ns() // 1_000_000 + 1
    findings = await Verification(root, await StoppedDatabases.find(root), began_ms).run()
    assert any(one.record == "routing cursor" for one in findings.all())
    return [one for one in findings.all() if "ingest" not in one.wrong and one.shard != "instance"]


@pytest.mark.parametrize("is_partition", [False, True])
@pytest.mark.parametrize("step", shortly(range(1, STEPS + 1), 3, 6, 9, 14, 18))
async def test_no_step_of_a_move_looks_like_damage(
    tmp_path: Path, step: int, is_partition: bool
) -> None:
    async with (
        running(tmp_path, shard=0) as source,
        running(tmp_path, shard=1) as target,
        running(tmp_path, shard=2) as beside,
    ):
        if is_partition:
            await create_partitions(beside, source, max_attempts=1)
        else:
            await source.create("q", max_attempts=1)
        await route_all(beside, 20)
        await route_all(source, 20)
        await route_all(target, 20)
        one, two, *_ = await source.claim(max_messages=3)
        await source.ack(one.lease_token)
        await source.nack(two.lease_token)
        steps = Steps(step)
        steps.of_source(source.broker.departures)
        moving = asyncio.create_task(begin_move(source, target))
        reached = asyncio.create_task(steps.reached.wait())
        await asyncio.wait([moving, reached], return_when=asyncio.FIRST_COMPLETED)
        if moving.done() and not reached.done():
            over = asyncio.create_task(gone(source))
            await asyncio.wait([over, reached], return_when=asyncio.FIRST_COMPLETED)
            over.cancel()
        await source.owner.durable()
        await target.owner.durable()
        for task in (moving, reached):
            task.cancel()
        await asyncio.gather(moving, reached, return_exceptions=True)
    assert await found(tmp_path) == []


async def test_a_record_of_a_move_that_cannot_be_carried_out_is_found(tmp_path: Path) -> None:
    async with running(tmp_path, shard=0) as rig:
        await rig.create("other")
        await route_all(rig, 3)
        batch = Batch()
        leaving = MoveRecord(MoveStage.LEAVING, 1, 1, revision=1)
        copied = MoveRecord(MoveStage.COPIED, 1, 1, config=b"x", state=b"y", replay=b"z")
        batch.put(move_key("lost"), encode_move(leaving))
        batch.put(move_key("damaged"), encode_move(copied))
        await rig.owner._database.write(batch)
    wrong = {one.key: one.wrong for one in await found(tmp_path)}
    assert wrong["queue lost"] == "the queue is leaving for another shard, and has no state"
    assert any("damaged" in key for key in wrong)


async def test_the_name_of_a_queue_that_moves_is_not_left_over(tmp_path: Path) -> None:
    async with running(tmp_path, shard=0) as rig:
        await route_all(rig, 3)
        names, batch = QueueNames(rig.root.objects), Batch()
        for queue_id, stage in (
            ("leaving", MoveStage.LEAVING),
            ("copying", MoveStage.COPYING),
            ("copied", MoveStage.COPIED),
        ):
            assert await names.claim(queue_id, (0,), UNCLAIMED)
            batch.put(move_key(queue_id), encode_move(MoveRecord(stage, 1, 1)))
        assert await names.claim("left over", (0,), UNCLAIMED)
        await rig.owner._database.write(batch)
    leftovers = [one.key for one in await found(tmp_path) if one.kind is Kind.LEFTOVER]
    assert leftovers == ["left over"]
