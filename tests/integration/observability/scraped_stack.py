"""A stack that a real Prometheus scrapes, with traffic; and waiting for its alerts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import slatemq
from slatemq import Push
from slatemq.errors import DeadlineExceeded, FailedPrecondition, NotFound, Unavailable
from tests.acceptance.local_stack import LocalStack
from tests.integration.observability.alert_rules import alerts
from tests.integration.observability.prometheus_server import Prometheus, eventually, prometheus

WAIT_S = 60.0
PAUSE_S = 0.3
"""Between two rounds of the traffic: several in each second, in which there is one scrape."""

IN_FLIGHT_MAX = 1_000

STANDING_STILL = (Unavailable, DeadlineExceeded, FailedPrecondition)
"""What calls raise while tests stop a service, or after that: leases have ended meanwhile."""


class Traffic(threading.Thread):
    """Messages that are published, claimed and acked all the time, from a thread of its own."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self._endpoint = endpoint
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        asyncio.run(self._work())

    def stop(self) -> None:
        self._ended.set()
        self.join()

    async def _work(self) -> None:
        async with slatemq.connect(self._endpoint) as client:
            await client.create_queue("orders")
            await client.create_queue("flaky", max_attempts=100, backoff=slatemq.Backoff.none())
            # Its priority cannot be computed; it begins with what is stored already.
            await client.publish("x", {"queue": "orders"})
            await client.create_queue(
                "replayed",
                filter='headers.queue == "orders"',
                priority="int(headers.rank)",
                start_from="beginning",
            )
            while not self._ended.is_set():
                with suppress(*STANDING_STILL):
                    await self._round(client)
                await asyncio.sleep(PAUSE_S)

    async def _round(self, client: slatemq.Client) -> None:
        with suppress(NotFound):
            await client.get_queue("absent")
        await client.publish("x", {"queue": "orders"})
        await client.publish("x", {"queue": "flaky"})
        for message in await client.claim("orders", 10, wait=1):
            await client.execute([slatemq.Complete(message)])
            await client.execute([Push("flaky", "y")])
        claimed = await client.claim("flaky", 10)
        tokens = [message.lease_token for message in claimed]
        await client.nack(tokens[:1])
        await client.ack(tokens[1:])


@contextmanager
def scraped(folder: Path, *arguments: str) -> Iterator[tuple[LocalStack, Prometheus]]:
    """A stack, and the Prometheus that scrapes it."""
    with pytest.MonkeyPatch.context() as environ:
        # So that there are some, on a fast machine too.
        environ.setenv("SLATEMQ_SLOW_STEP_MS", "1")
        environ.setenv("SLATEMQ_IN_FLIGHT_MAX", str(IN_FLIGHT_MAX))
        environ.setenv("SLATEMQ_BACKUP_ROOT", (folder / "backups").as_uri())
        stack = LocalStack(folder / "stack", *arguments, "--http-ports", "0", ready=True)
    with stack, prometheus(folder / "prometheus", stack.http_endpoints) as server:
        yield stack, server


def firing(server: Prometheus, *wanted: tuple[str, str]) -> None:
    """Wait until these have fired, each with its queue or service."""
    left = set(wanted)  # Each for as long as its window lasts, perhaps not together.

    def all_have_fired() -> bool:
        left.difference_update(server.firing())
        return not left

    eventually(all_have_fired, WAIT_S, lambda: left)


def ended(server: Prometheus, *wanted: tuple[str, str]) -> None:
    """Wait until none of these fires; of none given: no alert that is a page."""
    pages = {name for name, rule in alerts().items() if rule["labels"]["severity"] == "page"}

    def have_ended() -> bool:
        left = server.firing()
        return not (left & {*wanted} if wanted else {name for name, _ in left} & pages)

    eventually(have_ended, WAIT_S, server.firing)


async def push(endpoint: str) -> None:
    """To an ingest, through a broker."""
    async with slatemq.connect(endpoint) as client:
        await client.execute([Push("flaky", "y")])
