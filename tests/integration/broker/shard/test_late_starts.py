"""Replays whose start is looked up when they begin, as their ingest was down before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from libs.storage.records.replay_records import OPEN_END, ReplayRange
from slatemq.v1 import assignment_pb2, queue_pb2
from tests.integration.broker.queue_calls import delete, get
from tests.integration.broker.rig import Rig
from tests.integration.router.replay_rig import World, create, drained, patiently, world

Backfill = assignment_pb2.BackfillRequest


class LookUps:
    """The broker's look-ups, which find nothing at a queue's creation and wait for `gate` later."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.begun, self.times_ms = asyncio.Event(), asyncio.Event(), list[int]()
        starts = rig.broker.assignments._starts
        look_up = starts.look_up

        async def no_answer(shard: int, start_ms: int) -> None:
            return None

        async def gated(shard: int, start_ms: int) -> int:
            self.times_ms.append(start_ms)
            self.begun.set()
            await self.gate.wait()
            return await look_up(shard, start_ms)

        monkeypatch.setattr(starts, "_try", no_answer)
        monkeypatch.setattr(starts, "look_up", gated)


@pytest.fixture
async def there() -> AsyncIterator[World]:
    """Logs and a store; see `routed`."""
    async with world() as there:
        yield there


async def assign(there: World, rig: Rig, previous: int) -> int:
    """Routes two more messages, and passes a second."""
    await there.log.publish([{}, {}])
    there.clock.advance(1_000)
    piece = assignment_pb2.LogRange(previous_sequence=previous, last_sequence=previous + 2)
    piece.config_revision = rig.owner.shard.revision
    request = assignment_pb2.AssignRequest(ranges=[piece])
    assert (await rig.assignments.Assign(request)).results[0].applied
    return previous + 2


async def backfill(rig: Rig, made: queue_pb2.Queue, previous: int, last: int, *ids: int) -> bool:
    request = Backfill(queue_id="q", queue_revision=made.revision)
    request.range.previous_sequence, request.range.last_sequence = previous, last
    if ids:
        request.range.assignments.add(queue_id="q", message_ids=ids)
    return (await rig.assignments.Backfill(request)).applied


async def test_a_look_up_for_a_deleted_queue_is_no_start_of_one_made_under_its_name(
    there: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with there.broker() as rig:
        await rig.create("other")
        await assign(there, rig, await assign(there, rig, 0))
        lookups = LookUps(rig, monkeypatch)
        late_ms = there.clock.now_ms()
        before = await create(rig, "q", since_ms=late_ms)
        call = asyncio.create_task(backfill(rig, before, 0, 1))
        await lookups.begun.wait()

        await delete(rig)
        await patiently(lambda: create(rig, "q", since_ms=0))
        lookups.gate.set()

        assert not await call
        assert rig.owner.shard.replays.of("q") == (ReplayRange(0, 0, 0, 4, since_ms=0),)
        assert await backfill(rig, await get(rig), 0, 4, 1, 2, 3, 4)
        assert lookups.times_ms == [late_ms, 0]
        assert await drained(rig, "q") == [1, 2, 3, 4]


@pytest.mark.parametrize("begun", ["before it", "during it"])
async def test_a_shard_starts_again_after_a_backfill_beside_a_quarantine(
    there: World, monkeypatch: pytest.MonkeyPatch, begun: str
) -> None:
    async with there.broker() as rig:
        await rig.create("other")
        await assign(there, rig, 0)
        lookups = LookUps(rig, monkeypatch)
        made = await create(rig, "q", since_ms=there.clock.now_ms() + 5_000)
        await there.log.publish([{}] * 5)  # not routed yet
        slow = assignment_pb2.QuarantineQueueRequest(
            queue_id="q", queue_revision=made.revision, reason="slow"
        )
        if begun == "before it":
            call = asyncio.create_task(backfill(rig, made, 0, 1))
            await lookups.begun.wait()
            await rig.assignments.QuarantineQueue(slow)
            lookups.gate.set()
        else:
            lookups.gate.set()
            await rig.assignments.QuarantineQueue(slow)
            call = asyncio.create_task(backfill(rig, await get(rig), 0, 7))

        assert not await call
        assert rig.owner.shard.replays.of("q")[0].end == OPEN_END
        await rig.queues.LiftQuarantine(queue_pb2.LiftQuarantineRequest(queue_id="q"))

    async with there.broker() as rig:
        [left] = rig.owner.shard.replays.of("q")
        assert (left.cursor, left.end) == (0, 2)
