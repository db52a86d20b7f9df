"""Runs a job: snapshots of every shard, the logic of the job, its owners' answers, counted.

Every ingest is asked for a snapshot first, then every broker; so what a broker has of a message is
never older than the message. A shard that was ever seen below the root and does not answer ends the
job before it begins: what it still needs is not known.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Final, NamedTuple

from pyspark.sql import SparkSession

from services.janitor.jobs import clearing, dead_letter_jobs, report
from services.janitor.jobs.contract import (
    JobCancelled,
    JobFailed,
    JobOptions,
    JobResult,
    Progress,
    Report,
)
from services.janitor.jobs.work import Work
from services.janitor.snapshots import refuse_unknown_shards, renewed_snapshots
from services.janitor.spark.session import QUIET, is_local, spark_session
from slatemq.errors import Unavailable

STARTING: Final = "starting Spark"
SNAPSHOTS: Final = "taking snapshots"

_COMPILE_LITTLE: Final = {
    "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
}
"""Of a Spark on this machine that does one job: what Java's second compiler makes of it comes too
late for it, and took 10 s of processor time of 33, and 15 of 46 over two million messages. Java
has room for 48 MB of code then, unless it gets as much as it has with both."""

_COMPUTES: Final = ("report",)
"""Jobs that work in Java for as long as they last; the others mostly wait for Arrow and owners."""


class _Job(NamedTuple):
    do: Callable[[Work], Mapping[str, int]]
    phases: tuple[str, ...]
    prepare: Callable[[Work], None] = lambda _: None


_JOBS: Final[Mapping[str, _Job]] = {
    "retention": _Job(clearing.retention, ("entries", "dead letters", "messages")),
    "unreferenced": _Job(clearing.unreferenced, ("messages", "objects"), clearing.note_store_time),
    "done": _Job(clearing.done, ("done lists",)),
    "dead-letters": _Job(dead_letter_jobs.dead_letters, ("dead letters",)),
    "restore": _Job(dead_letter_jobs.restore, ("archived dead letters",)),
    "report": _Job(report.report, ("report",)),
}

PHASES: Final = {job: (STARTING, SNAPSHOTS, *one.phases) for job, one in _JOBS.items()}
"""What each job does, in order."""


def run_job(
    job: str,
    root: str,
    options: JobOptions | None = None,
    progress: Report = lambda _: None,
) -> JobResult:
    """Run a job in a Spark session of its own; for a thread without an event loop.

    `root` is the URL of the instance's root; credentials come from the environment. `progress` is
    called from this thread and from others. Raises JobFailed, JobCancelled, and ValueError for an
    unknown job or a bad root or option.
    """
    options = options or JobOptions()
    _check(job, options)
    progress(Progress(STARTING, 1, len(PHASES[job])))
    began = time.monotonic()
    settings = settings_of(job, options)
    with ExitStack() as stack:
        try:
            session = spark_session(options.master, options.memory, settings)
            spark = stack.enter_context(session)
        except Unavailable as error:
            raise JobFailed(f"{STARTING}: {error}") from error
        if options.cancelled.is_set():
            raise JobCancelled("cancelled")
        started = (STARTING, round(time.monotonic() - began, 3))
        return run_on(spark, job, root, options, progress, started)


def run_on(
    spark: SparkSession,
    job: str,
    root: str,
    options: JobOptions,
    progress: Report,
    started: tuple[str, float] = (STARTING, 0.0),
) -> JobResult:
    """Like `run_job`, in a session that is there already."""
    _check(job, options)
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    run = options.run or f"{now}-{secrets.token_hex(4)}"
    work = Work(spark, root, options, run, len(PHASES[job]), progress)
    work.phases.append(started)
    with ExitStack() as stack:
        with work.phase(SNAPSHOTS):
            _JOBS[job].prepare(work)
            work.work_on(stack.enter_context(renewed_snapshots(root)))
            known = [name.database for name in work.names]
            asyncio.run(refuse_unknown_shards(work.root.objects, known))
        counts = _JOBS[job].do(work)
    return JobResult(dict(sorted(counts.items())), work.artifacts, work.phases)


def settings_of(job: str, options: JobOptions) -> dict[str, str]:
    """Spark's settings for a session that does only this job."""
    is_brief = is_local(options.master) and job not in _COMPUTES
    return {**QUIET, **(_COMPILE_LITTLE if is_brief else {}), **options.spark}


def _check(job: str, options: JobOptions) -> None:
    if job not in _JOBS:
        raise ValueError(f"job: unknown job {job!r} (expected one of {', '.join(_JOBS)})")
    for name in ("grace_s", "replay_window_s", "older_than_s"):
        if getattr(options, name) < 0:
            raise ValueError(f"{name}: must not be negative")
    for name in ("days", "reports_kept"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}: must be at least 1")
    if options.queue_ids is not None:
        if job == "unreferenced":
            raise ValueError("queue_ids: must be empty: unreferenced has to examine all queues")
        if not options.queue_ids:
            raise ValueError("queue_ids: name at least one, or leave them out")
