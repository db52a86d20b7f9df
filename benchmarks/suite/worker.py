"""One client process of a benchmark: `python -m benchmarks.suite.worker SPEC`, a JSON object.

It connects, prints "ready", waits for a line on stdin, works, and prints what it measured as JSON.
Times are monotonic seconds, so that those of several processes can be compared.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite import payloads
from benchmarks.suite.clients.contract import Client, Delivery
from benchmarks.suite.tally import Tally

try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop  # type: ignore[assignment]

IDLE_S_MAX = 60.0
"""A consumer that is given nothing for so long reports what it has."""


class Worker:
    """Runs one role: `spec` has system, url, role, queue, count, and what the role takes."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.queue = str(spec["queue"])
        self.count = int(spec["count"])
        self.size = int(spec.get("size", 1024))
        self.kind = str(spec.get("kind", payloads.EVENTS))
        payloads.make(0, self.size, self.kind)  # What takes long once is not to be measured.
        self.batch = int(spec.get("batch", 1000))
        self.depth = int(spec.get("depth", 1))
        self.first = int(spec.get("first", 0))
        module = importlib.import_module(f"benchmarks.suite.clients.{spec['system']}_client")
        self.clients: list[Client] = [
            module.Client(spec["url"]) for _ in range(int(spec.get("clients", 1)))
        ]

    async def run(self) -> dict[str, Any]:
        await asyncio.gather(*(client.open() for client in self.clients))
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        began, spent_s = time.monotonic(), time.process_time()
        measured = await getattr(self, str(self.spec["role"]))()
        ended = measured.pop("ended", None) or time.monotonic()
        spent_s = time.process_time() - spent_s
        await asyncio.gather(*(client.close() for client in self.clients))
        return {"began": began, "ended": ended, "processor_s": spent_s, **measured}

    async def prepare(self) -> dict[str, Any]:
        await self.clients[0].prepare(self.spec["queues"])
        return {}

    async def publish(self) -> dict[str, Any]:
        """`depth` batches under way at once on each client."""
        starts = iter(range(self.first, self.first + self.count, self.batch))
        last = self.first + self.count

        async def one(client: Client) -> None:
            for start in starts:
                numbers = range(start, min(start + self.batch, last))
                await client.publish(
                    self.queue, [payloads.make(n, self.size, self.kind) for n in numbers]
                )

        await asyncio.gather(*(one(c) for c in self.clients for _ in range(self.depth)))
        return {"count": self.count}

    async def timed(self) -> dict[str, Any]:
        """`callers` that publish one message after the other, for `seconds`.

        Before that, for `warm_s`, they do the same and nothing is noted.
        """
        queue, client = self.queue, self.clients[0]
        numbers = itertools.count(self.first)

        async def one(took_s: list[float], ends_at: float) -> None:
            while (began := time.monotonic()) < ends_at:
                await client.publish(queue, [payloads.make(next(numbers), self.size, self.kind)])
                took_s.append(time.monotonic() - began)

        took_s: list[float] = []
        for seconds in (float(self.spec["warm_s"]), float(self.spec["seconds"])):
            took_s.clear()
            began = time.monotonic()
            callers = (one(took_s, began + seconds) for _ in range(int(self.spec["callers"])))
            await asyncio.gather(*callers)
        return {
            "count": next(numbers) - self.first,
            "took_s": sorted(took_s),
            "lasted_s": time.monotonic() - began,
        }

    async def paced(self) -> dict[str, Any]:
        """Single messages at `rate` a second, however long each takes."""
        rate = float(self.spec["rate"])
        loop = asyncio.get_running_loop()
        began = loop.time()
        under_way: set[asyncio.Task[None]] = set()
        for number in range(self.count):
            wait = began + number / rate - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            client = self.clients[number % len(self.clients)]
            task = asyncio.create_task(
                client.publish(self.queue, [payloads.make(number, self.size, self.kind)])
            )
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)
        return {"count": self.count}

    async def consume(self) -> dict[str, Any]:
        """Claims and acks until all workers together have acked `count` messages.

        `depth` claims at once on each client; each goes on while one ack of it is under way.
        """
        spec = self.spec
        tally = Tally(Path(spec["tally"]), int(spec["workers"]), int(spec["worker"]))
        latencies: list[float] = []
        keep = bool(spec.get("latencies"))
        last_at = ended_at = time.monotonic()

        async def acked(client: Client, deliveries: Sequence[Delivery], fresh: int) -> None:
            nonlocal ended_at
            await client.ack(self.queue, deliveries)
            ended_at = time.monotonic()
            tally.acked(fresh)

        async def one(client: Client) -> None:
            nonlocal last_at
            acks: set[asyncio.Task[None]] = set()
            while tally.total() < self.count:
                deliveries = await client.consume(self.queue, self.batch)
                if deliveries:
                    now = last_at = time.monotonic()
                    read = [
                        payloads.read(payload, self.size, self.kind) for payload, _ in deliveries
                    ]
                    fresh = tally.see(number for number, _ in read)
                    if keep:
                        latencies.extend(now - sent for _, sent in read)
                    acks.add(asyncio.create_task(acked(client, deliveries, fresh)))
                if acks and (len(acks) > 1 or not deliveries):
                    done, acks = await asyncio.wait(acks, return_when=asyncio.FIRST_COMPLETED)
                    await asyncio.gather(*done)
            await asyncio.gather(*acks)

        await self._until_all_acked(
            [asyncio.create_task(one(c)) for c in self.clients for _ in range(self.depth)],
            tally,
            lambda: time.monotonic() - last_at > IDLE_S_MAX,
        )
        return {
            "ended": ended_at,
            "acked": tally.total(),
            "repeated": tally.repeated,
            "latencies": sorted(latencies),
        }

    async def _until_all_acked(
        self, loops: list[asyncio.Task[None]], tally: Tally, idle: Callable[[], bool]
    ) -> None:
        """Until nothing is left, or nothing came for long; loops that still wait are cancelled."""
        while tally.total() < self.count and not idle():
            await asyncio.wait(loops, timeout=0.05, return_when=asyncio.FIRST_EXCEPTION)
            for loop in loops:
                if loop.done():
                    loop.result()
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)


def main() -> None:
    worker = Worker(json.loads(sys.argv[1]))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        print(json.dumps(runner.run(worker.run())), flush=True)


if __name__ == "__main__":
    main()
