"""The jobs over dead letters: into the archive, and back from it."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from services.janitor.jobs.archive import FOLDER
from services.janitor.jobs.archiving import DeadLetterArchive, DeadLetterRestore
from services.janitor.jobs.batches import counted, totals_by_queue
from services.janitor.jobs.moments import at_ms, ms_of
from services.janitor.jobs.standing import read_last_ids
from services.janitor.jobs.work import FEW_ENTRIES, Work

_IN_DAYS: Final = ("queue", "broker_shard", "created_revision", "day", "failed_at", "message_id")
"""The order in which a task takes dead letters: day by day."""


def dead_letters(work: Work) -> Counter[str]:
    """Archive the dead letters that are old enough."""
    counts = Counter(letters_written=0, letters_archived=0, payload_bytes=0)
    with work.phase("dead letters"):
        before_ms = work.now_ms - work.options.older_than_s * 1000
        due = due_dead_letters(work.of_queues("failed"), work.of_queues("queues"), before_ms)
        bounds = due.selectExpr("min(message_id)", "max(message_id)", "count(*)").first()
        assert bounds is not None, "an aggregate always has a row"
        first_id, last_id, count = bounds
        if not count:
            return counts
        messages, attempts = (
            work.table(name).where(sf.col("message_id").between(first_id, last_id))
            for name in ("messages", "attempts")
        )
        if count <= FEW_ENTRIES:
            wanted = sf.broadcast(due.select("message_id").distinct())
            messages = messages.join(wanted, "message_id", "left_semi")
        dead_letters = with_content(due, messages, attempts)
        if work.options.dry_run:
            found = totals_by_queue(
                dead_letters, letters_archived="1", payload_bytes="payload_bytes"
            )
            return counts + Counter(letters_written=found["letters_archived"], **found)
        names = tuple(name for name in work.names if name.service == "ingest")
        last_ids = asyncio.run(read_last_ids(work.root, names))
        task = DeadLetterArchive(work.url, names, last_ids, work.run)
        counts.update(counted(_in_days(dead_letters), task))
        work.artifacts.append(FOLDER)
    return counts


def restore(work: Work) -> Counter[str]:
    """Push archived dead letters back into queues."""
    options = work.options
    counts = Counter(letters_restored=0)
    with work.phase("archived dead letters"):
        archived = work.of_queues("archived")
        if options.message_ids is not None:
            archived = archived.where(sf.col("message_id").isin(*options.message_ids))
        if options.failed_from_ms is not None:
            archived = archived.where(sf.col("failed_at") >= at_ms(options.failed_from_ms))
        if options.failed_until_ms is not None:
            archived = archived.where(sf.col("failed_at") < at_ms(options.failed_until_ms))
        made = work.table("queues").select("queue", "created_revision")
        rows = archived.withColumn("day", sf.to_date("failed_at")).join(sf.broadcast(made), "queue")
        if options.dry_run:
            counts.update(totals_by_queue(rows, letters_restored="1"))
        else:
            counts.update(counted(_in_days(rows), DeadLetterRestore(work.url, options.target)))
    return counts


def due_dead_letters(failed: DataFrame, queues: DataFrame, before_ms: int) -> DataFrame:
    """Dead letters that failed before a time, with the incarnation of their queue."""
    due = failed.where(sf.col("failed_at") < at_ms(before_ms))
    made = queues.select("queue", "created_revision")
    return due.join(sf.broadcast(made), "queue")


def with_content(dead_letters: DataFrame, messages: DataFrame, attempts: DataFrame) -> DataFrame:
    """The dead letters with their metadata, and their failed attempts in order.

    Metadata of a message that is gone is null.
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


def _in_days(dead_letters: DataFrame) -> DataFrame:
    return dead_letters.repartition("queue", "day").sortWithinPartitions(*_IN_DAYS)
