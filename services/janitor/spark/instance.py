"""An instance's tables for a program without an event loop: a job of one's own, a notebook.

with spark_session("local[4]") as spark, open_tables(spark, "file:///var/lib/slatemq") as table:
    table("failed").groupBy("queue", "reason").count().show()
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from pyspark.sql import DataFrame, SparkSession

from libs.serving.peers.channels import Channels, inherited
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.roots import open_root
from services.janitor.spark.planning import SnapshotName
from services.janitor.spark.snapshots import TakenSnapshots, taken_snapshots
from services.janitor.spark.source import FORMAT, options_of, schema_of
from services.janitor.spark.tables import TABLES

SERVICES = ("ingest", "broker")


@contextmanager
def open_tables(spark: SparkSession, root: str) -> Iterator[Callable[[str], DataFrame]]:
    """Yields a function that loads a table by name, from snapshots of all shards taken now.

    They are renewed until the block ends. Raises ValueError for a bad root, Unavailable when a
    shard is down, StoreUnavailable.
    """
    with held_snapshots(root) as taken:
        yield lambda name: table_of(spark, root, taken.names, name)


def table_of(
    spark: SparkSession, root: str, names: Sequence[SnapshotName], table: str, *columns: str
) -> DataFrame:
    """A table of these snapshots; with these columns only, if any are named."""
    chosen = TABLES[table].only(columns) if columns else TABLES[table]
    reader = spark.read.format(FORMAT).options(**options_of(root, names))
    frame: DataFrame = reader.schema(schema_of(chosen)).load(table)
    return frame


@contextmanager
def held_snapshots(root: str, services: Sequence[str] = SERVICES) -> Iterator[TakenSnapshots]:
    """Snapshots of all shards, renewed by a thread until the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="snapshots", daemon=True)
    thread.start()
    holding = _hold(root, services)
    try:
        taken = asyncio.run_coroutine_threadsafe(holding.__aenter__(), loop).result()
        try:
            yield taken
        finally:
            asyncio.run_coroutine_threadsafe(holding.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@asynccontextmanager
async def _hold(root: str, services: Sequence[str]) -> AsyncIterator[TakenSnapshots]:
    directory = TopologyDirectory(open_root(root).objects)
    channels = Channels(directory, carrier=inherited())
    try:
        async with taken_snapshots(directory, channels, services=services) as taken:
            yield taken
    finally:
        await channels.close()
        await directory.close()
