"""A worker with jobs of the tests' own, chosen by the first queue that a run names."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from libs.serving.peers.channels import inherited
from libs.serving.process.exits import exit_with
from libs.storage.database.roots import open_root
from services.janitor.jobs.contract import (
    JobCancelled,
    JobFailed,
    JobOptions,
    JobResult,
    Progress,
    Report,
)
from services.janitor.runs.worker import work
from services.janitor.spark.session import QUIET, spark_session
from services.janitor.spark.snapshots import open_tables
from tests.integration.janitor.conftest import READY, SMALL
from tests.integration.janitor.runs.mark import bear
from tests.integration.janitor.runs.own_janitor import OWN_JOBS

SETTINGS = {**SMALL, **READY, **QUIET}


def quick(root: str, options: JobOptions, report: Report) -> JobResult:
    report(Progress("looking", 1, 2, 1, 2))
    report(Progress("removing", 2, 2, 2, 2))
    sys.stdout.write("words on stdout that are for the log\n")
    sys.stdout.flush()
    return JobResult(
        {"messages_purged": 7, "messages_purged/orders": 4}, ["reports/a.html"], [("looking", 0.5)]
    )


def named(root: str, options: JobOptions, report: Report) -> JobResult:
    return JobResult({}, [f"reports/{options.run}/report.html"])


def states(root: str, options: JobOptions, report: Report) -> JobResult:
    """Its options, as the files that it wrote."""
    found = {
        "root": root,
        **{one.name: getattr(options, one.name) for one in fields(options)},
    }
    return JobResult({}, [f"{name}={value}" for name, value in found.items()])


def slow(root: str, options: JobOptions, report: Report) -> JobResult:
    """Ends when it is cancelled."""
    report(Progress("waiting", 1, 1))
    while not options.cancelled.wait(60):
        pass
    raise JobCancelled


def stubborn(root: str, options: JobOptions, report: Report) -> JobResult:
    """Never ends by itself."""
    report(Progress("waiting", 1, 1))
    while True:
        time.sleep(60)


def fails(root: str, options: JobOptions, report: Report) -> JobResult:
    raise JobFailed("broker 0 is down")


@dataclass(frozen=True)
class Babble(Progress):
    """More than a janitor understands."""

    mood: str = "fine"


def babbles(root: str, options: JobOptions, report: Report) -> JobResult:
    report(Babble("babbling", 1, 1))
    return slow(root, options, lambda _: None)


def breaks(root: str, options: JobOptions, report: Report) -> JobResult:
    raise ValueError("a fault\n\tat org.apache.spark.Something")


def dies(root: str, options: JobOptions, report: Report) -> JobResult:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def spark(root: str, options: JobOptions, report: Report) -> JobResult:
    """Real Spark over real snapshots; stays there until it is cancelled."""
    with (
        spark_session("local[1]", "512m", SETTINGS) as session,
        open_tables(session, root) as table,
    ):
        count = table("queues").count()
        report(Progress(f"{count} queues", 1, 1))
        slow(root, options, lambda _: None)
        return JobResult({})


def traces(root: str, options: JobOptions, report: Report) -> JobResult:
    """The trace contexts that calls of this process and of a Spark worker have."""
    with spark_session("local[1]", "512m", SETTINGS) as session:
        inside = (
            session.sparkContext.parallelize([0], 1).map(lambda _: context_of_calls()).collect()
        )
    return JobResult({}, [context_of_calls(), *inside])


def context(root: str, options: JobOptions, report: Report) -> JobResult:
    """The trace context that calls of this process have."""
    return JobResult({}, [context_of_calls()])


def removes(root: str, options: JobOptions, report: Report) -> JobResult:
    """Sends the store a hundred requests that remove, which a janitor by itself does not."""
    asyncio.run(_remove(root))
    return JobResult({})


def removes_and_dies(root: str, options: JobOptions, report: Report) -> JobResult:
    asyncio.run(_remove(root))
    report(Progress("removed", 1, 1))
    return dies(root, options, report)


async def _remove(root: str) -> None:
    objects = open_root(root).objects
    for number in range(100):
        await objects.delete(f"absent/{number}")


def context_of_calls() -> str:
    carrier = inherited()
    return dict(carrier())["traceparent"] if carrier is not None else ""


def spark_stubborn(root: str, options: JobOptions, report: Report) -> JobResult:
    """Works on, and ignores the cancellation."""
    with (
        spark_session("local[1]", "512m", SETTINGS) as session,
        open_tables(session, root) as table,
    ):
        count = table("queues").count()
        return stubborn(root, options, lambda _: report(Progress(f"{count} queues", 1, 1)))


JOBS: dict[str, Callable[[str, JobOptions, Report], JobResult]] = {
    "quick": quick,
    "named": named,
    "slow": slow,
    "stubborn": stubborn,
    "fails": fails,
    "babbles": babbles,
    "breaks": breaks,
    "dies": dies,
    "states": states,
    "spark": spark,
    "spark-stubborn": spark_stubborn,
    "traces": traces,
    "context": context,
    "removes": removes,
    "removes-and-dies": removes_and_dies,
}


def run_job(job: str, root: str, options: JobOptions, report: Report) -> JobResult:
    named = [one for one in options.queue_ids or () if one in OWN_JOBS]
    return JOBS[named[0] if named else "quick"](root, options, report)


if __name__ == "__main__":
    bear()
    exit_with(work(run_job))
