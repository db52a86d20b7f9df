"""What an hour of steady load leaves on a disk: files, bytes, memory.

python -m benchmarks.steady --minutes 60 --rate 500 --calls 20

Messages are published, claimed and acked at a steady rate. Every minute a line states, for each
kind of file, the number of files, their bytes, and their bytes divided by those of the stored
payloads (without a janitor nothing is removed), and the resident memory of each service. Files of a
kind are bounded when their column no longer grows.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import slatemq
from benchmarks.suite import payloads, servers
from benchmarks.suite.memory import resident_mb
from slatemq.client import Client
from slatemq.models import OutgoingMessage

QUEUE = "steady"
KINDS = ("wal", "compacted", "manifest", "compactions", "gc")
"""Folders of a SlateDB database; `other` is what lies beside them."""


def files_in(root: Path) -> tuple[Counter[str], int]:
    """The files below a folder by kind, and their bytes together."""
    kinds: Counter[str] = Counter()
    total = 0
    for folder, _, names in os.walk(root):
        place = Path(folder).relative_to(root).parts
        kind = next((part for part in place if part in KINDS), "other")
        for name in names:
            try:
                total += Path(folder, name).stat().st_size
            except FileNotFoundError:
                continue  # collected between the two looks
            kinds[kind] += 1
    return kinds, total


class Load:
    """Publishes at this rate of calls a second, and consumes the messages."""

    def __init__(self, client: Client, rate: int, calls: int, size: int, kind: str) -> None:
        self._client = client
        self._each = max(1, rate // calls)
        self._calls = calls
        self._size = size
        self._kind = kind
        self.published = 0
        self.acked = 0

    async def publish(self, seconds: float) -> None:
        """Until the time is over; a call that takes long delays the next ones."""
        began = time.monotonic()
        headers = {"queue": QUEUE}
        for number in range(int(seconds * self._calls)):
            await asyncio.sleep(max(0.0, began + number / self._calls - time.monotonic()))
            numbers = range(self.published, self.published + self._each)
            made = [payloads.make(one, self._size, self._kind) for one in numbers]
            await self._client.publish_many([OutgoingMessage(one, headers) for one in made])
            self.published += self._each

    async def consume(self) -> None:
        """Until it is cancelled."""
        while True:
            claimed = await self._client.claim(QUEUE, 1000, wait=5)
            for error in await self._client.ack([one.lease_token for one in claimed]):
                if error is not None:
                    raise error
            self.acked += len(claimed)


async def observe(load: Load, data: Path, pids: Mapping[str, int], size: int) -> None:
    """A line at once and then every minute, until it is cancelled."""
    print("minute published acked", *KINDS, "other MB ratio", *(f"{n}_MB" for n in pids))
    minute = 0
    while True:
        await asyncio.sleep(60)
        minute += 1
        kinds, total = await asyncio.to_thread(files_in, data)
        stored = load.published * size
        counts = [kinds[kind] for kind in (*KINDS, "other")]
        memory = [f"{mb:.0f}" for mb in resident_mb(pids).values()]
        items = [f"{total / 1e6:.0f}", f"{total / stored:.2f}" if stored else "-", *memory]
        print(minute, load.published, load.acked, *counts, *items, flush=True)


async def run(
    server: servers.Server, minutes: float, rate: int, calls: int, size: int, kind: str
) -> None:
    """The whole load, with consumers and observer beside it."""
    async with slatemq.connect(server.url) as client:
        await client.create_queue(QUEUE)
        load = Load(client, rate, calls, size, kind)
        pids = {name: pid for name, pid in server.named().items() if name != "launcher"}
        beside = [
            asyncio.create_task(load.consume()),
            asyncio.create_task(observe(load, server.folder / "data", pids, size)),
        ]
        publishing = asyncio.create_task(load.publish(minutes * 60 + 1))
        try:
            # Any failure ends the run.
            done, _ = await asyncio.wait([publishing, *beside], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (publishing, *beside):
                task.cancel()
            await asyncio.gather(publishing, *beside, return_exceptions=True)


def main() -> None:
    """Starts a stack, and holds the load."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.steady")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=int, default=500, help="messages a second")
    parser.add_argument("--calls", type=int, default=20, help="publishes a second")
    parser.add_argument("--size", type=int, default=1024, help="bytes of a payload")
    parser.add_argument("--random", action="store_true", help="of random bytes, not JSON events")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="steady-") as folder,
        servers.slatemq(Path(folder)) as server,
    ):
        kind = payloads.RANDOM if given.random else payloads.EVENTS
        asyncio.run(run(server, given.minutes, given.rate, given.calls, given.size, kind))


if __name__ == "__main__":
    main()
