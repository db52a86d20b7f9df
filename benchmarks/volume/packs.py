"""Rows written in large packs: one is filled while SlateDB takes the last one in."""

from __future__ import annotations

import asyncio
from typing import Final

from libs.storage.database.slate import Batch, Database

PACK_BYTES: Final = 4 << 20
FLUSH_BYTES: Final = 32 << 20
"""After this many bytes the WAL is written, which bounds memory."""


class Packs:
    """Puts rows into a database that has no other user. `finish` makes them durable.

    Attributes:
        rows: How many it has put.
    """

    def __init__(self, database: Database) -> None:
        self.rows = 0
        self._database = database
        self._batch = Batch()
        self._writing: asyncio.Task[None] | None = None
        self._unflushed = 0

    def put(self, key: bytes, value: bytes) -> None:
        """Puts a row; ask `full` now and then."""
        self._batch.put(key, value)

    @property
    def full(self) -> bool:
        """Whether to call `write`."""
        return self._batch.size_bytes >= PACK_BYTES

    async def write(self) -> None:
        """Hands over what was put; returns when the pack before has been taken in."""
        batch, self._batch = self._batch, Batch()
        self.rows += len(batch)
        await self._written()
        self._writing = asyncio.create_task(self._write(batch))
        await asyncio.sleep(0)  # it begins

    async def _write(self, batch: Batch) -> None:
        await self._database.write(batch)
        self._unflushed += batch.size_bytes
        if self._unflushed >= FLUSH_BYTES:
            self._unflushed = 0
            await self._database.flush()

    async def _written(self) -> None:
        if self._writing is not None:
            await self._writing

    async def finish(self) -> None:
        """Writes the rest, and moves everything into sorted tables."""
        await self.write()
        await self._written()
        await self._database.flush_memtable()
