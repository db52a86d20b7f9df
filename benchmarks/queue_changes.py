"""The lag of routing beside changes of queues, against the same stack when nothing changes.

python -m benchmarks.queue_changes
python -m benchmarks.queue_changes --change pause --changes 20000

Messages go through one queue, at a steady rate; the lag of each is the time from the call that
publishes it to its delivery. After a quiet stretch, several callers create queues, or pause and
resume one, as fast as they can.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import slatemq
from benchmarks.suite import servers
from slatemq.client import Client

QUEUE = "beside"
WARM_UP = 100
"""Messages that count for neither stretch."""


class Lags:
    """Sends and receives messages, and notes the lag of each in seconds."""

    def __init__(self, client: Client, per_second: float) -> None:
        self.seconds: list[float] = []
        self.sent_count = self.received_count = 0
        self._received = asyncio.Event()
        self._client = client
        self._every_s = 1 / per_second
        self._stopping = asyncio.Event()

    async def publish(self) -> None:
        """Publish until `stop`, each message when its time has come, whatever became of others."""
        begun, sending = time.perf_counter(), set()
        while not self._stopping.is_set():
            sent = repr(time.perf_counter()).encode()
            sending.add(asyncio.create_task(self._client.publish(sent, headers={"queue": QUEUE})))
            self.sent_count += 1
            await asyncio.sleep(begun + self.sent_count * self._every_s - time.perf_counter())
        await asyncio.gather(*sending)

    async def receive(self) -> None:
        """Receive until cancelled."""
        async with self._client.consume(QUEUE) as messages:
            async for message in messages:
                async with message:
                    self.seconds.append(time.perf_counter() - float(message.payload))
                    self.received_count += 1
                    self._received.set()

    def stop(self) -> None:
        self._stopping.set()

    async def received(self, count: int) -> None:
        """Wait until `count` messages were received since the beginning."""
        while self.received_count < count:
            self._received.clear()
            await self._received.wait()


def described(name: str, seconds: list[float]) -> float:
    """Print one stretch; gives its p99."""
    p99 = statistics.quantiles(seconds, n=100)[98]
    median, longest = statistics.median(seconds), max(seconds)
    print(
        f"{name:8} {len(seconds):6} messages, lag: median {1000 * median:7.1f} ms, "
        f"p99 {1000 * p99:7.1f} ms, longest {1000 * longest:7.1f} ms"
    )
    return p99


async def change_queues(client: Client, kind: str, count: int, callers: int) -> float:
    """Make `count` changes. Returns changes per second."""
    numbers = itertools.count()

    async def create(number: int) -> object:
        return await client.create_queue(f"made-{number:06}")

    async def pause(number: int) -> object:
        queue_id = f"paused-{number % callers}"
        return await (client.pause_queue if number // callers % 2 else client.resume_queue)(
            queue_id
        )

    async def call(change: Callable[[int], Awaitable[object]]) -> None:
        while (number := next(numbers)) < count:
            await change(number)

    if kind == "pause":
        for number in range(callers):
            await client.create_queue(f"paused-{number}")
    began = time.perf_counter()
    await asyncio.gather(*(call(create if kind == "create" else pause) for _ in range(callers)))
    return count / (time.perf_counter() - began)


async def measure(url: str, given: argparse.Namespace) -> bool:
    async with slatemq.connect(url) as traffic, slatemq.connect(url) as changes:
        await traffic.create_queue(QUEUE)
        lags = Lags(traffic, given.per_second)
        receiving, publishing = (
            asyncio.create_task(lags.receive()),
            asyncio.create_task(lags.publish()),
        )
        await lags.received(WARM_UP)
        lags.seconds = []
        await asyncio.sleep(given.quiet_s)
        quiet, lags.seconds = lags.seconds, []
        rate = await change_queues(changes, given.change, given.changes, given.callers)
        lags.stop()
        await publishing
        await lags.received(lags.sent_count)
        receiving.cancel()
        before, beside = described("quiet", quiet), described("beside", lags.seconds)
    print(
        f"{given.changes} changes ({given.change}), {rate:.0f} a second by {given.callers} callers"
    )
    print(f"p99 beside changes / quiet: {beside / before:.2f}")
    return bool(beside < given.times_max * before)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queue_changes")
    parser.add_argument("--change", choices=("create", "pause"), default="create")
    parser.add_argument("--changes", type=int, default=10_000)
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--per-second", type=float, default=50)
    parser.add_argument("--quiet-s", type=float, default=10)
    parser.add_argument("--times-max", type=float, default=3)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        servers.slatemq(Path(folder)) as server,
    ):
        return 0 if asyncio.run(measure(server.url, given)) else 1


if __name__ == "__main__":
    sys.exit(main())
