"""What many shards cost on one machine: `python -m benchmarks.scale 2x1x1 8x4x1 32x16x4`.

Starts ingests x brokers x routers on a folder of its own, and prints a line for each size: at idle,
and at a low rate of messages, the memory, the processor time, the requests to the object store and
the calls among the services, each by what they are for.

Each service is a process as in production, with its HTTP port, whose metrics are what is counted.
The processes of one size are started a few at a time, as the machine has cores for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import slatemq

TICKS: Final = os.sysconf("SC_CLK_TCK")
PAGE: Final = os.sysconf("SC_PAGE_SIZE")
STARTS_AT_ONCE: Final = 4
START_S: Final = 240.0
SETTLE_S: Final = 15.0
"""For what follows a start: topology, first tails, the collector."""

QUEUES_PER_BROKER: Final = 2
SHOWN_CALLS: Final = 6

CALLS: Final = "rpc_server_duration_milliseconds_count"
REQUESTS: Final = "slatemq_store_requests_total"
_SERIES: Final = re.compile(r"^(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')


class Size(NamedTuple):
    ingests: int
    brokers: int
    routers: int

    @property
    def text(self) -> str:
        return "x".join(map(str, self))


class Counts(NamedTuple):
    """What all processes of a size have done since their start.

    Attributes:
        cpu_s: Processor time by service.
        requests: To the store, by service and kind.
        calls: By service and method.
    """

    at_s: float
    cpu_s: dict[str, float]
    requests: dict[str, float]
    calls: dict[str, float]


@dataclass
class Service:
    """One process."""

    name: str
    shard: int
    ready: Path
    process: asyncio.subprocess.Process | None = None

    async def start(self, root: str) -> None:
        with (self.ready.with_suffix(".log")).open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"services.{self.name}", "--root", root),
                *("--shard", str(self.shard), "--http-port", "0"),
                *("--ready-file", str(self.ready), "--parent-pid", str(os.getpid())),
                stdout=log,
                stderr=log,
            )
        async with asyncio.timeout(START_S):
            while not self.ready.exists():
                if self.process.returncode is not None:
                    raise RuntimeError(self.ready.with_suffix(".log").read_text()[-2_000:])
                await asyncio.sleep(0.05)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def addresses(self) -> Mapping[str, str]:
        found: Mapping[str, str] = json.loads(self.ready.read_text())
        return found

    @property
    def memory_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * PAGE

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def metrics(self) -> Iterable[tuple[str, Mapping[str, str], float]]:
        url = f"http://{self.addresses['http_address']}/metrics"
        with urllib.request.urlopen(url) as answer:
            text = answer.read().decode()
        for name, labels, value in _SERIES.findall(text):
            yield name, dict(_LABEL.findall(labels)), float(value)


class Instance:
    """All processes of one size."""

    def __init__(self, folder: Path, size: Size) -> None:
        numbers = {"ingest": size.ingests, "broker": size.brokers, "router": size.routers}
        self._root = (folder / "data").as_uri()
        self.services = [
            Service(name, shard, folder / f"{name}-{shard}.ready")
            for name, count in numbers.items()
            for shard in range(count)
        ]

    async def start(self) -> None:
        turns = asyncio.Semaphore(STARTS_AT_ONCE)

        async def start(service: Service) -> None:
            async with turns:
                await service.start(self._root)

        await asyncio.gather(*map(start, self.services))

    async def close(self) -> None:
        running = [one.process for one in self.services if one.process is not None]
        for process in running:
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*(process.wait() for process in running))

    @property
    def endpoint(self) -> str:
        return self.services[0].addresses["address"]

    def memory_mb(self) -> Mapping[str, float]:
        """The mean of each service, in MB."""
        total, count = Counter[str](), Counter[str]()
        for service in self.services:
            total[service.name] += service.memory_bytes
            count[service.name] += 1
        return {name: total[name] / count[name] / 1e6 for name in total}

    def counts(self) -> Counts:
        counts = Counts(time.monotonic(), *(defaultdict[str, float](float) for _ in range(3)))
        for service in self.services:
            counts.cpu_s[service.name] += service.cpu_s
        for service in self.services:
            for name, labels, value in service.metrics():
                if name == REQUESTS:
                    counts.requests[f"{service.name} {labels['slatemq_store_request']}"] += value
                elif name == CALLS:
                    counts.calls[f"{service.name} {labels['rpc_method']}"] += value
        return counts


class Rates(NamedTuple):
    """What all processes of a size do in a second."""

    cpu: Mapping[str, float]
    requests: Mapping[str, float]
    calls: Mapping[str, float]


def rates(before: Counts, after: Counts) -> Rates:
    seconds = after.at_s - before.at_s
    per_s = [
        {key: (new[key] - old.get(key, 0)) / seconds for key in new if new[key] > old.get(key, 0)}
        for old, new in zip(before[1:], after[1:], strict=True)
    ]
    return Rates(*per_s)


async def measured(instance: Instance, seconds: float) -> Rates:
    before = instance.counts()
    await asyncio.sleep(seconds)
    return rates(before, instance.counts())


async def traffic(
    instance: Instance, size: Size, rate: float, seconds: float
) -> tuple[Rates, Sequence[float]]:
    """What a low rate costs, and how long each message took from its publish to its delivery."""
    async with slatemq.connect(instance.endpoint, call_timeout=60) as client:
        queues = [f"queue-{number}" for number in range(QUEUES_PER_BROKER * size.brokers)]
        for queue in queues:
            await client.create_queue(queue, filter=f'headers.to == "{queue}"')
        took: list[float] = []

        async def consume(queue: str) -> None:
            async for message in client.consume(queue):
                took.append(time.monotonic() - float(message.payload))
                await message.ack()

        consumers = [asyncio.create_task(consume(queue)) for queue in queues]
        publishes = []
        await asyncio.sleep(SETTLE_S / 3)
        before, began = instance.counts(), time.monotonic()
        count = int(rate * seconds)
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
            payload = str(time.monotonic()).encode()
            headers = {"to": queues[number % len(queues)]}
            publishes.append(asyncio.create_task(client.publish(payload, headers)))
        await asyncio.gather(*publishes)
        found = rates(before, instance.counts())
        async with asyncio.timeout(60):
            while len(took) < count:  # noqa: ASYNC110 - consumers of all queues add to it
                await asyncio.sleep(0.1)
        for consumer in consumers:
            consumer.cancel()
        await asyncio.wait(consumers)
    return found, sorted(took)


def show(title: str, found: Rates) -> None:
    """A line for each of processor time, requests and calls, with what there is most of."""
    cores = {name: 100 * share for name, share in found.cpu.items()}
    print(f"  {title}: processor {sum(cores.values()):.1f} % of a core ({_most(cores, 9)})")
    requests, calls = sum(found.requests.values()), sum(found.calls.values())
    print(f"    requests to the store: {requests:.1f}/s ({_most(found.requests, SHOWN_CALLS)})")
    print(f"    calls: {calls:.1f}/s ({_most(found.calls, SHOWN_CALLS)})", flush=True)


def _most(values: Mapping[str, float], count: int) -> str:
    most = sorted(values.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name} {value:.1f}" for name, value in most)


async def measure(size: Size, given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="slatemq-scale-") as folder:
        instance = Instance(Path(folder), size)
        try:
            began = time.monotonic()
            await instance.start()
            print(f"{size.text}: {len(instance.services)} processes", end="")
            print(f" serve after {time.monotonic() - began:.0f} s", flush=True)
            await asyncio.sleep(SETTLE_S)
            memory = {name: round(mb) for name, mb in instance.memory_mb().items()}
            total = sum(one.memory_bytes for one in instance.services) / 1e6
            print(f"  memory: {total:.0f} MB (mean of each: {_most(memory, 3)})", flush=True)
            show("idle", await measured(instance, given.seconds))
            found, took = await traffic(instance, size, given.rate, given.seconds)
            show(f"{given.rate:g} messages/s", found)
            p50, p99 = (1000 * took[int(share * (len(took) - 1))] for share in (0.5, 0.99))
            print(f"    publish to delivery: p50 {p50:.0f} ms, p99 {p99:.0f} ms")
        finally:
            await instance.close()


def size_of(text: str) -> Size:
    ingests, brokers, routers = (int(part) for part in text.split("x"))
    if min(ingests, brokers, routers) < 1:
        raise ValueError("a stack has at least one of each")
    return Size(ingests, brokers, routers)


def main() -> None:
    """Measure the sizes that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sizes", nargs="+", type=size_of, metavar="INGESTSxBROKERSxROUTERS", help="such as 8x4x1"
    )
    parser.add_argument("--rate", type=float, default=30.0, help="messages a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    given = parser.parse_args()
    for size in given.sizes:
        asyncio.run(measure(size, given))


if __name__ == "__main__":
    main()
