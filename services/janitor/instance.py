"""An instance's tables for a program without an event loop: a job of one's own, a notebook.

with spark_session("local[4]") as spark, open_tables(spark, "file:///var/lib/slatemq") as table:
    table("failed").groupBy("queue", "reason").count().show()
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from pyspark.sql import DataFrame, SparkSession

from libs.serving.channels import Channels
from libs.serving.topology import TopologyDirectory
from libs.storage.roots import open_root
from services.janitor.planning import SnapshotName
from services.janitor.snapshots import taken_snapshots
from services.janitor.source import FORMAT, options_of

__all__ = ["open_tables"]


@contextmanager
def open_tables(spark: SparkSession, root: str) -> Iterator[Callable[[str], DataFrame]]:
    """Gives what loads a table by its name, from snapshots of all shards taken at the beginning.

    They are renewed for as long as it takes, and released at the end. Raises ValueError for a bad
    root, Unavailable when a shard is away, StoreUnavailable.
    """
    with _held(root) as names:
        options = options_of(root, names)

        def table(name: str) -> DataFrame:
            frame: DataFrame = spark.read.format(FORMAT).options(**options).load(name)
            return frame

        yield table


@contextmanager
def _held(root: str) -> Iterator[list[SnapshotName]]:
    """The snapshots, renewed by a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="snapshots", daemon=True)
    thread.start()
    holding = _hold(root)
    try:
        taking = asyncio.run_coroutine_threadsafe(holding.__aenter__(), loop)
        names = taking.result()
        try:
            yield names
        finally:
            asyncio.run_coroutine_threadsafe(holding.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@asynccontextmanager
async def _hold(root: str) -> AsyncIterator[list[SnapshotName]]:
    directory = TopologyDirectory(open_root(root).objects)
    channels = Channels(directory)
    try:
        async with taken_snapshots(directory, channels) as taken:
            yield taken.names
    finally:
        await channels.close()
        await directory.close()
