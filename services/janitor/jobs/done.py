"""Which done lists are longer than their queues keep them."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from services.janitor.jobs.moments import ms_of

__all__ = ["DONE", "PRUNED", "done_ends", "overdue_done"]

DONE: Final = ("queue", "message_id", "done_at")
PRUNED: Final = ("queue", "broker_shard", "created_revision", "done_retention_s", "done_count")
"""What is read of the tables: the last is of queues."""


def done_ends(queues: DataFrame, now_ms: int, grace_ms: int) -> DataFrame:
    """Up to when the entries of each queue may go that keeps them for a time and has some.

    Gives queue, broker_shard, created_revision, done_before_ms.
    """
    kept = queues.where("done_retention_s > 0 AND done_count > 0")
    before_ms = sf.lit(now_ms - grace_ms) - sf.col("done_retention_s") * 1000
    return kept.select(
        "queue", "broker_shard", "created_revision", before_ms.alias("done_before_ms")
    ).where("done_before_ms > 0")


def overdue_done(done: DataFrame, ends: DataFrame) -> DataFrame:
    """The done entries that may go: queue, message_id."""
    over = done.join(sf.broadcast(ends.select("queue", "done_before_ms")), "queue")
    return over.where(ms_of("done_at") < sf.col("done_before_ms")).select("queue", "message_id")
