"""Rows on their way to their owners: in order, in batches, and what came of them, counted.

Everything here runs where the rows are; the driver gets a few sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.pandas.types import from_arrow_schema

BATCH_ROWS: Final = 5_000
"""Of a request; an owner takes 10,000. A tenth of a second of its work, so others get theirs in."""

COUNTS: Final = pa.schema([("name", pa.string()), ("count", pa.int64())])

NAMED: Final = 20
"""Queues of a dry run, and damaged parts, that counts name."""

_CHUNK_BITS: Final = 16
"""Message IDs that go together: some log entries, so that one partition has the whole of each."""

_ORDER_BITS: Final = 6 + 20
"""Bucket orders that go together: those of a quarter of an hour."""

Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""Takes the batches of a partition, yields counts."""


def in_log_order(frame: DataFrame) -> DataFrame:
    """Rows with `message_id`, spread over partitions by it and ascending in each."""
    chunk = sf.shiftright("message_id", _CHUNK_BITS)
    return frame.repartition(chunk).sortWithinPartitions("message_id")


def in_list_order(frame: DataFrame, *lane: str) -> DataFrame:
    """Entries spread over tasks by queue and time, those of each broker in their list's order."""
    chunk: Column = sf.shiftright("bucket_order", _ORDER_BITS)
    order = ("queue", "broker_shard", "created_revision", *lane, "bucket_order", "message_id")
    return frame.repartition("queue", chunk).sortWithinPartitions(*order)


def grouped(
    batches: Iterator[pa.RecordBatch], keys: Sequence[str], size: int = BATCH_ROWS
) -> Iterator[pa.Table]:
    """Tables of neighbours with equal keys, of at most `size` rows."""
    waiting: list[pa.RecordBatch] = []
    of: tuple[object, ...] = ()
    for batch in batches:
        for piece in _runs(batch, keys):
            key = tuple(piece[name][0].as_py() for name in keys)
            if waiting and key != of:
                yield pa.Table.from_batches(waiting)
                waiting = []
            of = key
            waiting.append(piece)
            while sum(map(len, waiting)) >= size:
                table = pa.Table.from_batches(waiting)
                yield table.slice(0, size)
                waiting = table.slice(size).to_batches()
    if waiting:
        yield pa.Table.from_batches(waiting)


def _runs(batch: pa.RecordBatch, keys: Sequence[str]) -> Iterator[pa.RecordBatch]:
    if not batch.num_rows:
        return
    changes = np.zeros(batch.num_rows - 1, np.bool_)
    for name in keys:
        column = batch[name]
        changes |= pc.not_equal(column[1:], column[:-1]).to_numpy(zero_copy_only=False)
    starts = [0, *(np.flatnonzero(changes) + 1).tolist(), batch.num_rows]
    for start, end in pairwise(starts):
        yield batch.slice(start, end - start)


def counts_batch(counts: Mapping[str, int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"name": list(counts), "count": list(counts.values())}, schema=COUNTS
    )


def counted(frame: DataFrame, task: Task) -> Counter[str]:
    """Run a task over the partitions of a frame; returns the sums of its counts."""
    sums = (
        frame.mapInArrow(task, from_arrow_schema(COUNTS))
        .groupBy("name")
        .agg(sf.sum("count").alias("count"))
    )
    return Counter({row["name"]: row["count"] for row in sums.collect()})


def totals(frame: DataFrame, **sums: str) -> dict[str, int]:
    """Sums of SQL expressions over a frame, by name; 0 where it has no rows."""
    row = frame.agg(*_summed(sums)).first()
    assert row is not None, "an aggregate always has a row"
    return {name: int(row[name] or 0) for name in sums}


def totals_by_queue(frame: DataFrame, **sums: str) -> dict[str, int]:
    """Like `totals`, and the first sum of the queues where it is greatest, as NAME/QUEUE."""
    first, rows = next(iter(sums)), frame.groupBy("queue").agg(*_summed(sums)).collect()
    rows.sort(key=lambda row: (-row[first], row["queue"]))
    fields = {f"{first}/{row['queue']}": int(row[first]) for row in rows[:NAMED]}
    return {name: sum(int(row[name] or 0) for row in rows) for name in sums} | fields


def _summed(sums: Mapping[str, str]) -> list[Column]:
    return [sf.sum(sf.expr(value)).alias(name) for name, value in sums.items()]
