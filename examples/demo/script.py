"""What happens in the demo, in order."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from examples.demo.consumers import Books, consume_all
from examples.demo.judge import Delivery
from examples.demo.queues import LEASE_MS, MAX_ATTEMPTS, QUEUES, headers_of
from examples.demo.stack import DemoStack
from slatemq import Backoff, Client, OutgoingMessage, connect
from slatemq.errors import SlateMQError

PUBLISH_BATCH = 50
PUBLISH_PAUSE_SECONDS = 0.03
"""Slow enough to see consumers work, and the broker die, while messages come in."""

QUIET_SECONDS = 0.1
STALLED_SECONDS = 120.0
"""Without any progress for so long, the demo stops waiting; the judge says what is missing. The
killed broker is back long before, on a busy machine too."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Played:
    """What is left of a run: the consumers' notes, and the dead letters that the queues list."""

    deliveries: list[Delivery]
    dead_letters: dict[str, int]


BACKOFF = Backoff.exponential(0.05, jitter=0.5)
"""Shorter than a queue's default, so that the demonstration does not wait."""


async def play(stack: DemoStack, lines: Sequence[bytes], report: Report) -> Played:
    """Publish the lines, consume, kill the broker half-way."""
    books = Books()
    async with connect(
        stack.endpoint, credentials=stack.credentials, call_timeout=STALLED_SECONDS
    ) as client:
        for queue in QUEUES:
            await client.create_queue(
                queue.queue_id,
                filter=queue.filter,
                priority=queue.priority,
                max_attempts=MAX_ATTEMPTS,
                lease=LEASE_MS / 1000,
                backoff=BACKOFF,
            )
        report(f"created {', '.join(queue.queue_id for queue in QUEUES)}")
        consuming = asyncio.create_task(consume_all(client, QUEUES, books))
        await _publish(client, stack, lines, books, report)
        await _until_quiet(client, books, consuming)
        consuming.cancel()
        await asyncio.wait([consuming])
        dead_letters = {
            queue.queue_id: (await client.get_queue(queue.queue_id)).counts.failed_count
            for queue in QUEUES
        }
    return Played(books.deliveries, dead_letters)


async def _publish(
    client: Client, stack: DemoStack, lines: Sequence[bytes], books: Books, report: Report
) -> None:
    for begin in range(0, len(lines), PUBLISH_BATCH):
        if begin <= len(lines) // 2 < begin + PUBLISH_BATCH:
            pid = stack.kill("broker")
            report(
                f"killed the broker (SIGKILL, process {pid}) after {begin} messages published "
                f"and {books.acked_count} entries acked; publishing goes on"
            )
        batch = [
            OutgoingMessage(line, headers_of(json.loads(line)))
            for line in lines[begin : begin + PUBLISH_BATCH]
        ]
        await client.publish_batch(batch)
        await asyncio.sleep(PUBLISH_PAUSE_SECONDS)
    report(f"published {len(lines)} messages; {books.acked_count} entries acked so far")


async def _until_quiet(client: Client, books: Books, consuming: asyncio.Task[None]) -> None:
    """Wait until the queues hold nothing that could still be delivered, or nothing moves."""
    noted, moved_at = -1, time.monotonic()
    quiet = 0
    while not consuming.done() and quiet < 5:
        if len(books.deliveries) != noted:
            noted, moved_at = len(books.deliveries), time.monotonic()
        if time.monotonic() - moved_at > STALLED_SECONDS:
            return
        quiet = quiet + 1 if await _is_empty(client) else 0
        await asyncio.sleep(QUIET_SECONDS)


async def _is_empty(client: Client) -> bool:
    """Whether all is routed, and nothing waits in any queue. Only to know when to stop."""
    try:
        status = await client.status()
    except SlateMQError:
        return False
    routed = all(route.cursor >= route.durable_sequence for route in status.routes)
    return (
        bool(status.routes)
        and routed
        and len(status.queues) == len(QUEUES)
        and not any(
            queue.counts.available_count + queue.counts.delayed_count + queue.counts.in_flight_count
            for queue in status.queues
        )
    )
