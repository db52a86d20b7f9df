"""Delayed queues from the log to the consumer: the scenarios of Zaqar's, and their edges."""

from __future__ import annotations

import pytest

from tests.integration.broker.queue_calls import update
from tests.integration.broker.rig import Rig
from tests.integration.router.replay_rig import World, drained, world
from tests.manual_clock import ManualClock

START_MS = ManualClock().now_ms()
NORMAL, DELAYED = 0, 10_000
EDGES = (3_000, 10_000, 40_000)
"""The lengths that occur below: each is tried a millisecond before it, and at it."""


async def publish(there: World, **fields: int) -> int:
    """Publishes a message that is received now; gives its ID."""
    [message_id] = await there.log.publish([{}], received_at_ms=there.clock.now_ms(), **fields)
    return message_id


async def waits_ms(there: World, rig: Rig, message_id: int) -> int | None:
    """How long the message cannot be claimed from `q`, to the ms; None: for ever."""
    await there.routed(rig)
    for waited_ms in (0, *(length for edge in EDGES for length in (edge - 1, edge))):
        there.clock.advance(max(0, waited_ms - (there.clock.now_ms() - START_MS)))
        if await drained(rig, "q") == [message_id]:
            return waited_ms
    return None


@pytest.mark.parametrize(
    ("default_delay_ms", "fields", "expected"),
    [
        # A message without a delay takes that of a delayed queue.
        (DELAYED, {}, 10_000),
        # A message's own delay wins over the queue's, whether shorter, none or longer.
        (DELAYED, {"delay_ms": 3_000}, 3_000),
        (DELAYED, {"delay_ms": 0}, 0),
        (DELAYED, {"delay_ms": 40_000}, 40_000),
        # A normal queue delays nothing, whatever a message says.
        (NORMAL, {}, 0),
        (NORMAL, {"delay_ms": 3_000}, 0),
        # A visible time holds in both.
        (NORMAL, {"visible_at_ms": START_MS + 3_000}, 3_000),
        (DELAYED, {"visible_at_ms": START_MS + 3_000}, 3_000),
        (DELAYED, {"visible_at_ms": START_MS - 3_000}, 0),
        # What lives no longer than its delay is never delivered.
        (DELAYED, {"retention_s": 10}, None),
        (DELAYED, {"retention_s": 11}, 10_000),
    ],
)
async def test_when_a_message_can_be_claimed(
    default_delay_ms: int, fields: dict[str, int], expected: int | None
) -> None:
    async with world() as there, there.broker() as rig, there.router():
        await rig.create("q", filter="true", default_delay_ms=default_delay_ms)
        message_id = await publish(there, **fields)
        assert await waits_ms(there, rig, message_id) == expected


async def test_a_changed_default_holds_for_messages_routed_later() -> None:
    async with world() as there, there.broker() as rig, there.router():
        await rig.create("q", filter="true", default_delay_ms=10_000)
        first = await publish(there)
        await there.routed(rig)
        await update(rig, ["default_delay_ms"], default_delay_ms=3_000)
        second = await publish(there)
        await there.routed(rig)

        assert await drained(rig, "q") == []
        there.clock.advance(3_000)
        assert await drained(rig, "q") == [second]
        there.clock.advance(7_000)
        assert await drained(rig, "q") == [first]


async def test_a_priority_that_fails_takes_the_queues_fallback() -> None:
    async with world() as there, there.broker() as rig, there.router():
        await rig.create("q", filter="true", priority='int(headers["p"])', fallback_priority=9)
        ids = await there.log.publish([{"p": "10"}, {"p": "none"}, {}, {"p": "8"}, {"p": "-5"}])
        await there.routed(rig)

        assert await drained(rig, "q") == [ids[4], ids[3], ids[1], ids[2], ids[0]]
