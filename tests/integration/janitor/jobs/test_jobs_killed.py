"""Drivers that are killed in the middle of a job, and janitors that run it at the same time.

`make proofs` kills each job at one stage, and `python -m tests.faults janitor` each at every one;
the short form, in `make test-slow`, kills the ones that have least to do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.forms import proof
from tests.integration.janitor.instances import instance
from tests.integration.janitor.jobs.kills import STAGES, wave

pytestmark = pytest.mark.slow  # Spark takes seconds to start, and tenths of one for each question


@pytest.mark.parametrize(
    "jobs",
    [
        ("done", "repair"),
        proof(("retention", "done", "report")),
        proof(("dead-letters", "restore", "unreferenced", "repair")),
    ],
)
async def test_what_a_killed_driver_leaves_two_at_once_bring_to_the_same_end(
    spark: SparkSession, tmp_path: Path, jobs: tuple[str, ...]
) -> None:
    stages = {job: STAGES[job][0] for job in jobs}
    async with instance(tmp_path) as made:
        await wave(spark, made, "0", stages, tmp_path)
