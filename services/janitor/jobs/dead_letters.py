"""Which dead letters are old enough for the archive, and all that is known of them."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from services.janitor.jobs.moments import at_ms, ms_of

__all__ = ["due_dead_letters", "with_content"]


def due_dead_letters(failed: DataFrame, queues: DataFrame, before_ms: int) -> DataFrame:
    """Dead letters that failed before a time, with the incarnation of their queue."""
    due = failed.where(sf.col("failed_at") < at_ms(before_ms))
    made = queues.select("queue", "created_revision")
    return due.join(sf.broadcast(made), "queue")


def with_content(dead_letters: DataFrame, messages: DataFrame, attempts: DataFrame) -> DataFrame:
    """The letters with their metadata, and their failed attempts in order.

    What is gone of a message is null: it failed for that.
    """
    known = messages.select(
        "message_id",
        "created_at",
        "received_at",
        "retention_s",
        "payload_bytes",
        "direct_queue",
        "headers",
    )
    history = attempts.groupBy("queue", "message_id").agg(
        sf.sort_array(
            sf.collect_list(
                sf.struct("attempt", "consumer", "claimed_at", "outcome", "failed_in"),
            )
        ).alias("history")
    )
    with_metadata = dead_letters.join(known, "message_id", "left")
    whole = with_metadata.join(history, ["queue", "message_id"], "left")
    return whole.withColumn("failed_at_ms", ms_of("failed_at"))
