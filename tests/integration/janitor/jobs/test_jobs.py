"""Jobs over a real instance: they remove what may go, and nothing else, while work goes on."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import slatemq
from libs.storage.database.roots import open_root
from libs.storage.objects.task_folders import body_name
from services.janitor.jobs.contract import JobOptions, JobResult, Progress
from services.janitor.jobs.dead_letter_jobs import DeadLetterRestore
from services.janitor.jobs.run import PHASES, run_on
from slatemq._admin.task_ids import TaskIds
from tests.forms import proof
from tests.integration.janitor.instances import OPTIONS, Instance, instance

pytestmark = pytest.mark.slow  # Spark takes seconds to start, and tenths of one for each question

BLOB = bytes(100_000)
RETENTION_S = 30
"""Enough to be claimed in, also where each process on the way stands still for seconds."""

PUBLISH_S = 0.2
"""Between two messages of the traffic: each is five processes' work, for minutes."""


async def run(
    spark: SparkSession, made: Instance, job: str, options: JobOptions = OPTIONS, **more: Any
) -> JobResult:
    """Run a job while the servers and the event loop of the test go on."""
    progresses: list[Progress] = []
    chosen = replace(options, **more)
    result = await asyncio.to_thread(run_on, spark, job, made.url, chosen, progresses.append)
    assert [one.phase for one in progresses if not one.tasks_done][-1] == PHASES[job][-1]
    assert [name for name, _ in result.phases] == list(PHASES[job])
    return result


@asynccontextmanager
async def traffic(made: Instance) -> AsyncIterator[tuple[list[int], list[int]]]:
    """Publishers and a consumer, for as long as the block takes; what was published and acked."""
    published: list[int] = []
    acked: list[int] = []
    await made.client.create_queue("live")

    async def publishing() -> None:
        while True:
            published.append(int(await made.client.publish("live", {"queue": "live"})))
            await asyncio.sleep(PUBLISH_S)

    async def consuming() -> None:
        async with made.client.consume("live") as messages:
            async for message in messages:
                acked.append(message.message_id)
                await message.ack()

    tasks = [asyncio.create_task(publishing()), asyncio.create_task(consuming())]
    try:
        yield published, acked
        tasks[0].cancel()
        async with asyncio.timeout(60):
            while set(acked) < set(published):
                assert not tasks[1].done(), tasks[1].result()
                await asyncio.sleep(0.02)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Filled(NamedTuple):
    """What an instance has been filled with: message IDs, by what became of them.

    Attributes:
        expire_s: When those in flight, and the failed ones, are past their retention.
    """

    held: list[slatemq.Received]
    expire_s: float
    in_flight: set[int]
    failed: set[int]
    dead_letters: set[int]
    short: set[int]
    printed: set[int]
    unwanted: set[int]
    waiting: set[int]
    over: set[int]

    @property
    def everything(self) -> set[int]:
        """All of them."""
        return set[int]().union(*self[2:])

    async def expired(self) -> None:
        """Wait until everything that has a short retention is past it."""
        await asyncio.sleep(self.expire_s - time.monotonic())


async def fill(made: Instance) -> Filled:
    """Fill it, queues on both brokers; when this returns what is kept for a second is past that."""
    client = made.client
    await client.create_queue("orders", max_attempts=1, partitions=2)
    await client.create_queue("brief", max_attempts=1, failed_retention=1, partitions=2)
    await client.create_queue("prints", done_retention=1, partitions=2)
    in_flight = await made.publish("orders", 10, retention_s=RETENTION_S)
    held = await made.claim("orders", in_flight)
    failed = await made.publish("orders", 10, retention_s=RETENTION_S)
    expire_s = time.monotonic() + RETENTION_S + 0.5
    dead_letters = await made.publish("orders", 10, payload=BLOB)
    for message in await made.claim("orders", failed | dead_letters):
        await message.nack("boom")
    short = await made.publish("brief", 5)
    for message in await made.claim("brief", short):
        await message.nack("boom")
    printed = await made.publish("prints", 20) | await made.publish("prints", 3, payload=BLOB)
    for message in await made.claim("prints", printed):
        await message.ack()
    unwanted = await made.publish("nobody", 5)
    waiting = await made.publish("orders", 30)
    over = await made.publish("orders", 30, retention_s=1)
    await made.routed()
    await asyncio.sleep(1.2)
    ids = (in_flight, failed, dead_letters, short, printed, unwanted, waiting, over)
    return Filled(held, expire_s, *ids)


@pytest.mark.timeout(1200)  # Some ten runs of Spark, each half a minute on a slow, busy machine
@pytest.mark.parametrize("again", [False, proof(True)])
async def test_jobs_remove_what_may_go_while_work_goes_on(
    spark: SparkSession, tmp_path: Path, again: bool
) -> None:
    """The short form does each job once; the full one tries more of them dry, and again."""
    async with instance(tmp_path, brokers_count=2) as made, traffic(made) as (published, acked):
        filled = await fill(made)
        everything, waiting = filled.everything, filled.waiting
        dead_letters, failed = filled.dead_letters, filled.failed | filled.dead_letters

        pruned = {"done_removed": len(filled.printed), "queues_pruned": 1}
        dry = await run(spark, made, "done", dry_run=True)
        assert dry.counts == pruned | {"done_removed/prints": len(filled.printed)}
        result = await run(spark, made, "done")
        assert result.counts == pruned
        assert await made.listed("prints", "done") == set()

        await filled.expired()
        if again:
            result = await run(spark, made, "retention", dry_run=True)
            assert result.counts["messages_purged"] == len(filled.over)
            assert result.counts["failed_removed/brief"] == len(filled.short)
            assert await made.stored(everything) == everything

        result = await run(spark, made, "retention")
        assert result.counts["messages_purged"] == len(filled.over)
        assert result.counts["failed_removed"] == len(filled.short)
        assert await made.stored(everything) == everything - filled.over
        assert await made.listed("orders", "available") == waiting
        assert await made.listed("orders", "in_flight") == filled.in_flight
        assert await made.listed("orders", "failed") == failed
        assert await made.listed("brief", "failed") == set()

        await _remove_unreferenced(spark, made)
        kept = filled.in_flight | failed | waiting
        assert await made.stored(everything) == kept
        others = await made.logged() - kept
        async with asyncio.timeout(60):
            while not others <= set(published):  # one may be stored and not be answered yet
                await asyncio.sleep(0.01)
        assert len(made.objects) == len(dead_letters)

        payload_bytes = len(BLOB) * len(dead_letters) + len(b"payload") * len(filled.failed)
        if again:
            result = await run(spark, made, "dead-letters", dry_run=True)
            assert result.counts["payload_bytes"] == payload_bytes
            assert result.counts["dead_letters_archived/orders"] == len(failed)
        result = await run(spark, made, "dead-letters", run="letters-1")
        archived = (result.counts[f"dead_letters_{what}"] for what in ("archived", "written"))
        assert [*archived] == [len(failed)] * 2
        assert result.counts["payload_bytes"] == payload_bytes
        assert "dead_letters_gone" not in result.counts
        assert await made.listed("orders", "failed") == set()
        assert await made.listed("orders", "archived") == failed

        for message in filled.held:  # past its retention, but its lease is valid
            await message.ack()
        if again:
            await run(spark, made, "retention")
            assert await made.stored(everything) == dead_letters | waiting
            await run(spark, made, "unreferenced")
            assert await made.stored(everything) == waiting
            assert made.objects == set()
        await _report(spark, made, filled)
        await _bring_back(spark, made, filled, again)
    # The last publish may have been cancelled when it was stored, and not answered yet.
    assert set(published) <= set(acked)
    assert len(acked) == len(set(acked)) <= len(published) + 1


async def _remove_unreferenced(spark: SparkSession, made: Instance) -> None:
    body = await stale_task_body(made)
    unfinished, recent = stopped_uploads(made)
    await run(spark, made, "unreferenced")
    assert not (made.data / body).exists()
    assert not unfinished.exists()
    recent.unlink()  # and fails if it was removed


async def stale_task_body(made: Instance) -> str:
    """The path of a body that a publish left eight days ago without an answer."""
    now_ms = int(time.time() * 1000)
    path = f"tasks/ingest-0/redis-1/{body_name(TaskIds(0).make(now_ms), b'body')}"
    await open_root(made.url).objects.put(path, b"body")
    os.utime(made.data / path, (time.time() - 8 * 24 * 3600,) * 2)
    return path


def stopped_uploads(made: Instance) -> tuple[Path, Path]:
    """Files of uploads that were killed two days ago, and just now."""
    folder = made.data / "blobs" / "00"
    folder.mkdir(parents=True, exist_ok=True)
    old, new = folder / f"{'0' * 62}#1", folder / f"{'1' * 62}#1"
    for path in (old, new):
        path.write_bytes(b"half of it")
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    return old, new


async def _report(spark: SparkSession, made: Instance, filled: Filled) -> None:
    """What is in the archive, and in a report."""
    archived = pq.read_table(made.data / "archive/dead-letters", partitioning="hive").to_pylist()
    letters = sorted(filled.failed | filled.dead_letters)
    assert sorted(row["message_id"] for row in archived) == letters
    for row in archived:
        assert row["payload"] == (BLOB if row["message_id"] in filled.dead_letters else b"payload")
        assert (row["queue"], dict(row["headers"])) == ("orders", {"queue": "orders"})
        assert row["run"] == "letters-1"
        assert [one["outcome"] for one in row["history"]] == ["nack: boom"]

    parquet, html = (await run(spark, made, "report")).artifacts
    rows = pq.read_table(made.data / parquet).to_pylist()
    orders = [row["waiting_count"] for row in rows if row["queue"] == "orders"]
    assert sum(orders) == len(filled.waiting)
    assert "<svg" in (made.data / html).read_text()


async def _bring_back(spark: SparkSession, made: Instance, filled: Filled, again: bool) -> None:
    """Archived dead letters come back once, however often they are restored."""
    ids = sorted(filled.dead_letters)
    result = await run(spark, made, "restore", message_ids=ids)
    assert result.counts["dead_letters_restored"] == len(ids)
    assert not result.counts["dead_letters_missing"]
    assert await made.listed("orders", "archived") == filled.failed
    if again:
        result = await run(spark, made, "restore", message_ids=ids)
        assert result.counts == {"dead_letters_restored": 0}

    async with asyncio.timeout(60):
        while len(there := await made.listed("orders", "available")) < len(filled.waiting) + len(
            ids
        ):
            await asyncio.sleep(0.02)
    payloads = sorted(message.payload for message in await made.claim("orders", there))
    assert payloads == sorted([b"payload"] * len(filled.waiting) + [BLOB] * len(ids))

    # A task that is late finds the queue gone.
    letters = pq.read_table(made.data / "archive/dead-letters", partitioning="hive")
    days = letters["failed_at"].cast(pa.date32())
    letters = letters.drop_columns("day").append_column("day", days)
    letters = letters.append_column("bucket_order", pa.repeat(1, letters.num_rows))
    await made.client.delete_queue("orders")
    task = DeadLetterRestore(made.url, "")
    (counts,) = await asyncio.to_thread(lambda: list(task(iter(letters.to_batches()))))
    assert {"name": "dead_letters_gone", "count": letters.num_rows} in counts.to_pylist()
