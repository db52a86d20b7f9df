"""(h): how fast messages are routed, by the number of queues whose filters have an equality.

The router stands still while messages are published and goes on then, so that routing alone is
timed: until a last message, which goes to a queue of its own, can be claimed. Once with messages
for all of the queues, once for ten of them. Then each queue's messages are counted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import slatemq
from benchmarks.suite import payloads, servers
from benchmarks.suite.crew import Failed
from benchmarks.suite.servers import Server
from benchmarks.suite.workloads import Measured
from slatemq.client import Client
from slatemq.models import OutgoingMessage

BYTES = 100
ROUNDS = 3
FEW = 10
AT_ONCE = 64
MARK = "the-last"
WAIT_S = 60.0


async def _create(client: Client, queues: int) -> None:
    await client.create_queue(MARK, filter='headers["last"] == "1"')
    room = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with room:
            wanted = f'headers["tenant"] == "t{number}" && headers["kind"] != "none"'
            await client.create_queue(f"q{number}", filter=wanted)

    await asyncio.gather(*(one(number) for number in range(queues)))


async def _route(client: Client, router: int, messages: int, receiving: int) -> float:
    """Messages a second, for `messages` published while the router stood still."""
    os.kill(router, signal.SIGSTOP)
    try:
        await client.publish_many(
            (
                OutgoingMessage(
                    payloads.make(number, BYTES),
                    {"tenant": f"t{number % receiving}", "kind": "order"},
                )
                for number in range(messages)
            ),
            in_flight=2,
        )
        await client.publish(b"last", {"last": "1"})
    finally:
        os.kill(router, signal.SIGCONT)
    began = time.perf_counter()
    claimed = await client.claim(MARK, 1, wait=WAIT_S)
    took_s = time.perf_counter() - began
    if not claimed:
        raise Failed(f"{messages} messages were not routed within {WAIT_S:.0f} s")
    await client.ack([claimed[0].lease_token])
    return messages / took_s


async def _measure(server: Server, queues: int, messages: int) -> tuple[dict[str, float], int]:
    async with slatemq.connect(server.url, call_timeout=120) as client:
        began = time.monotonic()
        await _create(client, queues)
        created_s = time.monotonic() - began
        router = server.named()["router"]
        await _route(client, router, min(messages, 2000), queues)  # warms up
        spread = [await _route(client, router, messages, queues) for _ in range(ROUNDS)]
        few = [await _route(client, router, messages, min(FEW, queues)) for _ in range(ROUNDS)]
        counted = [queue.counts.available_count async for queue in client.list_queues("q")]
        expected = min(messages, 2000) + 2 * ROUNDS * messages
        if len(counted) != queues or sum(counted) != expected:
            raise Failed(f"{sum(counted)} of {expected} messages are in {len(counted)} queues")
    return {
        f"routed/s, to all @{queues}": statistics.median(spread),
        f"routed/s, to ten @{queues}": statistics.median(few),
        f"queues created/s @{queues}": queues / created_s,
    }, expected


def routing(folder: Path, counts: Sequence[int], messages: int) -> Measured:
    """Each number of queues on a stack of its own."""
    numbers: dict[str, float] = {}
    counted = 0
    for queues in counts:
        place = folder / str(queues)
        place.mkdir()
        with servers.slatemq(place) as server:
            found, routed = asyncio.run(_measure(server, queues, messages))
        numbers |= found
        counted += routed
        text = "  ".join(f"{what.split(' @')[0]} {value:,.0f}" for what, value in found.items())
        print(f"  {queues:>6,} queues: {text}", flush=True)
    return Measured(numbers, {"messages": messages, "payload bytes": BYTES}, counted)
