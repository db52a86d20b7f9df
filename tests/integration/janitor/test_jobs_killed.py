"""Drivers that are killed in the middle of a job, and janitors that run it at the same time."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from tests.integration.ingest_server import ROOT
from tests.integration.janitor.instances import Instance, instance
from tests.integration.janitor.test_jobs import BLOB, run

pytestmark = pytest.mark.slow  # Spark takes seconds to start, and tenths of one for each question

PHASE_S = 60


async def killed(made: Instance, job: str, phase: str, when: Callable[[], bool]) -> None:
    """Start a driver, and kill it when it is in this phase and something has come about."""
    driver = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.integration.janitor.driver", made.janitor.root, job),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
    )
    assert driver.stdout is not None
    async with asyncio.timeout(PHASE_S):
        while (line := await driver.stdout.readline()).decode().strip() != phase:
            assert line, "it ended before that phase"
        while not when() and driver.returncode is None:
            await asyncio.sleep(0.001)
    if driver.returncode is None:
        driver.kill()
    await driver.wait()


async def twice(spark: SparkSession, made: Instance, job: str) -> None:
    """Two janitors do the same job at the same time."""
    await asyncio.gather(run(spark, made, job), run(spark, made, job))


async def test_what_a_killed_driver_leaves_two_at_once_bring_to_the_same_end(
    spark: SparkSession, tmp_path: Path
) -> None:
    async with instance(tmp_path) as made:
        client = made.client
        await client.create_queue("orders", max_attempts=1)
        letters = await made.publish("orders", 300)
        for message in await made.claim("orders", letters):
            await message.nack("boom")
        for _ in range(3):  # uploads that were never committed
            path = made.data / "blobs" / "ab" / secrets.token_hex(15)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(BLOB)
        made.age_objects()
        young = made.data / "blobs" / "ab" / secrets.token_hex(15)
        young.write_bytes(BLOB)
        nobodys = await made.publish("nobody", 3000)
        waiting = await made.publish("orders", 100, payload=BLOB)
        over = await made.publish("orders", 3000, retention_s=1)
        await made.routed()
        await asyncio.sleep(1.2)

        await killed(made, "retention", "entries", lambda: True)
        await killed(made, "retention", "messages", lambda: True)
        await twice(spark, made, "retention")
        assert await made.stored(over | waiting | letters) == waiting | letters
        assert await made.listed("orders", "available") == waiting

        parts = made.data / "archive"
        await killed(made, "dead-letters", "dead letters", parts.exists)
        await twice(spark, made, "dead-letters")
        assert await made.listed("orders", "failed") == set()
        assert await made.listed("orders", "archived") == letters
        # What the kill left half written has another name.
        table = pq.read_table(sorted(parts.rglob("*.parquet")), partitioning="hive")
        assert sorted(table["message_id"].to_pylist()) == sorted(letters)

        await killed(made, "unreferenced", "messages", lambda: True)
        await twice(spark, made, "unreferenced")
        assert await made.stored(nobodys | letters | waiting) == waiting
        assert await made.logged() == waiting
        assert len(made.objects) == len(waiting) + 1
        assert young.exists()
