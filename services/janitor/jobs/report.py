"""What happened in each queue on each day, in numbers.

All of it is of the entries that are known still: those that retention, done retention or the
archive have taken are not in it, so a report of a day is best made while the queue keeps it.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql import functions as sf

from services.janitor.jobs.moments import at_ms

ATTEMPTS: Final = (
    ("1", 1, 1),
    ("2", 2, 2),
    ("3", 3, 3),
    ("4_to_5", 4, 5),
    ("6_or_more", 6, 65_535),
)
"""How often an entry was claimed until it was acked or failed: classes, with their bounds."""

ACCURACY: Final = 10_000
"""Of percentiles: exact up to this many values, then within a ten-thousandth of the ranks."""

_ALL: Final = ""
"""Stands for all queues; no queue has this name."""

_POINTS: Final = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))


def queue_days(
    messages: DataFrame, active: DataFrame, done: DataFrame, failed: DataFrame, since_ms: int
) -> DataFrame:
    """One row for each queue and day from the day of `since_ms` on, in their order.

    A row without a queue is of all queues together; a message in two of them counts twice there.
    Messages count on the day on which they were received, acks and failures on theirs. What a
    transfer or a redrive moved on is counted where it is now. Of a day before those there is a row
    where messages of it wait still: their number, and since when.
    """
    first_day = sf.to_date(at_ms(since_ms))
    acked = done.where("transferred_to IS NULL").drop("transferred_to")
    days = _published(active, acked, failed, messages, first_day)
    ended = _ended(acked, failed, messages, first_day)
    days = days.join(ended, ["queue", "day"], "full")
    days = days.withColumn("queue", sf.nullif("queue", sf.lit(_ALL)))
    counts = [name for name in days.columns if name.endswith(("_count", "bytes"))]
    return days.fillna(0, counts).orderBy("queue", "day")


def _published(
    active: DataFrame, acked: DataFrame, failed: DataFrame, messages: DataFrame, first_day: Column
) -> DataFrame:
    waiting = active.select("queue", "message_id", (sf.col("state") == "available").alias("waits"))
    ended = acked.select("queue", "message_id").unionByName(failed.select("queue", "message_id"))
    entries = waiting.unionByName(ended.withColumn("waits", sf.lit(False)))
    # A message that was redriven or moved back has more than one entry in a queue: it counts once.
    once = entries.groupBy("queue", "message_id").agg(sf.max("waits").alias("waits"))
    known = messages.select("message_id", "received_at", "payload_bytes", "day")
    recent = sf.col("day") >= first_day
    return _by_day(once.join(known, "message_id").where(recent | sf.col("waits"))).agg(
        sf.count_if(recent).alias("published_count"),
        sf.sum(sf.when(recent, sf.col("payload_bytes"))).alias("published_bytes"),
        sf.count_if("waits").alias("waiting_count"),
        sf.min(sf.when(sf.col("waits"), sf.col("received_at"))).alias("oldest_waiting_at"),
    )


def _ended(
    acked: DataFrame, failed: DataFrame, messages: DataFrame, first_day: Column
) -> DataFrame:
    never = sf.lit(None).cast("timestamp")
    fields = ("queue", "day", "message_id", "attempts", "done_at", "first_claimed_at")
    dead_letters = failed.withColumns({"done_at": never, "first_claimed_at": never})
    entries = acked.select(*fields).unionByName(dead_letters.select(*fields))
    timed = entries.where(sf.col("day") >= first_day).join(
        messages.select("message_id", "received_at"), "message_id", "left"
    )
    return _by_day(timed).agg(
        sf.count("done_at").alias("acked_count"),
        sf.count_if(sf.col("done_at").isNull()).alias("failed_count"),
        *(
            sf.count_if(sf.col("attempts").between(low, high)).alias(f"attempts_{name}_count")
            for name, low, high in ATTEMPTS
        ),
        *_percentiles(_since_received("first_claimed_at"), "claim_ms"),
        *_percentiles(_since_received("done_at"), "ack_ms"),
    )


def _by_day(frame: DataFrame) -> GroupedData:
    """Grouped by queue and day, and by day alone, with _ALL for the queue."""
    both = frame.unionByName(frame.withColumn("queue", sf.lit(_ALL)))
    return both.groupBy("queue", "day")


def _since_received(column: str) -> Column:
    taken_ms = sf.unix_millis(sf.col(column)) - sf.unix_millis("received_at")
    return sf.when(taken_ms < 0, 0).otherwise(taken_ms)  # by two clocks; null stays


def _percentiles(value: Column, name: str) -> list[Column]:
    return [
        sf.percentile_approx(value, point, ACCURACY).alias(f"{name}_{item}")
        for point, item in _POINTS
    ]
