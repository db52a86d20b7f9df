"""Killed and run again comes to what an unkilled run comes to, by a clock that stands still.

Both runs begin with the same bytes and judge by the same time, so nothing can fall due between
them: what differs at the end is what the kill has lost, or done twice. The short form, in
`make test`, is test_jobs_killed.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from services.janitor.jobs.run import PHASES, STARTING, run_on
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
)

pytestmark = [pytest.mark.slow, pytest.mark.proof]  # Three instances, and Spark twice.

STATES = ("available", "delayed", "in_flight", "done", "failed", "archived")
QUEUES = ("orders-0", *LETTERS, *(f"prints-0-{number}" for number in range(PRUNED)))
JAVA_STAGES = {
    job: tuple(
        f"{JAVA} {stage}"
        for stage in dict.fromkeys((*stages, *PHASES[job][1:]))
        if stage != STARTING
    )
    for job, stages in STAGES.items()
}
"""Where Spark's Java is killed, and its driver is not: its workers may go on for a moment."""

EXPIRING_S = 8
"""The retention of messages that fall due by the owners' clocks while the jobs run."""

NEW = -1
"""Stands for an ID that a job has made: a restored letter gets the next one that is free."""


async def _outcome(made: Instance, ids: set[int], expiring: set[int]) -> Mapping[str, Any]:
    """All that jobs change, in a form that two instances can be compared by.

    Whether a queue still lists what is expiring is up to its broker's clock, and is left out.
    """
    outcome: dict[str, Any] = {
        "stored": await made.stored(ids),
        "logged": Counter(one if one in ids else NEW for one in await made.logged()),
        "objects": len(made.objects),
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
    """Wait for what a job sets going: restored letters come back by way of ingest."""
    if job != "restore":
        return
    async with asyncio.timeout(PHASE_S):
        for queue, ids in filled.dead_letters.items():
            while len(await made.listed(queue, "available")) < len(ids):
                await asyncio.sleep(0.05)


async def _ran(spark: SparkSession, made: Instance, job: str, now_ms: int) -> None:
    options = replace(OPTIONS, now_ms=now_ms)
    await asyncio.to_thread(run_on, spark, job, made.janitor, options)


async def _filled(
    spark: SparkSession, folder: Path, job: str
) -> tuple[Filled, set[int], set[int], int]:
    """An instance with something of everything, stopped.

    Gives what it was filled with, all its messages, those that expire soon, and its time.
    """
    async with instance(folder) as made:
        filled = await fill(made, "0")
        expiring = await made.publish("orders-0", 300, retention_s=EXPIRING_S)
        await made.routed()
        if job in ("dead-letters", "restore"):  # what is archived, and what parts can absorb
            await asyncio.to_thread(run_on, spark, "dead-letters", made.janitor, OPTIONS)
        if job == "dead-letters":
            await fail_letters(made, filled)
        now_ms = int(time.time() * 1000)
        ids = filled.waiting | filled.over | filled.printed | filled.nobodys | expiring
        return filled, ids.union(*filled.dead_letters.values()), expiring, now_ms


@pytest.mark.parametrize(
    ("job", "stage"),
    [(job, stage) for job, stages in STAGES.items() for stage in (*stages, *JAVA_STAGES[job])],
)
async def test_a_job_that_was_killed_and_run_again_ends_as_one_that_was_not(
    spark: SparkSession, tmp_path: Path, job: str, stage: str
) -> None:
    # Given an instance, and a copy of it
    filled, ids, expiring, now_ms = await _filled(spark, tmp_path, job)
    # At the same place later, since stored URIs have the place in them.
    await asyncio.to_thread(shutil.copytree, tmp_path / "data", tmp_path / "copy")

    # When the job runs undisturbed over the one
    async with instance(tmp_path) as made:
        await _ran(spark, made, job, now_ms)
        await _settled(made, job, filled)
        undisturbed = await _outcome(made, ids, expiring)

    # And is killed over the other, and run again
    await asyncio.to_thread(shutil.rmtree, tmp_path / "data")
    await asyncio.to_thread((tmp_path / "copy").rename, tmp_path / "data")
    async with instance(tmp_path) as made:
        await killed(made, job, stage, tmp_path, now_ms)
        await _ran(spark, made, job, now_ms)
        await _settled(made, job, filled)
        disturbed = await _outcome(made, ids, expiring)

    # Then both come to the same
    assert disturbed == undisturbed
