"""How long a shard takes to open on S3 after a crash, and what keeping that short costs.

    python -m benchmarks.opening                        # the table of docs/explanation
    python -m benchmarks.opening --objects 128 1024 --delays-ms 0 20 100

A database is written by this many commits, one after the other, and abandoned, as a SIGKILL leaves
it. Then it is opened again, through a proxy that delays each request. The server is moto, whose own
time for a request (about 2 ms of a processor) is in all numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import time
from dataclasses import replace
from typing import Final

from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind, ReplayBound, tuning_of
from libs.storage.database.slate import Batch, Database
from tests.faults.faulty_store import Fault, FaultyStore, faulty_store
from tests.integration.storage.s3_servers import CREDENTIALS, moto, root_url

VALUE: Final = b"v" * 500
NEVER: Final = ReplayBound(10**9, 10**9)


async def _write(database: Database, commits: int) -> None:
    for number in range(commits):
        batch = Batch()
        batch.put(b"%08d" % number, VALUE)
        await database.commit(batch)


async def _written(root: Root, name: str, objects: int) -> Database:
    """A database with `objects` WAL objects that are in no table, as a crash leaves it."""
    tuning = replace(tuning_of(Kind.BROKER, "s3"), replay=NEVER)
    database = await root.database(name, Kind.BROKER, tuning)
    await _write(database, objects)
    return database


async def opening(store: FaultyStore, root: Root, objects: int, delay_ms: int) -> None:
    """One row: this many WAL objects, this long for each request."""
    name = f"broker/{objects}{delay_ms:04}"
    abandoned = await _written(root, name, objects)
    store.set(Fault(delay_s=delay_ms / 1000))
    store.requests.clear()
    began = time.monotonic()
    database = await root.database(name, Kind.BROKER)
    took = time.monotonic() - began
    requests = store.count()
    store.set()
    print(f"| {objects} | {delay_ms} | {took:.1f} | {requests} |", flush=True)
    await database.close()
    await abandoned.close()


async def flushing(store: FaultyStore, root: Root, bound: int, commits: int) -> None:
    """One row: the requests that these commits cost with this interval of flushes."""
    name = f"broker/9{bound}"
    tuning = replace(tuning_of(Kind.BROKER, "s3"), replay=ReplayBound(bound, 10**9))
    database = await root.database(name, Kind.BROKER, tuning)
    await _write(database, 1)
    store.requests.clear()
    began = time.monotonic()
    await _write(database, commits)
    took = time.monotonic() - began
    await asyncio.sleep(2)  # A flush or a compaction may still be on its way.
    counts = {method: store.count(method) for method in ("PUT", "GET", "HEAD", "POST")}
    cells = " | ".join(str(count) for count in counts.values())
    print(f"| {bound} | {commits} | {cells} | {took / commits * 1000:.2f} |", flush=True)
    await database.close()


async def measure(given: argparse.Namespace) -> None:
    """Both tables."""
    with moto() as port, faulty_store(port) as store:
        root = open_root(root_url(store.port, "benchmark"))
        print("| WAL objects to replay | ms a request | seconds to open | requests |")
        print("|---|---|---|---|")
        for objects in given.objects:
            for delay_ms in given.delays_ms:
                await opening(store, root, objects, delay_ms)
        print("\n| flushed every | commits | PUT | GET | HEAD | POST | ms a commit |")
        print("|---|---|---|---|---|---|---|")
        for bound in given.bounds:
            await flushing(store, root, bound, given.commits)


def main() -> None:
    """Measure what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--objects", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--delays-ms", type=int, nargs="+", default=[0, 20, 100])
    parser.add_argument("--bounds", type=int, nargs="+", default=[64, 128, 256, 1024])
    parser.add_argument("--commits", type=int, default=2048)
    os.environ.update(CREDENTIALS)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
