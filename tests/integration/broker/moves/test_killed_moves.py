"""A queue that moves loses and doubles nothing, whichever side is killed between two steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.forms import shortly
from tests.integration.broker.moves.movers import (
    Steps,
    begin_move,
    claimed,
    queue_on,
    route_all,
    settled_move,
)
from tests.integration.broker.rig import Rig, running

SOURCE_STEPS = 20
TARGET_STEPS = 12
"""More than a move has: the last ones are those of a move that nobody disturbs."""


async def filled(source: Rig, target: Rig) -> None:
    """A queue with messages in all lists, some of them from before and some from after others."""
    await source.create("q", max_attempts=2)
    await route_all(source, 10)
    await route_all(target, 12)
    one, two, _ = await source.claim(max_messages=3)
    await source.ack(one.lease_token)
    await source.nack(two.lease_token)


async def check_whole(source: Rig, target: Rig) -> None:
    """All of the first 30 messages are in the queue, each once."""
    for rig in (source, target):
        await route_all(rig, 20)
    async with asyncio.timeout(60):
        while (await queue_on(target)).HasField("quarantine"):
            await asyncio.sleep(0.01)
    for rig in (source, target):
        await route_all(rig, 30)
    counts = (await queue_on(target)).counts
    assert (counts.available_count, counts.done_count, counts.in_flight_count) == (29, 1, 0)
    attempts = await claimed(target)
    assert sorted(attempts) == list(range(2, 31))
    assert attempts[2] == 2
    assert attempts[3] == 1


async def killed(rig: Rig, steps: Steps, source: Rig, target: Rig) -> None:
    """Has the queue begin to move; returns once a side stands still, or the move is over."""
    moving = asyncio.create_task(begin_move(source, target))
    reached = asyncio.create_task(steps.reached.wait())
    await asyncio.wait([moving, reached], return_when=asyncio.FIRST_COMPLETED)
    done = asyncio.create_task(settled_move(source, target))
    await asyncio.wait([done, reached], return_when=asyncio.FIRST_COMPLETED)
    for task in (moving, reached, done):
        task.cancel()
    await asyncio.gather(moving, reached, done, return_exceptions=True)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("step", shortly(range(1, SOURCE_STEPS + 1), 3, 6, 9, 14))
async def test_the_source_may_be_killed_at_any_step(
    tmp_path: Path, step: int, on_disk: bool
) -> None:
    async with running(tmp_path, shard=1) as target, running(tmp_path, shard=0) as old:
        await filled(old, target)
        steps = Steps(step, old.disk if on_disk else None)
        steps.of_source(old.broker.departures)
        await killed(old, steps, old, target)
        async with running(tmp_path, shard=0, clock=old.clock) as source:
            steps.thawed.set()
            old.disk.free.set()
            await settled_move(source, target)
            await check_whole(source, target)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("step", shortly(range(1, TARGET_STEPS + 1), 2, 4, 7, 10))
async def test_the_target_may_be_killed_at_any_step(
    tmp_path: Path, step: int, on_disk: bool
) -> None:
    async with running(tmp_path, shard=0) as source, running(tmp_path, shard=1) as old:
        await filled(source, old)
        steps = Steps(step, old.disk if on_disk else None)
        steps.of_target(old.broker.arrivals)
        await killed(old, steps, source, old)
        async with running(tmp_path, shard=1, clock=old.clock) as target:
            steps.thawed.set()
            old.disk.free.set()
            await settled_move(source, target)
            await check_whole(source, target)


async def test_a_move_has_as_many_steps_as_are_tried(tmp_path: Path) -> None:
    async with running(tmp_path, shard=0) as source, running(tmp_path, shard=1) as target:
        await filled(source, target)
        of_source, of_target = Steps(0), Steps(0)
        of_source.of_source(source.broker.departures)
        of_target.of_target(target.broker.arrivals)
        await begin_move(source, target)
        await settled_move(source, target)
        await check_whole(source, target)
        assert SOURCE_STEPS - 2 <= of_source.step <= SOURCE_STEPS
        assert TARGET_STEPS - 2 <= of_target.step <= TARGET_STEPS
