"""A job that is killed and run again ends as one that was not killed, by a clock that stands still.

Both runs begin with the same bytes and judge by the same time, so nothing can fall due between
them: what differs at the end is what the kill has lost, or done twice. All kills of a job begin
with a copy of one instance, and are compared with one undisturbed run. The short form, in `make
test`, is test_jobs_killed.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from services.janitor.jobs.run import PHASES, STARTING
from tests.integration.janitor.instances import OPTIONS, Instance, instance
from tests.integration.janitor.jobs.killing import JAVA
from tests.integration.janitor.jobs.kills import (
    LETTERS,
    PHASE_S,
    PRUNED,
    STAGES,
    Filled,
    fail_letters,
    fill,
    killed,
    leave_over,
    run,
)

pytestmark = [pytest.mark.slow, pytest.mark.proof]  # An instance, and Spark twice, for each kill.

STATES = ("available", "delayed", "in_flight", "done", "failed", "archived")
QUEUES = ("orders-0", *LETTERS, *(f"prints-0-{number}" for number in range(PRUNED)))
JAVA_STAGES = {
    job: tuple(
        f"{JAVA} {stage}"
        for stage in dict.fromkeys((*stages, *PHASES[job][1:]))
        if stage != STARTING
    )
    for job, stages in STAGES.items()
    if job in PHASES
}
"""Where Spark's Java is killed, and its driver is not: its workers may go on for a moment."""

EXPIRING_S = 8
"""The retention of messages that fall due by the owners' clocks while the jobs run."""

NEW = -1
"""Stands for an ID that a job has made: a restored dead letter gets the next free one."""


async def _outcome(made: Instance, ids: set[int], expiring: set[int]) -> Mapping[str, Any]:
    """All that jobs change, in a form that two instances can be compared by.

    Whether a queue still lists what is expiring is up to its broker's clock, and is left out.
    """
    outcome: dict[str, Any] = {
        "stored": await made.stored(ids),
        "logged": Counter(one if one in ids else NEW for one in await made.logged()),
        "objects": len(made.objects),
        "names": await made.names(),
    }
    for queue in QUEUES:
        for state in STATES:
            listed = await made.listed(queue, state) - expiring
            outcome[f"{queue} {state}"] = Counter(one if one in ids else NEW for one in listed)
    parts = sorted((made.data / "archive").rglob("part-??????.parquet"))
    rows = pq.read_table(parts, partitioning="hive").to_pylist() if parts else []
    outcome["archive"] = Counter((row["message_id"], row["failed_at"]) for row in rows)
    whole = [page.parent for page in made.data.glob("reports/*/report.html")]
    outcome["reports"] = {
        (row["queue"], str(row["day"]), row["waiting_count"])
        for folder in whole
        for row in pq.read_table(folder / "report.parquet").to_pylist()
    }
    return outcome


async def _settled(made: Instance, job: str, filled: Filled) -> None:
    """Wait for what a job sets going: restored dead letters come back by way of ingest."""
    if job != "restore":
        return
    async with asyncio.timeout(PHASE_S):
        for queue, ids in filled.dead_letters.items():
            while len(await made.listed(queue, "available")) < len(ids):
                await asyncio.sleep(0.05)


async def _ran(spark: SparkSession, made: Instance, job: str, now_ms: int) -> None:
    await run(spark, made, job, replace(OPTIONS, now_ms=now_ms))


@dataclass(frozen=True)
class Undisturbed:
    """An instance before a job, in `folder`/copy, and what it is after an undisturbed run of it."""

    folder: Path
    filled: Filled
    ids: set[int]
    expiring: set[int]
    now_ms: int
    outcome: Mapping[str, Any]

    async def begin_again(self) -> None:
        """Put the copy where the instance was, since stored URIs name that place."""
        data = self.folder / "data"
        await asyncio.to_thread(shutil.rmtree, data)
        await asyncio.to_thread(shutil.copytree, self.folder / "copy", data)


async def _undisturbed(spark: SparkSession, folder: Path, job: str) -> Undisturbed:
    async with instance(folder) as made:
        filled = await fill(made, "0")
        expiring = await made.publish("orders-0", 300, retention_s=EXPIRING_S)
        await made.routed()
        if job in ("dead-letters", "restore"):  # what is archived, and what parts can absorb
            await run(spark, made, "dead-letters", OPTIONS)
        if job == "dead-letters":
            await fail_letters(made, filled)
        if job == "repair":
            await leave_over(made, filled)
        now_ms = int(time.time() * 1000)
    await asyncio.to_thread(shutil.copytree, folder / "data", folder / "copy")
    ids = filled.waiting | filled.over | filled.printed | filled.unwanted | expiring
    ids = ids.union(*filled.dead_letters.values())
    async with instance(folder) as made:
        await _ran(spark, made, job, now_ms)
        await _settled(made, job, filled)
        outcome = await _outcome(made, ids, expiring)
    return Undisturbed(folder, filled, ids, expiring, now_ms, outcome)


@pytest.fixture(scope="module")
def known() -> dict[str, Undisturbed]:
    """By job: made by the first of its kills, for all of them."""
    return {}


@pytest.mark.parametrize(
    ("job", "stage"),
    [
        (job, stage)
        for job, stages in STAGES.items()
        for stage in (*stages, *JAVA_STAGES.get(job, ()))
    ],
)
async def test_a_job_that_was_killed_and_run_again_ends_as_one_that_was_not(
    spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
    known: dict[str, Undisturbed],
    job: str,
    stage: str,
) -> None:
    # Given the bytes with which the undisturbed run began
    if job not in known:
        known[job] = await _undisturbed(spark, tmp_path_factory.mktemp(job), job)
    undisturbed = known[job]
    await undisturbed.begin_again()

    # When the job is killed, and run again
    async with instance(undisturbed.folder) as made:
        await killed(made, job, stage, undisturbed.folder, undisturbed.now_ms)
        await _ran(spark, made, job, undisturbed.now_ms)
        await _settled(made, job, undisturbed.filled)
        outcome = await _outcome(made, undisturbed.ids, undisturbed.expiring)

    # Then both come to the same
    assert outcome == undisturbed.outcome
