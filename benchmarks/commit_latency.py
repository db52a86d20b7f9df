"""What a durable commit costs on a disk, with the sync that makes it one and without.

python -m benchmarks.commit_latency [FOLDER]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from libs.storage.database.clocks import HybridClock
from libs.storage.database.commits import GroupCommit
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch

COMMITS = 1000


class OneRow:
    """Has one row of 100 bytes for every commit."""

    def __init__(self) -> None:
        self.count = 0

    async def drain(self, batch: Batch) -> None:
        self.count += 1
        batch.put(b"bench%08d" % self.count, bytes(100))


async def durations(folder: Path, *, sync: bool) -> list[float]:
    """How long each of COMMITS commits took, one after the other, in ms, ascending."""
    root = open_root(folder.as_uri(), sync=sync)
    database = await root.database("broker/0", Kind.BROKER)
    commits = GroupCommit(database, HybridClock(), OneRow())
    running = asyncio.create_task(commits.run())
    took = []
    for _ in range(COMMITS):
        began = time.perf_counter()
        commits.mark_dirty()
        await commits.durable()
        took.append((time.perf_counter() - began) * 1000)
    await commits.close()
    await running
    await database.close()
    return sorted(took)


async def measure(folder: Path, *, sync: bool) -> None:
    took = await durations(folder, sync=sync)
    p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
    print(f"{'synced' if sync else 'not synced':>10}: p50 {p50:.2f} ms, p99 {p99:.2f} ms")


def main() -> None:
    place = sys.argv[1] if len(sys.argv) > 1 else None
    for sync in (True, False, True, False):
        with tempfile.TemporaryDirectory(dir=place) as folder:
            asyncio.run(measure(Path(folder), sync=sync))


if __name__ == "__main__":
    main()
