"""A process for tests: commits rows in groups, and prints each row once it is durable.

Arguments: root URL, number of rows (0: until killed), number of clients.
"""

from __future__ import annotations

import asyncio
import os
import sys

from libs.serving.process.exits import exit_with
from libs.storage.database.clocks import HybridClock
from libs.storage.database.commits import GroupCommit
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch


class _Rows:
    def __init__(self) -> None:
        self.waiting: list[bytes] = []

    async def drain(self, batch: Batch) -> None:
        for key in self.waiting:
            batch.put(key, key * 10)
        self.waiting = []


async def write(url: str, rows_count: int, clients_count: int) -> None:
    database = await open_root(url).database("ingest/0", Kind.INGEST)
    rows = _Rows()
    commits = GroupCommit(database, HybridClock(), rows)
    running = asyncio.create_task(commits.run())

    async def client(number: int) -> None:
        step = 0
        while rows_count == 0 or step < rows_count:
            key = b"row-%d-%d" % (number, step)
            rows.waiting.append(key)
            commits.mark_dirty(len(key))
            await commits.durable()
            os.write(1, key + b"\n")
            step += 1

    await asyncio.gather(*(client(number) for number in range(clients_count)))
    await commits.close()
    await running
    await database.close()


if __name__ == "__main__":
    asyncio.run(write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    exit_with(0)
