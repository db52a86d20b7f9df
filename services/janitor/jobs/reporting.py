"""The job `report`: what happened in each queue on each day, as Parquet and as a page."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from libs.storage.roots import open_root
from services.janitor.jobs.batches import counted, counts_batch
from services.janitor.jobs.report import queue_days
from services.janitor.jobs.report_page import page
from services.janitor.jobs.reports_kept import FOLDER, HTML, PARQUET, forget_reports
from services.janitor.jobs.work import Work

__all__ = ["QUEUES_SHOWN", "report"]

QUEUES_SHOWN: Final = 50
"""On the page, those with most messages; the Parquet has all."""

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
            counts = counted(days.coalesce(1), _Parquet(work.url, parquet, days.columns))
            told = page(work.run, work.now_ms, _shown(days), work.options.days)
            objects = work.root.objects
            asyncio.run(objects.put(html, told.encode()))
            work.artifacts += [parquet, html]
            if gone := asyncio.run(forget_reports(objects, work.options.reports_kept)):
                counts["reports_removed"] = gone
            return counts
        finally:
            days.unpersist()


def _shown(days: DataFrame) -> list[dict[str, object]]:
    """The rows of all queues together, and those of the busiest queues."""
    busiest = (
        days.where("queue IS NOT NULL")
        .groupBy("queue")
        .agg(sf.sum(sf.col("published_count") + sf.col("acked_count")).alias("busy"))
        .orderBy(sf.desc("busy"), "queue")
        .limit(QUEUES_SHOWN)
    )
    shown = days.join(sf.broadcast(busiest.select("queue")), "queue", "left_semi")
    rows = days.where("queue IS NULL").unionByName(shown).orderBy("queue", "day")
    return [row.asDict() for row in rows.collect()]


@dataclass(frozen=True)
class _Parquet:
    root: str
    path: str
    columns: list[str]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = [batch for batch in batches if batch.num_rows]
        table = pa.Table.from_batches(found) if found else pa.table({c: [] for c in self.columns})
        out = io.BytesIO()
        pq.write_table(table, out, compression="zstd")
        asyncio.run(open_root(self.root).objects.put(self.path, out.getvalue()))
        yield counts_batch({"report_rows": table.num_rows})
