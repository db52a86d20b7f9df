"""Real jobs after a random history on a real instance, held to a model in plain Python.

The short form, in `make test`, runs those that remove messages, once; in `make proofs` all run, and
again, also while acks and messages that nobody has routed yet are on their way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from services.janitor.jobs.contract import JobOptions
from tests.forms import proof
from tests.integration.janitor.instances import Instance, instance
from tests.integration.janitor.lived import SHORT_S, Lived
from tests.integration.janitor.test_jobs import run, traffic

pytestmark = pytest.mark.slow  # Spark takes seconds to start, and tenths of one for each question

JOBS = ("retention", "done", "dead-letters", "unreferenced")

MESSAGE_JOBS = ("retention", "unreferenced")


NUMBER = 4
"""Of the history."""


@pytest.mark.parametrize("whole", [False, proof(True)])
async def test_jobs_remove_exactly_what_the_model_says_while_work_goes_on(
    spark: SparkSession, tmp_path: Path, whole: bool
) -> None:
    async with instance(tmp_path, brokers_count=2) as made:
        lived = Lived(made, NUMBER)
        await lived.live()
        async with traffic(made) as (published, acked):
            await _judge(spark, made, lived, JOBS if whole else MESSAGE_JOBS)
            if whole:
                await _judge_again(spark, made, lived)
        assert set(published) <= set(acked)
        assert len(acked) == len(set(acked))
        archived = await _all_is_delivered(made, lived)
        assert archived or not whole, "no letter was archived: try another number"
        if whole:
            await _what_is_not_routed_stays(spark, made)


def _options(lived: Lived) -> JobOptions:
    return JobOptions(
        grace_s=0, replay_window_s=SHORT_S, older_than_s=SHORT_S, now_ms=lived.judged_ms
    )


async def _judge(spark: SparkSession, made: Instance, lived: Lived, jobs: Sequence[str]) -> None:
    """These jobs in any order."""
    await lived.compare("before")
    for name in lived.random.sample(jobs, len(jobs)):
        await run(spark, made, name, _options(lived))
        lived.after(name)
        await lived.compare(name)


async def _judge_again(spark: SparkSession, made: Instance, lived: Lived) -> None:
    """With acks in between and at the same time."""
    held = lived.all_in("in-flight")
    assert len(held) > 8
    # Leases are valid, whatever became of the retention; some end while a job looks.
    await lived.ack(held[0::2])
    racing = held[1::4]
    _, told = await asyncio.gather(
        lived.ack(racing), _result(run(spark, made, "retention", _options(lived)))
    )
    lived.after("retention")
    await lived.compare("acks at the same time", frozenset(one for _, one in racing))
    assert not [name for name in told.counts if name.endswith("_refused") and told.counts[name]]
    for name in JOBS:
        await run(spark, made, name, _options(lived))
        lived.after(name)
    await lived.compare("all of it again")


async def _result(work: Any) -> Any:
    return await work


async def _all_is_delivered(made: Instance, lived: Lived) -> int:
    """What a queue still has comes whole; what is archived is there whole. How much that is."""
    for name in lived.queues:
        for message in await made.claim(name, lived.listed(name, "available")):
            assert message.payload == lived.messages[message.message_id].payload
    parts = made.data / "archive/dead-letters"
    rows = pq.read_table(parts, partitioning="hive").to_pylist() if parts.exists() else []
    found = sorted((row["queue"], row["message_id"]) for row in rows)
    assert found == sorted(lived.all_in("archived"))
    for row in rows:
        assert row["payload"] == lived.messages[row["message_id"]].payload
    return len(found)


async def _what_is_not_routed_stays(spark: SparkSession, made: Instance) -> None:
    """Messages of old that no broker has judged yet, since the router was away."""
    await made.client.create_queue("later")
    await made.router.kill()
    ids = await made.publish("later", 10)
    await asyncio.sleep(1.5)
    await run(spark, made, "unreferenced", JobOptions(grace_s=0, replay_window_s=SHORT_S))
    assert await made.stored(ids) == ids
    await made.router.start()
    await made.routed()
    assert await made.listed("later", "available") == ids
