"""Tables read as Spark reads them, but in this process, and snapshots to read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pyspark.sql.datasource import Filter

from libs.storage.database.roots import Root
from libs.storage.database.slate import Database
from services.janitor.snapshots import SnapshotName
from services.janitor.spark.source import NarrowingSource, options_of


class Read(NamedTuple):
    """What a scan gave, how many rows of the store it read for that, and in how many tasks."""

    rows: list[dict[str, Any]]
    rows_read: int
    tasks_count: int


async def snapshot_of(root: Root, *databases: Database) -> dict[str, str]:
    """The options that read snapshots of these databases, taken now."""
    names = [
        SnapshotName(database.name, await root.snapshots(database).take(600_000))
        for database in databases
    ]
    return options_of(root.url, names)


async def read(options: Mapping[str, str], table: str, *filters: Filter) -> Read:
    """All rows of a table, or what a scan with these filters reads of it."""
    return await asyncio.to_thread(_read, {**options, "table": table}, filters)


def _read(options: Mapping[str, str], filters: Sequence[Filter]) -> Read:
    source: Any = NarrowingSource(dict(options))
    reader = source.reader(source.schema())
    list(reader.pushFilters(list(filters)))
    partitions = reader.partitions()
    rows = [
        row
        for partition in partitions
        for batch in reader.read(partition)
        for row in batch.to_pylist()
    ]
    return Read(rows, reader.rows_read, len(partitions))
