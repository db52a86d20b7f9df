"""The direct calls of SlateDB's binding beside its public ones (docs/decisions/0060).

python -m benchmarks.binding_calls [FOLDER]
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from slatedb.uniffi import WriteBatch

from libs.storage.database import slate
from libs.storage.database.binding import PublicCalls, direct_calls
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import READ_MEMORY, Batch, Database, scan_options
from libs.storage.layout.primitives import Row

ROWS = 20_000
ROUNDS = 7
"""The fastest one counts: it is the least disturbed by other work on the machine."""


async def best_us(work: Callable[[], Awaitable[object]], turns: int) -> str:
    """µs of wall clock and of processor time for each of the turns that `work` makes."""
    walls, processors = [], []
    for _ in range(ROUNDS):
        wall, processor = time.perf_counter(), time.process_time()
        await work()
        walls.append((time.perf_counter() - wall) * 1e6 / turns)
        processors.append((time.process_time() - processor) * 1e6 / turns)
    return f"{min(walls):8.1f} µs, {min(processors):8.1f} of the processor"


async def measure(name: str, calls: PublicCalls, database: Database, rows: list[Row]) -> None:
    db = database._db

    async def put(size: int, count: int) -> None:
        calls.put_all(WriteBatch(), [(b"key-of-thirty-bytes-0123456789", bytes(size))] * count)

    async def get() -> None:
        for key, _ in rows[:500]:
            await calls.get(db, key, READ_MEMORY)

    async def get_together() -> None:
        await asyncio.gather(*(calls.get(db, key, READ_MEMORY) for key, _ in rows[:500]))

    async def scan(options: object) -> None:
        iterator = await calls.scan(db, b"key", b"kez", options)
        while len(await calls.next_rows(iterator, 1000)) == 1000:
            pass

    async def scan_one(options: object) -> None:
        for key, _ in rows[:200]:
            await calls.next_rows(await calls.scan(db, key, b"kez", options), 1)

    async def commit() -> None:
        for row in rows[:200]:
            batch = Batch()
            batch.put(*row)
            await database.commit(batch)

    long = scan_options(durable=False, short=False, descending=False)
    short = scan_options(durable=False, short=True, descending=False)
    for size, count in ((100, 10_000), (1024, 2000), (65_536, 50)):
        took = await best_us(lambda size=size, count=count: put(size, count), count)  # type: ignore[misc]
        print(f"{name}: put of {size:>6,} bytes   {took}")
    print(f"{name}: get, one by one       {await best_us(get, 500)}")
    print(f"{name}: get, 500 at once      {await best_us(get_together, 500)}")
    print(f"{name}: scan for one row      {await best_us(lambda: scan_one(short), 200)}")
    print(f"{name}: row of a long scan    {await best_us(lambda: scan(long), ROWS)}")
    print(f"{name}: commit of a row       {await best_us(commit, 200)}")


async def main(folder: Path) -> None:
    rows = [(b"key-of-thirty-bytes-%010d" % number, bytes(100)) for number in range(ROWS)]
    direct = direct_calls(importlib.metadata.version("slatedb"))
    for name, calls in (("direct", direct), ("public", PublicCalls())):
        slate.CALLS = calls  # type: ignore[attr-defined]
        database = await open_root((folder / name).as_uri()).database("ingest/0", Kind.INGEST)
        batch = Batch()
        batch.put_all(rows)
        await database.commit(batch)
        await measure(name, calls, database, rows)
        await database.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as made:
        asyncio.run(main(Path(made)))
