"""Reads the pieces of a plan: rows from the object store, columns out of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Final

import pyarrow as pa

from libs.storage.database.roots import open_root
from libs.storage.database.snapshots import SnapshotReader
from services.janitor.spark.planning import Piece, SnapshotName, plan, read_queues
from services.janitor.spark.tables import Table, queues_batch
from services.janitor.spark.wanted import RowFilter

BATCH_ROWS: Final = 20_000
"""Small batches are joined up to this many rows: each costs Spark a tenth of a millisecond."""


def plan_scan(
    root: str, names: list[SnapshotName], table: Table, wanted: RowFilter, pieces_max: int
) -> list[Piece]:
    """The pieces to read of these snapshots; for a thread without an event loop."""
    names = [name for name in names if name.service == table.service]
    if wanted.shards is not None:
        names = [name for name in names if name.shard in wanted.shards]
    if wanted.nothing or not names:
        return []
    if table.decode is None:
        return [Piece(name, ()) for name in names]

    async def planned() -> list[Piece]:
        opened = open_root(root)
        pieces: list[Piece] = []
        for name in names:
            reader = await opened.open_snapshot(name.database, name.snapshot_id)
            try:
                share = max(1, pieces_max // len(names))
                pieces += await plan(reader, name, table, wanted, share)
            finally:
                await reader.close()
        return pieces

    return asyncio.run(planned())


class Reading:
    """Reads one piece, for a thread without an event loop; `rows_read` counts the store's rows."""

    def __init__(self, root: str, table: Table, wanted: RowFilter) -> None:
        self.rows_read = 0
        self._root = root
        self._table = table
        self._wanted = wanted

    def batches(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        with asyncio.Runner() as runner:
            found = self._together(piece)

            async def following() -> pa.RecordBatch | None:
                return await anext(found, None)

            try:
                while (batch := runner.run(following())) is not None:
                    yield batch
            finally:
                runner.run(found.aclose())

    async def _together(self, piece: Piece) -> AsyncGenerator[pa.RecordBatch, None]:
        small: list[pa.RecordBatch] = []
        count = 0
        async with aclosing(self._batches(piece)) as batches:
            async for batch in batches:
                small.append(batch)
                count += batch.num_rows
                if count >= BATCH_ROWS:
                    yield pa.concat_batches(small)
                    small, count = [], 0
        if small:
            yield pa.concat_batches(small)

    async def _batches(self, piece: Piece) -> AsyncGenerator[pa.RecordBatch, None]:
        reader = await open_root(self._root).open_snapshot(
            piece.name.database, piece.name.snapshot_id
        )
        try:
            if self._table.decode is None:
                queues = await read_queues(reader, self._wanted)
                batch, schema = queues_batch(queues, piece.name.shard), self._table.schema
                columns = batch.select(schema.names).columns
                yield pa.RecordBatch.from_arrays(columns, schema=schema)
                return
            async with aclosing(self._decoded(reader, piece)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            self.rows_read += reader.rows_read
            await reader.close()

    async def _decoded(
        self, reader: SnapshotReader, piece: Piece
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        decode = self._table.decode
        assert decode is not None, "checked by the caller"
        for part in piece.parts:
            async for rows in reader.scan(*part.run.span, rows_max=part.rows_max):
                for batch in decode(rows, part.of, self._table.schema):
                    yield batch
