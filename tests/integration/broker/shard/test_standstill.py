"""A broker that stood still, as under SIGSTOP or on a starved machine."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.broker.core import lease_table
from services.broker.core.lease_table import LeaseGrace
from services.broker.core.queue import Queue
from tests.integration.broker.rig import Rig, running
from tests.turns import Turns


@pytest.fixture(autouse=True)
def no_standstill() -> None:
    """Replaces that of all tests: here some brokers stand still."""


async def test_a_lease_that_was_alive_when_the_broker_stood_still_goes_on() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1, lease_ms=5000)
        await rig.assign([1, 2])
        held, ended = await rig.claim(max_messages=2)
        await asyncio.sleep(0.2)  # the loop has looked at the leases

        rig.clock.advance(8000)
        time.sleep(1.3)  # noqa: ASYNC251 - the event loop itself must stand still
        assert await rig.ack(held.lease_token) == [0]
        await rig.owner.durable()

        assert await rig.counts() == {"in_flight": 1, "done": 1}
        await rig.pass_time(5001)  # no one acks in its grace
        assert await rig.ack(ended.lease_token) == [9]
        assert await rig.counts() == {"done": 1, "failed": 1}


async def test_a_lease_that_was_alive_when_the_clock_stepped_goes_on() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1, lease_ms=5000)
        await rig.assign([1, 2])
        held, ended = await rig.claim(max_messages=2)

        rig.clock.step(120_000)
        await rig.owner.end_leases_once()

        assert await rig.counts() == {"in_flight": 2}
        assert await rig.ack(held.lease_token) == [0]
        await rig.pass_time(5001)  # no one acks in its grace
        assert await rig.ack(ended.lease_token) == [9]
        assert await rig.counts() == {"done": 1, "failed": 1}


async def leased(rig: Rig, count: int) -> list[str]:
    """Messages in flight, each in a bucket of its own."""
    await rig.create(max_attempts=1, lease_ms=5000)
    await rig.assign(range(1, count + 1))
    return [(await rig.claim())[0].lease_token for _ in range(count)]


async def test_others_have_turns_while_leases_get_their_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_table, "STEP_LEASES", 1)
    async with running() as rig:
        tokens = await leased(rig, 8)
        seen = list[int]()

        def step(grace: LeaseGrace) -> list[Queue]:
            seen.append(turns.count)
            return take(grace)

        take = LeaseGrace.step
        monkeypatch.setattr(LeaseGrace, "step", step)
        rig.clock.step(120_000)
        with Turns() as turns:
            await rig.owner.end_leases_once()

        assert len(set(seen)) == len(seen) > len(tokens)
        assert await rig.ack(*tokens) == [0] * len(tokens)


async def test_a_standstill_while_leases_get_their_grace_gives_all_of_them_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_table, "STEP_LEASES", 1)
    async with running() as rig:
        tokens = await leased(rig, 4)
        steps = 0

        def step(grace: LeaseGrace) -> list[Queue]:
            nonlocal steps
            steps += 1
            if steps == 3:
                asyncio.get_running_loop().call_soon(stand_still)
            return take(grace)

        def stand_still() -> None:
            rig.clock.advance(8000)
            time.sleep(1.3)

        take = LeaseGrace.step
        monkeypatch.setattr(LeaseGrace, "step", step)
        rig.clock.step(120_000)
        await rig.owner.end_leases_once()

        assert steps > len(tokens) + 3
        assert await rig.ack(*tokens) == [0] * len(tokens)
