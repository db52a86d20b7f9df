"""The tables of an instance, from snapshots that are kept alive while they are read.

For a program without an event loop, such as a job of one's own or a notebook::

    with spark_session("local[4]") as spark, open_tables(spark, "file:///var/lib/slatemq") as table:
        table("failed").groupBy("queue", "reason").count().show()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pyspark.sql import DataFrame, SparkSession

from services.janitor.snapshots import SnapshotName, renewed_snapshots
from services.janitor.spark.source import FORMAT, options_of, schema_of
from services.janitor.spark.tables import TABLES


@contextmanager
def open_tables(spark: SparkSession, root: str) -> Iterator[Callable[[str], DataFrame]]:
    """Yields a function that loads a table by name, from snapshots of all shards taken now.

    They are renewed until the block ends. Raises ValueError for a bad root, Unavailable when a
    shard is down, StoreUnavailable.
    """
    with renewed_snapshots(root) as taken:
        yield lambda name: table_of(spark, root, taken.names, name)


def table_of(
    spark: SparkSession, root: str, names: Sequence[SnapshotName], table: str, *columns: str
) -> DataFrame:
    """A table of these snapshots; with these columns only, if any are named."""
    chosen = TABLES[table].only(columns) if columns else TABLES[table]
    reader = spark.read.format(FORMAT).options(**options_of(root, names))
    frame: DataFrame = reader.schema(schema_of(chosen)).load(table)
    return frame
