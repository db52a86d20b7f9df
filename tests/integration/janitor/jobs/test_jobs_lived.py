"""Real jobs after a random history on a real instance, held to a model in plain Python.

Its short form, in `make test-slow`, is test_jobs.py, where what happens is written down, and
test_job_logic.py, where the jobs' questions are held to a model.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from services.janitor.jobs.contract import JobOptions
from tests.integration.janitor.instances import Instance, instance
from tests.integration.janitor.jobs.lived import SHORT_S, Lived
from tests.integration.janitor.jobs.test_jobs import run, traffic

# Spark takes seconds to start, and tenths of one for each question
pytestmark = [pytest.mark.slow, pytest.mark.proof]

JOBS = ("retention", "done", "dead-letters", "unreferenced")


@pytest.mark.parametrize("number", [4])
async def test_jobs_remove_exactly_what_the_model_says_while_work_goes_on(
    spark: SparkSession, tmp_path: Path, number: int
) -> None:
    async with instance(tmp_path, brokers_count=2) as made:
        lived = Lived(made, number)
        await lived.live()
        async with traffic(made) as (published, acked):
            await _judge(spark, made, lived)
        assert set(published) <= set(acked)
        assert len(acked) == len(set(acked))
        await _all_is_delivered(made, lived)
        await _what_is_not_routed_stays(spark, made)


async def _judge(spark: SparkSession, made: Instance, lived: Lived) -> None:
    """Every job in any order, with acks in between and at the same time."""
    options = JobOptions(
        grace_s=0, replay_window_s=SHORT_S, older_than_s=SHORT_S, now_ms=lived.judged_ms
    )

    async def job(name: str) -> None:
        await run(spark, made, name, options)
        lived.after(name)

    await lived.compare("before")
    held = lived.all_in("in-flight")
    assert len(held) > 8
    for name in lived.random.sample(JOBS, len(JOBS)):
        await job(name)
        await lived.compare(name)
    # Leases are valid, whatever became of the retention; some end while a job looks.
    await lived.ack(held[0::2])
    racing = held[1::4]
    _, result = await asyncio.gather(
        lived.ack(racing), _result(run(spark, made, "retention", options))
    )
    lived.after("retention")
    await lived.compare("acks at the same time", frozenset(one for _, one in racing))
    assert not [name for name in result.counts if name.endswith("_refused") and result.counts[name]]
    for name in JOBS:
        await job(name)
    await lived.compare("all of it again")


async def _result(work: Any) -> Any:
    return await work


async def _all_is_delivered(made: Instance, lived: Lived) -> None:
    """What a queue still has comes whole; what is archived is there whole."""
    for name in lived.queues:
        for message in await made.claim(name, lived.listed(name, "available")):
            assert message.payload == lived.messages[message.message_id].payload
    parts = made.data / "archive/dead-letters"
    rows = pq.read_table(parts, partitioning="hive").to_pylist() if parts.exists() else []
    found = sorted((row["queue"], row["message_id"]) for row in rows)
    assert found == sorted(lived.all_in("archived"))
    assert found, "no dead letter was archived: try another number"
    for row in rows:
        assert row["payload"] == lived.messages[row["message_id"]].payload


async def _what_is_not_routed_stays(spark: SparkSession, made: Instance) -> None:
    """Messages of old that no broker has judged yet, since the router was down."""
    await made.client.create_queue("later")
    await made.router.kill()
    ids = await made.publish("later", 10)
    await asyncio.sleep(1.5)
    await run(spark, made, "unreferenced", JobOptions(grace_s=0, replay_window_s=SHORT_S))
    assert await made.stored(ids) == ids
    await made.router.start()
    await made.routed()
    assert await made.listed("later", "available") == ids
