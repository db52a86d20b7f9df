"""A normal queue beside a thousand delayed ones, against the same queue alone.

python -m benchmarks.delayed_beside

Two stacks, each with a queue through which messages go; one of them has a thousand delayed queues
as well, with a delayed message in each. Rounds alternate between the two, so that what disturbs the
machine disturbs both; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import slatemq
from benchmarks.suite import payloads, servers
from slatemq.client import Client
from slatemq.models import OutgoingMessage

HOUR_S = 3600


async def round_trip(client: Client, messages: int) -> float:
    """Publishes, claims and acks `messages` messages. Returns messages per second."""
    headers = {"queue": "normal"}
    outgoing = [OutgoingMessage(payloads.make(one, 1024), headers) for one in range(messages)]
    began = time.perf_counter()
    await client.publish_many(outgoing, in_flight=2)
    left = messages
    while left:
        claimed = await client.claim("normal", 1000, wait=5)
        for error in await client.ack([message.lease_token for message in claimed]):
            if error is not None:
                raise error
        left -= len(claimed)
    return messages / (time.perf_counter() - began)


async def delay(client: Client, queues: int) -> None:
    """Creates `queues` delayed queues, each with a message that is due in an hour."""
    for number in range(queues):
        await client.create_queue(f"delayed-{number}", default_delay=600)
    await client.publish_many(
        [
            OutgoingMessage(
                b"later",
                {"queue": f"delayed-{number}"},
                visible_at_ms=int((time.time() + HOUR_S) * 1000),
            )
            for number in range(queues)
        ]
    )


async def measure(alone: str, beside: str, queues: int, rounds: int, messages: int) -> None:
    async with slatemq.connect(alone) as first, slatemq.connect(beside) as second:
        for client in (first, second):
            await client.create_queue("normal")
        await delay(second, queues)
        rates: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds + 1):
            for client, kept in zip((first, second), rates, strict=True):
                rate = await round_trip(client, messages)
                if number:  # the first round warms up
                    kept.append(rate)
    without, with_them = map(statistics.median, rates)
    print(f"alone                       {without:8.0f} msg/s")
    print(f"beside {queues:5} delayed queues {with_them:8.0f} msg/s, x {with_them / without:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delayed_beside")
    parser.add_argument("--queues", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--messages", type=int, default=5000)
    given = parser.parse_args()
    with ExitStack() as stack:
        alone, beside = (
            stack.enter_context(
                servers.slatemq(
                    Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
                )
            ).url
            for _ in range(2)
        )
        asyncio.run(measure(alone, beside, given.queues, given.rounds, given.messages))


if __name__ == "__main__":
    main()
