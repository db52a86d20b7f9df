"""Claims beside one client that lists and claims 10,000 messages at a time."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import slatemq
from slatemq._admin.entry_models import StateName
from tests.integration.serving.test_large_requests import (
    STEP_MS_MAX,
    at_last,
    longest_step_ms,
    serving,
)

COUNT = 10_000
ROUNDS = 2

pytestmark = pytest.mark.stack


async def routed(client: slatemq.Client, queue_id: str, count: int) -> None:
    """Waits until the queue has that many messages."""
    while (await client.get_queue(queue_id)).counts.available_count < count:
        await asyncio.sleep(0.02)


async def test_listings_and_claims_of_10_000_delay_others_by_short_steps_only(
    tmp_path: Path,
) -> None:
    await at_last(tmp_path, list_and_claim_beside_another)


async def list_and_claim_beside_another(folder: Path) -> object:
    """Returns what took too long."""
    # Given a queue of 10,000 messages, and one that others claim from
    async with AsyncExitStack() as exits, asyncio.timeout(240):
        for kind in ("ingest", "router"):
            await exits.enter_async_context(serving(kind, folder))
        broker = await exits.enter_async_context(serving("broker", folder))
        greedy = await exits.enter_async_context(slatemq.connect(broker.address))
        other = await exits.enter_async_context(slatemq.connect(broker.address))
        for queue_id in ("large", "small"):
            await greedy.create_queue(queue_id, filter=f'headers["to"] == "{queue_id}"')
        for queue_id, count in (("large", COUNT), ("small", 1)):
            message = slatemq.OutgoingMessage(b"x" * 100, {"to": queue_id})
            await greedy.publish_many([message] * count, in_flight=4)
            await routed(greedy, queue_id, count)
        before = len(broker.log.read_text())

        # When one client lists all of them, claims them at once, and lists them again
        async def listed(state: StateName) -> int:
            return len([one async for one in greedy.list_entries("large", state)])

        async def list_and_claim() -> None:
            for _ in range(ROUNDS):
                assert await listed("available") == COUNT
                claimed = await greedy.claim("large", COUNT)
                assert len(claimed) == COUNT
                assert await listed("in_flight") == COUNT
                tokens = [one.lease_token for one in claimed]
                assert not any(await greedy.nack(tokens, "again", delay=0))
                await routed(greedy, "large", COUNT)

        # And another client claims meanwhile
        working = asyncio.create_task(list_and_claim())
        answered = 0
        while not working.done():
            (message_of_other,) = await other.claim("small", wait=20)
            await message_of_other.release()
            answered += 1
        await working

        # Then its claims were answered, and no step of the broker took long
        log = broker.log.read_text()[before:]
        assert answered > ROUNDS
        return log if longest_step_ms(log) > STEP_MS_MAX else None
