"""The job `report`: what happened in each queue on each day, in numbers, as Parquet and as a page.

All of it is of the entries that are known still: those that retention, done retention or the
archive have taken are not in it, so a report of a day is best made while the queue keeps it.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, GroupedData
from pyspark.sql import functions as sf
from pyspark.sql.pandas.types import to_arrow_schema

from libs.storage.database.roots import open_root
from libs.storage.objects.small_objects import Objects
from services.janitor.jobs.batches import counted, counts_batch
from services.janitor.jobs.moments import at_ms
from services.janitor.jobs.report_page import ATTEMPTS, page
from services.janitor.jobs.work import Work

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


QUEUES_SHOWN: Final = 50
"""Queues on the page: those with the most messages, besides WAITING_SHOWN. The Parquet has all."""

WAITING_SHOWN: Final = 10
"""Queues on the page whose messages wait the longest: a stuck queue need not be a busy one."""

DAY_MS: Final = 24 * 3600 * 1000


def report(work: Work) -> Counter[str]:
    """Write a report; a dry run counts its rows."""
    with work.phase("report"):
        active, done, failed = (work.of_queues(name) for name in ("active", "done", "failed"))
        since_ms = work.now_ms - (work.options.days - 1) * DAY_MS
        days = queue_days(work.table("messages"), active, done, failed, since_ms).persist()
        try:
            if work.options.dry_run:
                return Counter(report_rows=days.count())
            parquet, html = (f"{FOLDER}/{work.run}/{name}" for name in (PARQUET, HTML))
            counts = written(days, work.url, parquet)
            rows, queues_count = _shown(days)
            result = page(work.run, work.now_ms, rows, work.options.days, queues_count)
            objects = work.root.objects
            asyncio.run(objects.put(html, result.encode()))
            work.artifacts += [parquet, html]
            if gone := asyncio.run(forget_reports(objects, work.options.reports_kept)):
                counts["reports_removed"] = gone
            return counts
        finally:
            days.unpersist()


def written(days: DataFrame, root: str, path: str) -> Counter[str]:
    """Write the rows as one Parquet object, which has the columns also without rows."""
    task = _Parquet(root, path, to_arrow_schema(days.schema, timezone="UTC"))
    counts = counted(days.coalesce(1), task)
    if not counts:  # Spark knew that there are no rows, and began no task.
        list(task(iter(())))
        counts["report_rows"] = 0
    return counts


def _shown(days: DataFrame) -> tuple[list[dict[str, object]], int]:
    """The rows of all queues together and of some queues; and how many queues there are."""
    queues = (
        days.where("queue IS NOT NULL")
        .groupBy("queue")
        .agg(
            sf.sum(sf.col("published_count") + sf.col("acked_count")).alias("busy"),
            sf.min("oldest_waiting_at").alias("oldest"),
        )
    )
    busiest = queues.orderBy(sf.desc("busy"), "queue").limit(QUEUES_SHOWN)
    waiting = queues.where("oldest IS NOT NULL").orderBy("oldest", "queue").limit(WAITING_SHOWN)
    chosen = busiest.unionByName(waiting).select("queue").distinct()
    shown = days.join(sf.broadcast(chosen), "queue", "left_semi")
    rows = days.where("queue IS NULL").unionByName(shown).orderBy("queue", "day")
    return [row.asDict() for row in rows.collect()], queues.count()


FOLDER: Final = "reports"
HTML: Final = "report.html"
PARQUET: Final = "report.parquet"

_RUN: Final = re.compile(r"(\d{8})[-T](\d{6})")
"""The beginning of a run's name: when it began."""


async def forget_reports(objects: Objects, kept: int) -> int:
    """Remove all but the newest reports, and no other file; returns how many."""
    files: dict[tuple[str, str], list[str]] = {}
    for path in await objects.list(FOLDER):
        run, _, name = path.removeprefix(f"{FOLDER}/").partition("/")
        began = _RUN.match(run)
        if began is not None and name in (HTML, PARQUET):
            files.setdefault(("".join(began.groups()), run), []).append(path)
    old = sorted(files)[:-kept]
    for report in old:
        await asyncio.gather(*(objects.delete(path) for path in files[report]))
    return len(old)


@dataclass(frozen=True)
class _Parquet:
    root: str
    path: str
    schema: pa.Schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = [batch for batch in batches if batch.num_rows]
        table = pa.Table.from_batches(found) if found else self.schema.empty_table()
        out = io.BytesIO()
        pq.write_table(table.cast(self.schema), out, compression="zstd")
        asyncio.run(open_root(self.root).objects.put(self.path, out.getvalue()))
        yield counts_batch({"report_rows": table.num_rows})
