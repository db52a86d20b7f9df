"""A broker that stood still, as under SIGSTOP or on a starved machine."""

from __future__ import annotations

import asyncio
import time

from tests.integration.broker.rig import running


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
        await rig.pass_time(5001)  # nobody acks in its grace
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
        await rig.pass_time(5001)  # nobody acks in its grace
        assert await rig.ack(ended.lease_token) == [9]
        assert await rig.counts() == {"done": 1, "failed": 1}
