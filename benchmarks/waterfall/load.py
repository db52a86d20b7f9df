"""The clients of a waterfall, each in a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import slatemq
from benchmarks.suite import payloads

QUEUE = "waterfall"

IDLE_S = 1.0
"""Before the load: connections and caches are made by then."""


async def publish(address: str, rate: float, count: int) -> dict[int, tuple[float, float]]:
    """Single messages at a steady rate. Returns when each was published and answered, by ID."""
    found: dict[int, tuple[float, float]] = {}

    async def one(client: slatemq.Client, number: int) -> None:
        payload = payloads.make(number, 1024, payloads.EVENTS)
        began = time.monotonic()
        published = await client.publish(payload, {"queue": QUEUE})
        found[published.message_id] = began, time.monotonic()

    async with slatemq.connect(address) as client, asyncio.TaskGroup() as tasks:
        await client.publish(b"first", {"queue": QUEUE})
        await asyncio.sleep(IDLE_S)
        began = time.monotonic()
        for number in range(count):
            wait = began + number / rate - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.create_task(one(client, number))
    return found


async def consume(address: str, count: int) -> dict[int, float]:
    """When each message came, by ID."""
    found: dict[int, float] = {}
    async with slatemq.connect(address) as client, client.consume(QUEUE) as messages:
        async for message in messages:
            found[message.message_id] = time.monotonic()
            async with message:
                pass
            if len(found) > count:  # and the first one
                return found
    return found


def in_process(work: Callable[..., Coroutine[Any, Any, Any]], sent: Any, *arguments: Any) -> None:
    """Send what a coroutine function returns."""
    sent.send(asyncio.run(work(*arguments)))
