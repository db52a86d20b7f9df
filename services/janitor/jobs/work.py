"""A job at work: its tables, its phases, how far it is, and whether it is still wanted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, NamedTuple

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from libs.storage.database.roots import Root, open_root
from libs.storage.errors import StorageError
from services.janitor.jobs.contract import JobCancelled, JobFailed, JobOptions, Progress, Report
from services.janitor.snapshots import SnapshotName, SnapshotSet
from services.janitor.spark.failures import cause_of
from services.janitor.spark.snapshots import table_of
from slatemq._counts import counted
from slatemq.errors import SlateMQError

LOOK_S: Final = 0.25
"""How often it is looked how far a phase is, and whether it is still wanted."""

UNTAKEN_S: Final = 600.0
"""How long tasks may wait while none is at work: a cluster may have to add a machine first, which
then loads the image of the executors. Spark itself would wait for ever."""

FEW_ENTRIES: Final = 200_000
"""Up to this many IDs are broadcast to every task, rather than all messages shuffled."""


class Work:
    """What a job works with.

    Attributes:
        run: The name of this run.
        phases: Those done, in order, each with its seconds.
        artifacts: Paths below the root of what was written.
        store_time_ms: The time by the store's clock before the snapshots; 0: not read.
        untaken: Why the job has to end, when no executor has taken its tasks for too long.
    """

    def __init__(
        self,
        spark: SparkSession,
        url: str,
        options: JobOptions,
        run: str,
        phases_count: int,
        report: Report,
    ) -> None:
        self.spark = spark
        self.url = url
        self.root: Root = open_root(url)
        self.options = options
        self.run = run
        self.phases: list[tuple[str, float]] = []
        self.artifacts: list[str] = []
        self.store_time_ms = 0
        self.untaken = ""
        self._taken: SnapshotSet | None = None
        self._phases_count = phases_count
        self.report = report

    def work_on(self, taken: SnapshotSet) -> None:
        self._taken = taken

    @property
    def taken(self) -> SnapshotSet:
        assert self._taken is not None, "taken before any table is read"
        return self._taken

    @property
    def names(self) -> list[SnapshotName]:
        return self.taken.names

    @property
    def epochs(self) -> dict[int, int]:
        """By ingest shard, the purge epoch of its snapshot."""
        return {
            one.name.shard: one.purge_epoch for one in self.taken.all if one.purge_epoch is not None
        }

    @property
    def now_ms(self) -> int:
        """The time to judge by: the earliest of the owners' times in the snapshots."""
        if self.options.now_ms is not None:
            return self.options.now_ms
        return min(one.taken_at_ms for one in self.taken.all)

    @property
    def grace_ms(self) -> int:
        return self.options.grace_s * 1000

    def table(self, name: str, *columns: str) -> DataFrame:
        """A table, whole or with these columns only: the others are not even decoded."""
        return table_of(self.spark, self.url, self.names, name, *columns)

    def of_queues(self, name: str, *columns: str) -> DataFrame:
        """A table of entries or queues, of the queues that the job is about."""
        frame = self.table(name, *columns)
        queues = self.options.queue_ids
        return frame if queues is None else frame.where(frame["queue"].isin(*queues))

    def has_few_entries(self) -> bool:
        """Whether all entries that wait, are in flight or failed can be broadcast to every task."""
        counts = ("waiting_count", "in_flight_count", "failed_count")
        queues = self.table("queues", *counts)
        row = queues.selectExpr(f"coalesce(sum({' + '.join(counts)}), 0) AS entries").first()
        assert row is not None, "an aggregate always has a row"
        return int(row["entries"]) <= FEW_ENTRIES

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a phase of the job. Raises JobCancelled, and JobFailed for whatever fails in it."""
        number = len(self.phases) + 1
        watch = _Watch(self, number, name, self._phases_count)
        began = time.monotonic()
        try:
            with watch:
                watch.raise_if_over()
                yield
            watch.raise_if_over()
        except (PySparkException, Py4JError, SlateMQError, StorageError) as error:
            watch.raise_if_over()
            raise JobFailed(f"{name}: {cause_of(error)}") from error
        self.phases.append((name, round(time.monotonic() - began, 3)))

    def why_over(self) -> Exception | None:
        """Why the job may not go on; None while it may."""
        if self.options.cancelled.is_set():
            return JobCancelled("cancelled")
        if self._taken is not None and self._taken.lost.done():
            return JobFailed(self._taken.lost.result())
        return JobFailed(self.untaken) if self.untaken else None


class Tasks(NamedTuple):
    """Of a phase: how many are done, how many are known, and whether all others wait."""

    done: int
    known: int
    wait: bool


class Wait:
    """How long all tasks that are to be done have waited."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def seconds(self, wait: bool, now_s: float) -> float:
        """By this look, and those before it."""
        if not wait:
            self._since_s = None
            return 0.0
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s


class _Watch:
    """Watches a phase in a thread of its own; cancels its tasks when the job is over."""

    def __init__(self, work: Work, number: int, name: str, phases_count: int) -> None:
        self._work = work
        self._context = work.spark.sparkContext
        self._group = f"{work.run}-{number}"
        self._progress = Progress(name, number, phases_count)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name=f"watch {name}", daemon=True)

    def __enter__(self) -> None:
        self._work.report(self._progress)
        self._context.setJobGroup(self._group, self._progress.phase, interruptOnCancel=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def raise_if_over(self) -> None:
        over = self._work.why_over()
        if over is not None:
            raise over

    def _look(self) -> None:
        progress, wait = self._progress, Wait()
        while not self._ended.wait(LOOK_S):
            if self._work.why_over() is not None:
                self._context.cancelJobGroup(self._group)
            tasks = self._tasks()
            waited_s = wait.seconds(tasks.wait, time.monotonic())
            if waited_s > UNTAKEN_S:
                waiting = counted(tasks.known - tasks.done, "task has", "tasks have")
                self._work.untaken = (
                    f"{progress.phase}: {waiting} waited "
                    f"{waited_s:.0f} s for an executor: see why {self._context.master} gives none"
                )
            now = replace(progress, tasks_done=tasks.done, tasks_count=tasks.known)
            if now != progress:
                self._work.report(now)
                progress = now

    def _tasks(self) -> Tasks:
        tracker = self._context.statusTracker()
        ids = tracker.getJobIdsForGroup(self._group)
        jobs = [job for job in map(tracker.getJobInfo, ids) if job is not None]
        stages = {stage for job in jobs for stage in job.stageIds}
        found = [tracker.getStageInfo(stage) for stage in stages]
        there = [stage for stage in found if stage is not None]
        return Tasks(
            done=sum(one.numCompletedTasks for one in there),
            known=sum(one.numTasks for one in there),
            wait=any(job.status == "RUNNING" for job in jobs)
            and not any(one.numActiveTasks for one in there),
        )
