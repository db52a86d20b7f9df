"""(g) and (j): claims from a queue in which very much waits; starting again with all of it.

The backlog is written straight into the store (benchmarks.volume): ten million messages take
minutes, not an hour. Then rounds in which 1,000 more are published and 1,000 claimed from the front
and acked; only the claims and acks are timed, the same way for every size. From 10^5 on, a drain of
50,000 without a pause as well.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import slatemq
from benchmarks.suite import payloads, servers
from benchmarks.suite.crew import Failed
from benchmarks.suite.memory import peak_mb, resident_mb
from benchmarks.suite.servers import Server
from benchmarks.suite.workloads import Measured
from benchmarks.volume import Volume, write
from slatemq._consume.delivered import Received
from slatemq.client import Client
from slatemq.models import OutgoingMessage

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
ROUTED_S_MAX = 600.0


class Backlog:
    """One queue of one stack, and what is in it; may be taken up again by a later stack."""

    def __init__(self, volume: Volume, rounds: int) -> None:
        self._rounds = rounds
        self._waiting = volume.waiting
        self._published = volume.messages + 1  # those that are there are numbered from 1 on
        self._seen: set[int] = set()
        beside = f" beside {volume.delayed} delayed" if volume.delayed else ""
        self._of = f"{beside} @{volume.waiting}"
        self.numbers: dict[str, float] = {}

    @property
    def claimed(self) -> int:
        """How many messages came back whole, each once, and were acked."""
        return len(self._seen)

    # --- Claiming -----------------------------------------------------------

    async def measure(self, server: Server) -> None:
        """Rounds at this size, then a drain."""
        async with slatemq.connect(server.url) as client:
            await _until(client, "available_count", self._waiting)
            took = [await self._round(client) for _ in range(self._rounds)]
            self.numbers[f"claim+ack/s{self._of}"] = ROUND / statistics.median(took)
            if self._waiting >= DRAIN_FROM:
                began = time.perf_counter()
                await self._take(client, DRAIN, 1000)
                self.numbers[f"drain/s{self._of}"] = DRAIN / (time.perf_counter() - began)
        memory = peak_mb(server.named())
        self.numbers |= {f"{name} peak MB{self._of}": mb for name, mb in memory.items()}

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
        """Claims and acks `messages` messages."""
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

    async def first_claims(self, server: Server, how: str, began: float) -> None:
        """After a start at `began`: the time until claims are answered, and what memory it took."""
        self.numbers[f"serving s, {how}{self._of}"] = time.monotonic() - began
        async with slatemq.connect(server.url) as client:
            await self._take(client, CLAIM, CLAIM)
            self.numbers[f"first claims s, {how}{self._of}"] = time.monotonic() - began
            await _until(client, "available_count", self._waiting)
        now = resident_mb(server.named())
        self.numbers |= {f"{name} MB, {how}{self._of}": mb for name, mb in now.items()}


async def _until(client: Client, state: str, wanted: int) -> None:
    """Waits until the broker counts `wanted` messages in this state."""
    ends_at = time.monotonic() + ROUTED_S_MAX
    while (found := getattr((await client.get_queue(QUEUE)).counts, state)) != wanted:
        if time.monotonic() > ends_at or found > wanted:
            raise Failed(f"{state} is {found}, not {wanted}")
        await asyncio.sleep(0.005 if wanted - found <= ROUND else 0.2)


def backlog(folder: Path, sizes: Sequence[int], delayed: Sequence[int], rounds: int) -> Measured:
    """Every size with every number of delayed messages, each on an instance of its own.

    The starts come with the largest size.
    """
    numbers: dict[str, float] = {}
    counted = 0
    for beside in delayed:
        for size in sorted(sizes):
            with tempfile.TemporaryDirectory(dir=folder) as own:
                volume = Volume(waiting=size, delayed=beside, queue=QUEUE, payload_bytes=BYTES)
                queue = Backlog(volume, rounds)
                _of_one(Path(own), volume, queue, starts=size == max(sizes))
            text = "  ".join(f"{what} {value:,.1f}" for what, value in queue.numbers.items())
            print(f"  {text}", flush=True)
            numbers |= queue.numbers
            counted += queue.claimed
    return Measured(numbers, {"payload bytes": BYTES}, counted)


def _of_one(folder: Path, volume: Volume, queue: Backlog, *, starts: bool) -> None:
    asyncio.run(write((folder / "data").as_uri(), volume))
    with servers.slatemq(folder) as server:
        asyncio.run(queue.measure(server))
    for how in ("after a stop", "after kill -9") if starts else ():
        began = time.monotonic()
        with servers.slatemq(folder) as server:
            asyncio.run(queue.first_claims(server, how, began))
            if how == "after a stop":
                for pid in server.named().values():
                    os.kill(pid, signal.SIGKILL)
