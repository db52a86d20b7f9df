"""A commit loop on a real database, its source, and a disk that a test holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from libs.storage.database.commits import GroupCommit
from libs.storage.database.pace import FixedPace
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch, Database
from libs.storage.errors import StorageError
from libs.storage.objects.durability import NoSync
from tests.manual_clock import ManualClock


class Rows:
    """A source: rows set in memory, drained in order; remembers which commit took which rows."""

    def __init__(self) -> None:
        self.waiting: list[tuple[bytes, bytes]] = []
        self.taken: list[tuple[int, list[bytes]]] = []

    def set(self, key: bytes, value: bytes) -> None:
        self.waiting.append((key, value))

    async def drain(self, batch: Batch) -> None:
        for key, value in self.waiting:
            batch.put(key, value)
        self.taken.append((batch.commit, [key for key, _ in self.waiting]))
        self.waiting = []


class HeldSync(NoSync):
    """A disk whose syncs end when the test says so."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.waiting = 0
        self.error: OSError | None = None
        self._is_waiting = asyncio.Event()

    async def sync(self) -> None:
        self.waiting += 1
        self._is_waiting.set()
        await self.open.wait()
        self.waiting -= 1
        if self.waiting == 0:
            self._is_waiting.clear()
        if self.error is not None:
            raise self.error

    async def until_waiting(self) -> None:
        # Not by yielding again and again: handlers of the loop may swallow pytest's time limit.
        await self._is_waiting.wait()


class Stack:
    def __init__(self, root: Root, database: Database, interval_ms: int = 0) -> None:
        self.root = root
        self.database = database
        self.rows = Rows()
        self.clock = ManualClock()
        self.commits = GroupCommit(database, self.clock, self.rows, FixedPace(interval_ms))
        self.running = asyncio.create_task(self.commits.run())

    async def set(self, key: bytes, value: bytes = b"v") -> None:
        self.rows.set(key, value)
        self.commits.mark_dirty(len(value))
        await self.commits.durable()


@asynccontextmanager
async def committing(sync: NoSync | None = None, interval_ms: int = 0) -> AsyncIterator[Stack]:
    root = open_root("memory:///")
    root.durability = sync or root.durability
    database = await root.database("ingest/0", Kind.INGEST)
    stack = Stack(root, database, interval_ms)
    yield stack
    if isinstance(sync, HeldSync):
        sync.open.set()
    await stack.commits.close()
    with suppress(StorageError):
        await stack.running
    await database.close()
