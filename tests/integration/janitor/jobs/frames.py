"""Tables made by hand, for the logic of jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from services.janitor.spark.tables import TABLES
from tests.integration.janitor.jobs.histories import History, Queue, moment

Row = dict[str, Any]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

DEFAULTS: dict[str, Any] = {
    "ingest_shard": 0,
    "broker_shard": 0,
    "entry_sequence": 1,
    "created_at": EPOCH,
    "received_at": EPOCH,
    "retention_s": 0,
    "payload_bytes": 0,
    "headers": {},
    "state": "available",
    "timed": False,
    "priority": 128,
    "attempts": 0,
    "consumer": "worker",
    "bucket_order": 0,
    "bucket_number": 0,
    "reason": "boom",
    "filter": "true",
    "max_attempts": 1,
    "done_retention_s": 0,
    "failed_retention_s": 0,
    "created_revision": 1,
    "settings": {},
    "attempt": 1,
    "outcome": "nack: boom",
    "failed_in": "q",
    "queue": "q",
}
"""What a row has that does not say otherwise; counts are 0, days those of the row's time."""


def table(spark: SparkSession, name: str, rows: Iterable[Row] = ()) -> DataFrame:
    """A table with these rows."""
    schema = TABLES[name].schema
    time_column = TABLES[name].time_column
    found: list[Row] = []
    for item in rows:
        row = {**{field.name: DEFAULTS.get(field.name) for field in schema}, **item}
        for field in schema:
            if field.name.endswith("_count") and row[field.name] is None:
                row[field.name] = 0
        if "day" in row and time_column:
            row["day"] = row[time_column].date()
        found.append(row)
    unknown = set().union(*found) - set(schema.names) if found else ()
    assert not unknown, unknown
    frame: DataFrame = spark.createDataFrame(pa.Table.from_pylist(found, schema=schema))
    return frame


FURTHER = 1_000
"""The shard of a second partition, from that of the first."""


def shards_of(queue: Queue) -> list[int]:
    """The shards of a queue's partitions; every other queue has two."""
    is_partitioned = int(queue.name.rpartition("q")[2]) % 2
    return [queue.broker, queue.broker + FURTHER] if is_partitioned else [queue.broker]


def tables_of(spark: SparkSession, histories: Sequence[History]) -> dict[str, DataFrame]:
    """The tables of all these instances, put together: they share no shard and no queue."""
    rows: dict[str, list[Row]] = {name: [] for name in TABLES}
    for history in histories:
        for one in history.messages.values():
            rows["messages"].append(
                {
                    "message_id": one.message_id,
                    "ingest_shard": one.shard,
                    "entry_sequence": one.sequence,
                    "received_at": moment(one.received_ms),
                    "retention_s": one.retention_s,
                    "retention_deadline": moment(one.deadline_ms),
                    "payload_bytes": one.size,
                    "direct_queue": one.direct_queue or None,
                }
            )
        for queue in history.queues.values():
            shards = shards_of(queue)
            for place, shard in enumerate(shards):
                states = [
                    entry.state
                    for entry in history.entries.values()
                    if entry.queue == queue.name and entry.message_id % len(shards) == place
                ]
                rows["queues"].append(
                    {
                        "queue": queue.name,
                        "broker_shard": shard,
                        "created_revision": shard + 1,
                        "done_retention_s": queue.done_retention_s,
                        "failed_retention_s": queue.failed_retention_s,
                        "done_count": states.count("done"),
                        "failed_count": states.count("failed"),
                    }
                )
        for entry in history.entries.values():
            shards = shards_of(history.queues[entry.queue])
            row = {
                "queue": entry.queue,
                "broker_shard": shards[entry.message_id % len(shards)],
                "message_id": entry.message_id,
                "attempts": entry.attempts,
            }
            ended_at = moment(entry.ended_ms)
            if entry.state == "done":
                first = moment(entry.first_claimed_ms)
                row |= {"done_at": ended_at, "first_claimed_at": first}
                row |= {"transferred_to": entry.moved_to or None}
                rows["done"].append(row)
                continue
            row["retention_deadline"] = moment(entry.deadline_ms)
            if entry.state == "failed":
                rows["failed"].append({**row, "failed_at": ended_at})
            else:
                rows["active"].append({**row, "state": entry.state})
    return {name: table(spark, name, some) for name, some in rows.items()}
