"""(g) and (j): claims from a queue in which very much waits; starting again with all of it.

The backlog is published, as users would. For each size, rounds in which 1,000 more are published
and 1,000 claimed from the front and acked; only the claims and acks are timed, the same way for
every size. From 10^5 on, a drain of 50,000 without a pause as well.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import slatemq
from benchmarks.suite import payloads, servers
from benchmarks.suite.crew import Crew, Failed
from benchmarks.suite.memory import peak_mb, resident_mb
from benchmarks.suite.servers import Server
from benchmarks.suite.workloads import Measured
from slatemq.client import Client
from slatemq.delivered import Received
from slatemq.publisher import OutgoingMessage

QUEUE = "backlog"
BYTES = 100
HEADERS = {"topic": QUEUE}
ROUNDS = 50
ROUND = 1000
CLAIM = 100
LOOPS = 4
"""Claims under way at once."""
DRAIN = 50_000
DRAIN_FROM = 100_000
HOUR_MS = 3_600_000
DELAYED_HOURS = 10
ROUTED_S_MAX = 600.0


class Backlog:
    """One queue of one stack, and what is in it; may be taken up again by a later stack."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._waiting = 0
        self._published = 0
        self._seen: set[int] = set()
        self.numbers: dict[str, float] = {}

    @property
    def claimed(self) -> int:
        """How many messages came back whole, each once, and were acked."""
        return len(self._seen)

    # --- Filling ------------------------------------------------------------

    def begin(self, server: Server, delayed: int) -> None:
        """Makes the queue, with so many delayed messages."""
        crew = Crew(server)
        crew.add("prepare", QUEUE, 0, queues=[QUEUE])
        crew.run()
        asyncio.run(self._delay(server, delayed))

    def fill(self, server: Server, size: int) -> None:
        """Publishes until so many wait."""
        crew = Crew(server)
        missing = size - self._waiting
        crew.add_publishers(2, QUEUE, missing, self._published, size=BYTES, depth=4)
        crew.run()
        self._published += missing
        self._waiting = size

    async def _delay(self, server: Server, messages: int) -> None:
        """Delayed messages in the same queue, their times scattered over ten hours."""
        begin_ms = int(time.time() * 1000) + HOUR_MS
        chance = random.Random(0)
        async with slatemq.connect(server.url) as client:
            await client.publish_many(
                (
                    OutgoingMessage(
                        payloads.make(number, BYTES),
                        HEADERS,
                        visible_at_ms=begin_ms + chance.randrange(DELAYED_HOURS * HOUR_MS),
                    )
                    for number in range(messages)
                ),
                in_flight=4,
            )
            await _until(client, "delayed_count", messages)

    # --- Claiming -----------------------------------------------------------

    async def measure(self, server: Server, size: int) -> None:
        """Rounds at this size, then a drain."""
        async with slatemq.connect(server.url) as client:
            await _until(client, "available_count", self._waiting)
            took = [await self._round(client) for _ in range(self._rounds)]
            self.numbers[f"claim+ack/s @{size}"] = ROUND / statistics.median(took)
            if size >= DRAIN_FROM:
                began = time.perf_counter()
                await self._take(client, DRAIN, 1000)
                self.numbers[f"drain/s @{size}"] = DRAIN / (time.perf_counter() - began)
        memory = peak_mb(server.named())
        self.numbers |= {f"{name} peak MB @{size}": mb for name, mb in memory.items()}

    async def _round(self, client: Client) -> float:
        numbers = range(self._published, self._published + ROUND)
        await client.publish_many(
            [OutgoingMessage(payloads.make(number, BYTES), HEADERS) for number in numbers]
        )
        self._published += ROUND
        self._waiting += ROUND
        await _until(client, "available_count", self._waiting)
        began = time.perf_counter()
        await self._take(client, ROUND, CLAIM)
        return time.perf_counter() - began

    async def _take(self, client: Client, messages: int, at_once: int) -> None:
        """Claims and acks so many."""
        left = messages

        async def one() -> None:
            nonlocal left
            while left > 0:
                wanted = min(at_once, left)
                left -= wanted
                claimed = await client.claim(QUEUE, wanted, wait=1)
                left += wanted - len(claimed)
                await self._ack(client, claimed)

        await asyncio.gather(*(one() for _ in range(LOOPS)))
        self._waiting -= messages

    async def _ack(self, client: Client, claimed: Sequence[Received]) -> None:
        for message in claimed:
            number, _ = payloads.read(message.payload, BYTES)
            if number in self._seen:
                raise Failed(f"message {number} came twice")
            self._seen.add(number)
        for error in await client.ack([message.lease_token for message in claimed]):
            if error is not None:
                raise error

    # --- Starting again -----------------------------------------------------

    async def first_claims(self, server: Server, how: str, size: int, began: float) -> None:
        """After a start at `began`: the time until claims are answered, and what memory it took."""
        self.numbers[f"serving s, {how} @{size}"] = time.monotonic() - began
        async with slatemq.connect(server.url) as client:
            await self._take(client, CLAIM, CLAIM)
            self.numbers[f"first claims s, {how} @{size}"] = time.monotonic() - began
            await _until(client, "available_count", self._waiting)
        now = resident_mb(server.named())
        self.numbers |= {f"{name} MB, {how} @{size}": mb for name, mb in now.items()}


async def _until(client: Client, state: str, wanted: int) -> None:
    """Until the broker counts so many in this state."""
    ends_at = time.monotonic() + ROUTED_S_MAX
    while (found := getattr((await client.get_queue(QUEUE)).counts, state)) != wanted:
        if time.monotonic() > ends_at or found > wanted:
            raise Failed(f"{state} is {found}, not {wanted}")
        await asyncio.sleep(0.005 if wanted - found <= ROUND else 0.2)


def backlog(folder: Path, sizes: Sequence[int], delayed: int, rounds: int) -> Measured:
    """Every size in turn, in one queue that grows; then the starts with the largest."""
    queue = Backlog(rounds)
    with servers.slatemq(folder) as server:
        queue.begin(server, delayed)
        for size in sorted(sizes):
            queue.fill(server, size)
            asyncio.run(queue.measure(server, size))
            told = {what: value for what, value in queue.numbers.items() if f"@{size}" in what}
            print("  " + "  ".join(f"{w} {v:,.0f}" for w, v in told.items()), flush=True)
    size = max(sizes)
    for how in ("after a stop", "after kill -9"):
        began = time.monotonic()
        with servers.slatemq(folder) as server:
            asyncio.run(queue.first_claims(server, how, size, began))
            if how == "after a stop":
                for pid in server.named().values():
                    os.kill(pid, signal.SIGKILL)
    settings = {"delayed": delayed, "payload bytes": BYTES}
    return Measured(queue.numbers, settings, queue.claimed)
