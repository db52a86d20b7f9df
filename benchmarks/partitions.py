"""What a message of a partitioned queue costs: `python -m benchmarks.partitions`.

Starts an ingest, a router and as many brokers as there are partitions, publishes, consumes and
acks by batches, and prints microseconds of processor time for each message, by service: of all
brokers together, and of the busiest one, which should fall.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import slatemq
from benchmarks.processor_time import threads_s

BATCH: Final = 1000
START_S: Final = 60.0
QUEUE: Final = "q"


@contextmanager
def processes(folder: Path, brokers_count: int) -> Iterator[Mapping[str, int]]:
    """The process of each service, with the file that has its address in `folder`."""
    shards = [("broker", number) for number in range(brokers_count)]
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        # The router comes last: so it finds all brokers at its first look.
        for name, shard in [("ingest", 0), *shards, ("router", 0)]:
            ready = folder / f"{name}-{shard}.json"
            command = [sys.executable, "-m", f"services.{name}", "--root"]
            command += [(folder / "data").as_uri(), "--port", "0", "--peer-port", "0"]
            command += ["--shard", str(shard), "--ready-file", str(ready)]
            with (folder / f"{name}-{shard}.log").open("wb") as log:
                process = subprocess.Popen(command, stderr=log)
            started[f"{name} {shard}"] = process
            until = time.monotonic() + START_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > until:
                    sys.exit(f"{name} {shard} did not start: see {log.name}")
                time.sleep(0.02)
        yield {name: process.pid for name, process in started.items()}
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            process.wait()


def spent_s(pids: Mapping[str, int]) -> dict[str, float]:
    return {name: sum(threads_s(pid).values()) for name, pid in pids.items()}


async def work(address: str, count: int) -> float:
    """Publishes and consumes; gives the seconds that it took."""
    message = slatemq.OutgoingMessage(os.urandom(100), {"queue": QUEUE})
    async with slatemq.connect(address) as client:
        began = time.perf_counter()
        publishing = asyncio.create_task(client.publish_many([message] * count, in_flight=4))
        done = 0
        async with client.consume_batches(QUEUE, BATCH) as batches:
            async for batch in batches:
                await batch.ack_all()
                done += len(batch)
                if done == count:
                    break
        await publishing
        return time.perf_counter() - began


async def create(address: str, partitions: int) -> None:
    async with slatemq.connect(address) as client:
        await client.create_queue(QUEUE, partitions=partitions)


def measure(partitions: int, count: int) -> dict[str, float]:
    """Microseconds of processor time for each message, by service, and the rate."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with processes(folder, partitions) as pids:
            address = str(json.loads((folder / "broker-0.json").read_text())["address"])
            asyncio.run(create(address, partitions))
            asyncio.run(work(address, min(count, 5_000)))  # warm
            before = spent_s(pids)
            took_s = asyncio.run(work(address, count))
            after = spent_s(pids)
    used = {name: 1e6 * (after[name] - before[name]) / count for name in pids}
    brokers = [used[name] for name in used if name.startswith("broker")]
    return {
        "brokers": sum(brokers),
        "busiest": max(brokers),
        "router": used["router 0"],
        "ingest": used["ingest 0"],
        "rate": count / took_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    print("partitions  all brokers  busiest  router  ingest   us a message     messages/s")
    for partitions in options.partitions:
        rounds = [measure(partitions, options.messages) for _ in range(options.rounds)]
        middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        print(
            f"{partitions:10} {middle['brokers']:12.1f} {middle['busiest']:8.1f} "
            f"{middle['router']:7.1f} {middle['ingest']:7.1f} {middle['rate']:30,.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
