"""A large claim takes turns with everything else on the event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import pairwise

import pytest

from services.broker.core import shard as shards
from services.broker.delivery.waiters import TURN, WaiterLine
from slatemq.v1 import consumer_pb2
from tests.integration.broker.rig import Rig, running
from tests.integration.waiting import eventually

COUNT = 5 * TURN
MESSAGE_BYTES = 10
"""Of the payload of each message, as the rig's ingest gives them."""


async def fill(rig: Rig, count: int = COUNT) -> None:
    await rig.create()
    for first in range(1, count + 1, TURN):
        await rig.assign(range(first, min(first + TURN, count + 1)))


async def steps_of(rig: Rig, task: asyncio.Task[object], each: Callable[[int], object]) -> None:
    """Calls `each` with the messages in flight, once in every turn of the event loop."""
    queue = rig.owner.shard.queues["q"]
    while not task.done():
        each(queue.leases.count)
        await asyncio.sleep(0)


async def test_no_step_claims_more_than_a_turn_and_the_answer_is_one() -> None:
    async with running() as rig:
        await fill(rig)
        seen = [0]
        claiming = asyncio.create_task(rig.claim(max_messages=COUNT))

        await steps_of(rig, claiming, seen.append)

        assert max(after - before for before, after in pairwise(seen)) <= TURN
        claimed = await claiming
        assert [one.message.message_id for one in claimed] == [*range(1, COUNT + 1)]
        assert set(await rig.ack(*(one.lease_token for one in claimed))) == {0}


async def test_a_claim_that_its_caller_leaves_between_turns_is_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as rig:
        await fill(rig)
        queue, delivery, run = rig.owner.shard.queues["q"], rig.delivery, rig.owner.run
        assert delivery is not None
        call = rig.consumers.Claim(consumer_pb2.ClaimRequest(queue_id="q", max_messages=COUNT))
        claiming = asyncio.create_task(end_of(call))
        halves: list[int] = []
        lines: list[WaiterLine] = []

        def leave_in_the_middle(in_flight: int) -> None:
            if 0 < in_flight < COUNT and not halves:
                halves.append(in_flight)
                lines.append(delivery._waiter_lines[queue])
                call.cancel()

        async def turn_once_left(command: Callable[[int], int]) -> int:
            """The broker comes to know that the caller has left before its next turn."""
            if lines and asyncio.current_task() is lines[0].task:
                await eventually(lambda: not lines[0].line)
            return await run(command)

        monkeypatch.setattr(rig.owner, "run", turn_once_left)
        await steps_of(rig, claiming, leave_in_the_middle)
        await eventually(lambda: queue.leases.count == 0)

        assert halves
        assert queue.waiting.ready_count == COUNT
        again = await rig.claim(max_messages=COUNT)
        assert [one.message.message_id for one in again] == [*range(1, COUNT + 1)]
        assert {one.attempts_count for one in again} == {1}


async def end_of(call: Awaitable[object]) -> None:
    with suppress(asyncio.CancelledError):
        await call


@pytest.mark.parametrize("fitting", [TURN, TURN + 1, 2 * TURN - 1, 2 * TURN])
async def test_the_bytes_of_a_claim_hold_for_all_its_turns(fitting: int) -> None:
    async with running() as rig:
        await fill(rig, 3 * TURN)

        claimed = await rig.claim(
            max_messages=3 * TURN, max_bytes=fitting * MESSAGE_BYTES + MESSAGE_BYTES - 1
        )

        assert len(claimed) == fitting
        assert rig.owner.shard.queues["q"].leases.count == fitting


async def test_claims_in_turns_share_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "STEP_MATCHES", 3 * TURN)  # it comes all at once
    async with running() as rig:
        await rig.create()
        queue, delivery = rig.owner.shard.queues["q"], rig.delivery
        assert delivery is not None
        claims = [
            asyncio.create_task(rig.claim(max_messages=COUNT, wait_ms=30_000)) for _ in range(2)
        ]
        await eventually(
            lambda: queue in delivery._waiter_lines and len(delivery._waiter_lines[queue].line) == 2
        )

        await rig.assign(range(1, 3 * TURN + 1))

        counts = [len(claimed) for claimed in await asyncio.gather(*claims)]
        assert sum(counts) == 3 * TURN
        assert max(counts) - min(counts) <= 2


async def test_a_claim_in_turns_leaves_what_comes_later_to_the_next() -> None:
    async with running() as rig:
        await fill(rig, TURN)

        claimed = await rig.claim(max_messages=COUNT, wait_ms=30_000)

        assert len(claimed) == TURN
