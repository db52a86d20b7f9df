"""Killing the services of a partitioned queue while messages flow through it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

import slatemq
from slatemq.errors import Unavailable
from tests.integration.janitor.instances import WAIT_S, Instance, instance
from tests.partition_rule import partition_of

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]

BROKERS = 3
MESSAGES = 3_000
KILLS = 12


async def publish(made: Instance) -> dict[int, str]:
    """Publishes in small requests, of which each third message has no ordering header."""
    published: dict[int, str] = {}
    for start in range(0, MESSAGES, 50):
        batch = []
        for number in range(start, start + 50):
            customer = "" if number % 3 == 0 else f"customer-{number % 17}"
            headers = {"queue": "q"} | ({"customer": customer} if customer else {})
            batch.append((customer, slatemq.OutgoingMessage(b"%d" % number, headers)))
        ids = await made.client.publish_many([message for _, message in batch])
        published |= {int(one): customer for one, (customer, _) in zip(ids, batch, strict=True)}
        await asyncio.sleep(0.05)
    return published


async def consume(made: Instance, worked: Counter[int], is_over: asyncio.Event) -> None:
    """Works through whatever comes, by a stream and by claims."""

    async def stream() -> None:
        async with made.client.consume("q", lease=3) as messages:
            async for message in messages:
                async with message:
                    worked[message.message_id] += 1

    async def claims() -> None:
        while not is_over.is_set():
            try:
                messages = await made.client.claim("q", 20, wait=1, lease=3)
            except Unavailable:
                continue  # One broker is down, and the others have nothing.
            for message in messages:
                worked[message.message_id] += 1
            await made.client.ack([message.lease_token for message in messages])

    streaming = asyncio.create_task(stream())
    try:
        await claims()
    finally:
        streaming.cancel()
        await asyncio.gather(streaming, return_exceptions=True)


async def kill_along(made: Instance, luck: random.Random) -> None:
    services = [made.ingest, made.router, *made.brokers]
    for _ in range(KILLS):
        await asyncio.sleep(luck.uniform(0.1, 1.0))
        victim = luck.choice(services)
        await victim.kill()
        await asyncio.sleep(luck.uniform(0, 0.5))
        await victim.start()


async def test_kills_leave_each_message_in_its_partition_once(tmp_path: Path) -> None:
    luck = random.Random()
    seed = luck.randrange(2**32)
    luck.seed(seed)
    async with instance(tmp_path, BROKERS, (), WAIT_S) as made:
        queue = await made.client.create_queue(
            "q", partitions=BROKERS, ordering_header="customer", max_attempts=1_000
        )
        worked: Counter[int] = Counter()
        is_over = asyncio.Event()
        consuming = asyncio.create_task(consume(made, worked, is_over))
        async with asyncio.timeout(500):
            published, _ = await asyncio.gather(publish(made), kill_along(made, luck))
            await made.routed()
            while (await made.client.get_queue("q")).counts.done_count < MESSAGES:
                if consuming.done():
                    consuming.result()
                await asyncio.sleep(0.2)
            is_over.set()
            await consuming

        done = [entry async for entry in made.client.list_entries("q", "done")]
        assert sorted(entry.message_id for entry in done) == sorted(published), seed
        assert worked.keys() >= published.keys(), seed
        for entry in done:
            customer = published[entry.message_id]
            partition = int(entry.handle.split("/")[2].partition(":")[0])
            assert partition == partition_of(entry.message_id, customer or None, BROKERS), seed
        after = await made.client.get_queue("q")
        assert (after.counts.available_count, after.counts.failed_count) == (0, 0), seed
        assert after.broker_shards == queue.broker_shards
