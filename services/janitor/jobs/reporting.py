"""The job `report`: what happened in each queue on each day, as Parquet and as a page."""

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
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.pandas.types import to_arrow_schema

from libs.storage.database.roots import open_root
from libs.storage.objects.small_objects import Objects
from services.janitor.jobs.batches import counted, counts_batch
from services.janitor.jobs.report import queue_days
from services.janitor.jobs.report_page import page
from services.janitor.jobs.work import Work

QUEUES_SHOWN: Final = 50
"""On the page, those with most messages, besides those of WAITING_SHOWN; the Parquet has all."""

WAITING_SHOWN: Final = 10
"""Those whose messages wait the longest: a queue that is stuck may be no busy one."""

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
