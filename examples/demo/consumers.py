"""Consumers that compete, and sometimes fail, each in its own way; all of it is written down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from examples.demo.judge import Delivery, Outcome
from examples.demo.queues import LEASE_MS, DemoQueue, Event, is_poison
from slatemq import Client, Received
from slatemq.errors import SlateMQError

CONSUMERS_PER_QUEUE = 2
WORKERS_PER_CONSUMER = 8
PREFETCH = 40


class CannotProcess(Exception):
    """What a consumer's own code raises."""


@dataclass
class Books:
    """All deliveries, in the order in which consumers were done with them."""

    deliveries: list[Delivery] = field(default_factory=list)
    acked_count: int = 0

    def note(self, queue_id: str, message: Received, outcome: Outcome) -> None:
        """Write one down."""
        attempt = message.attempts_count
        self.deliveries.append(Delivery(queue_id, message.payload, attempt, outcome))
        self.acked_count += outcome is Outcome.ACKED


async def consume_all(client: Client, queues: Sequence[DemoQueue], books: Books) -> None:
    """Consume from every queue until cancelled."""
    async with asyncio.TaskGroup() as tasks:
        for queue in queues:
            for number in range(CONSUMERS_PER_QUEUE):
                tasks.create_task(_consume(client, queue.queue_id, f"demo-{number}", books))


async def _consume(client: Client, queue_id: str, consumer_id: str, books: Books) -> None:
    lease = LEASE_MS / 1000
    # Held for one lease only: what a worker forgets is not kept alive in the background.
    async with client.consume(
        queue_id, prefetch=PREFETCH, lease=lease, hold=lease, consumer_id=consumer_id
    ) as messages:

        async def worker() -> None:
            async for message in messages:
                books.note(queue_id, message, await _work(message))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(WORKERS_PER_CONSUMER):
                tasks.create_task(worker())


async def _work(message: Received) -> Outcome:
    """Process one message, or fail at it."""
    event: Event = json.loads(message.payload)
    if is_poison(event):
        return await _raise(message, "an amount without its currency")
    if message.attempts_count == 1:
        number = int(event["id"].removeprefix("evt-"))
        if number % 41 == 0:
            return await _raise(message, "the shop's database is down")
        if number % 43 == 0:
            return await _give_back(message)
        if number % 97 == 0:
            return Outcome.FORGOTTEN
    try:
        await message.ack()
    except SlateMQError:
        return Outcome.UNKNOWN
    return Outcome.ACKED


async def _raise(message: Received, why: str) -> Outcome:
    """Fail as programs mostly do: leaving the block with an exception nacks."""
    try:
        async with message:
            raise CannotProcess(why)
    except CannotProcess:
        return Outcome.FAILED


async def _give_back(message: Received) -> Outcome:
    try:
        await message.nack("try this one later", delay=0.2)
    except SlateMQError:
        return Outcome.UNKNOWN
    return Outcome.FAILED
