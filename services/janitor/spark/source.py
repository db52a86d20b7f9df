"""`spark.read.format("slatemq")`: the tables of an instance, read from snapshots by the executors.

    option      what
    root        the URL of the instance's root
    table       messages, payloads, queues, active, done, failed or attempts; or as load("messages")
    database    the databases, with commas between: ingest/0,ingest/1,broker/0
    snapshot    the ID of a snapshot of each, in the same order
    partitions  tasks of a scan at most; 16 unless it is given
    columns     those to read, with commas between; all unless it is given

Databases that do not have the table are passed over, so the same options do for all tables.

Spark does not pass to a source in Python which columns a query uses. Name those that you need, here
or by `.schema("message_id bigint, payload_bytes bigint")`: no other is even decoded.

`register` makes a session know it. Scans are narrowed only where Spark keeps them apart:
SlateMQSource reads whole tables, so it is right wherever it is registered; NarrowingSource reads
what a query wants.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from libs.storage.database.roots import Root, open_root
from libs.storage.database.snapshots import SnapshotReader
from services.janitor.snapshots import SnapshotName, opened
from services.janitor.spark.moved_queues import moved_queues
from services.janitor.spark.planning import PlannedRead, plan, read_queues
from services.janitor.spark.scans import keep_scans_apart
from services.janitor.spark.tables import TABLES, Table, queues_batch
from services.janitor.spark.wanted import EVERYTHING, RowFilter, wanted_by

FORMAT: Final = "slatemq"
PARTITIONS: Final = 16

BATCH_ROWS: Final = 20_000
"""Small batches are joined up to this many rows: each costs Spark a tenth of a millisecond."""

PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"
"""Without it Spark passes no conditions to sources."""

_SNAPSHOT: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


def register(spark: SparkSession) -> None:
    if keep_scans_apart(spark):
        spark.conf.set(PUSHDOWN, "true")
        spark.dataSource.register(NarrowingSource)
    else:
        spark.dataSource.register(SlateMQSource)


def schema_of(table: Table) -> StructType:
    return from_arrow_schema(table.schema)


def options_of(root: str, names: Sequence[SnapshotName]) -> dict[str, str]:
    return {
        "root": root,
        "database": ",".join(name.database for name in names),
        "snapshot": ",".join(name.snapshot_id for name in names),
    }


@dataclass(frozen=True)
class _Options:
    root: str
    table: Table
    names: list[SnapshotName]
    partitions: int


class SlateMQSource(DataSource):
    """Reads whole tables."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return schema_of(_read(self.options).table)

    def reader(self, schema: StructType) -> DataSourceReader:
        return SlateMQReader(self._checked(schema))

    def _checked(self, schema: StructType) -> _Options:
        """The options. Raises ValueError for columns that are not the table's."""
        options = _read(self.options)
        table = options.table.only(schema.names)
        fields: list[pa.Field] = []
        for asked, ours, field in zip(schema, schema_of(table), table.schema, strict=True):
            kind, own = asked.dataType.simpleString(), ours.dataType.simpleString()
            if kind != own:
                raise ValueError(f"column {asked.name!r} of {table.name} is {own}, not {kind}")
            if ours.nullable and not asked.nullable:
                raise ValueError(f"column {asked.name!r} of {table.name} may be null")
            fields.append(field.with_nullable(asked.nullable))  # Spark wants it as it was asked
        return replace(options, table=replace(table, schema=pa.schema(fields)))


class NarrowingSource(SlateMQSource):
    """Reads what a query wants, in sessions that keep scans apart."""

    def reader(self, schema: StructType) -> DataSourceReader:
        return NarrowingReader(self._checked(schema))


class SlateMQReader(DataSourceReader):
    """Plans a scan on the driver, and reads a piece of it on an executor, from the object store.

    `rows_read` counts the rows that the store has returned to `read` in this process.
    """

    def __init__(self, options: _Options) -> None:
        self.wanted: RowFilter = EVERYTHING
        self.rows_read = 0
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """Ranges of keys with about as many messages each."""
        table, wanted = self._options.table, self.wanted
        names = [name for name in self._options.names if name.service == table.service]
        if wanted.shards is not None:
            names = [name for name in names if name.shard in wanted.shards]
        if wanted.nothing or not names:
            return []
        if table.decode is None:
            return [InputPartition(PlannedRead(name, ())) for name in names]
        return [InputPartition(piece) for piece in asyncio.run(self._plan(names))]

    async def _plan(self, names: Sequence[SnapshotName]) -> list[PlannedRead]:
        root, share = open_root(self._options.root), max(1, self._options.partitions // len(names))
        pieces: list[PlannedRead] = []
        for name in names:
            async with opened(root, name) as reader:
                moved = await self._moved(root, name, reader)
                pieces += await plan(reader, name, self._options.table, self.wanted, share, moved)
        return pieces

    async def _moved(
        self, root: Root, name: SnapshotName, reader: SnapshotReader
    ) -> frozenset[str]:
        if name.service != "broker":
            return frozenset()
        return await moved_queues(root, name, reader, self._options.names)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        piece: PlannedRead | None = partition.value
        if piece is None:
            return  # what Spark makes of no partitions at all
        with asyncio.Runner() as runner:
            found = self._together(piece)

            async def following() -> pa.RecordBatch | None:
                return await anext(found, None)

            try:
                while (batch := runner.run(following())) is not None:
                    yield batch
            finally:
                runner.run(found.aclose())

    async def _together(self, piece: PlannedRead) -> AsyncGenerator[pa.RecordBatch, None]:
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

    async def _batches(self, piece: PlannedRead) -> AsyncGenerator[pa.RecordBatch, None]:
        table, root = self._options.table, open_root(self._options.root)
        async with opened(root, piece.name) as reader:
            if table.decode is None:
                moved = await self._moved(root, piece.name, reader)
                queues = await read_queues(reader, self.wanted, moved)
                columns = queues_batch(queues, piece.name.shard).select(table.schema.names).columns
                yield pa.RecordBatch.from_arrays(columns, schema=table.schema)
            else:
                for part in piece.parts:
                    async for rows in reader.scan(*part.run.span, rows_max=part.rows_max):
                        for batch in table.decode(rows, part.of, table.schema):
                            yield batch
            self.rows_read += reader.rows_read


class NarrowingReader(SlateMQReader):
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Note what narrows the keys. Spark applies all filters again: keys are not exact."""
        self.wanted = wanted_by(filters, self._options.table.time_column)
        return filters


def _read(options: Mapping[str, str]) -> _Options:
    table = options.get("table") or options.get("path") or ""
    if table not in TABLES:
        raise ValueError(
            f"option table: unknown table {table!r} (expected one of {', '.join(TABLES)})"
        )
    root = options.get("root", "")
    if not root:
        raise ValueError("option root: the URL of the instance's root is missing")
    databases = _listed(options.get("database", ""))
    snapshots = _listed(options.get("snapshot", ""))
    if not databases or len(databases) != len(snapshots):
        raise ValueError(
            f"options database and snapshot: {len(databases)} databases, {len(snapshots)} snapshots"
        )
    known = TABLES[table]
    if "columns" in options:
        known = known.only(_listed(options["columns"]))
    names = [SnapshotName(*pair) for pair in zip(databases, snapshots, strict=True)]
    for name in names:
        if (
            name.service not in ("ingest", "broker")
            or not name.database.partition("/")[2].isdecimal()
        ):
            raise ValueError(
                f"option database: {name.database!r} must be such as ingest/0 or broker/0"
            )
        if not _SNAPSHOT.fullmatch(name.snapshot_id):
            raise ValueError(f"option snapshot: {name.snapshot_id!r} is not the ID of a snapshot")
    return _Options(root, known, names, _positive(options.get("partitions", PARTITIONS)))


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _positive(value: Any) -> int:
    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"option partitions: {value!r} is not a whole number above 0")
    return number
