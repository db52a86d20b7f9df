"""One batch that very many queues want: it reaches them, and no other queue waits for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import slatemq
from slatemq.client import Client
from slatemq.models import OutgoingMessage
from tests.acceptance.local_stack import LocalStack
from tests.forms import proof

CREATED_AT_ONCE = 50


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    with LocalStack(tmp_path, ready=True) as stack:
        async with slatemq.connect(stack.endpoint) as client:
            yield client


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("queues", "messages"), [(150, 3_000), proof(1_400, 10_000)])
async def test_a_batch_that_very_many_queues_want_reaches_all_of_them(
    client: Client, queues: int, messages: int
) -> None:
    names = [f"all-{number}" for number in range(queues)]
    await client.create_queue("other")
    for first in range(0, queues, CREATED_AT_ONCE):
        some = names[first : first + CREATED_AT_ONCE]
        await asyncio.gather(*(client.create_queue(name, filter='"n" in headers') for name in some))

    batch = [OutgoingMessage(b"x", {"n": "1"}) for _ in range(messages)]
    await client.publish_many(batch)
    await client.publish(b"behind", headers={"queue": "other"})

    claimed: list[slatemq.ClaimedMessage] = []
    while not claimed:
        claimed = await client.claim("other", wait=60)
    assert [one.payload for one in claimed] == [b"behind"]
    for name in names:
        assert (await client.get_queue(name)).counts.available_count == messages
