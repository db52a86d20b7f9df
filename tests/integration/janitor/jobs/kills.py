"""Every job, killed at a stage of its work, then run by two janitors together: the same end.

A wave fills an instance, and takes the jobs one after the other: each is cancelled, its driver is
killed, and then it is done twice at the same time.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from libs.storage.database.roots import open_root
from libs.storage.objects.queue_names import UNCLAIMED, QueueNames
from services.janitor.jobs import verifying
from services.janitor.jobs.contract import VERIFYING, JobCancelled, JobOptions, Progress, Report
from services.janitor.jobs.run import PHASES, run_on
from tests.integration.ingest.server import ROOT
from tests.integration.janitor.instances import OPTIONS, Instance
from tests.integration.janitor.jobs.killing import JAVA, STAGE

PHASE_S = 600
"""Far above what anything takes."""

BLOB = bytes(100_000)

LETTERS = ("letters-a", "letters-b")
"""The same in every wave: their parts grow together."""

SHARED_PHASES = 2
"""Every job starts Spark and takes snapshots first."""

PRUNED = 4
"""Queues with done messages: each is a call."""

STAGES: Mapping[str, tuple[str, ...]] = {
    "retention": ("after-call 1", "entries", "before-call 1", "after-call 2", "messages"),
    "done": ("after-call 2", "done lists", "before-call 1", "after-call 1", "after-call 3"),
    "dead-letters": (
        *("after-part 1", "before-emptying 1", "before-call 1", "after-call 1", "before-call 2"),
    ),
    "restore": (
        *(
            "after-call 1",
            "archived dead letters",
            "before-call 1",
            "before-call 2",
            "after-call 2",
        ),
    ),
    "report": ("after-parquet 1", "report", "after-page 1", "taking snapshots", "starting Spark"),
    "unreferenced": ("after-object 1", "messages", "after-call 1", "objects", "after-object 2"),
    "repair": (
        "before-freeing 1",
        "after-removal 1",
        "repairing",
        "after-freeing 1",
        "before-freeing 2",
    ),
}
"""Where each job is killed: a phase of it as it begins, or a place of `killing` and which time."""


@dataclass
class Filled:
    """What a wave has put into an instance, by what is to become of it."""

    tag: str
    waiting: set[int] = field(default_factory=set)
    over: set[int] = field(default_factory=set)
    printed: set[int] = field(default_factory=set)
    unwanted: set[int] = field(default_factory=set)
    dead_letters: dict[str, set[int]] = field(default_factory=dict)
    young: Path = Path()
    left_objects: set[str] = field(default_factory=set)
    left_names: set[str] = field(default_factory=set)


async def wave(
    spark: SparkSession, made: Instance, tag: str, stages: Mapping[str, str], folder: Path
) -> None:
    """All jobs, each killed at its stage; nothing of what the tag's queues have goes wrong."""
    filled = await fill(made, tag)
    if tag == "0" and stages.get("dead-letters", "").startswith("before-emptying"):
        await _done(spark, made, "dead-letters")  # what the killed run's parts are to absorb
        await fail_letters(made, filled)
    for job, stage in stages.items():
        if job == "repair":
            await leave_over(made, filled)
        await _cancelled(spark, made, job, stage)
        await killed(made, job, stage, folder)
        await asyncio.gather(*(_done(spark, made, job) for _ in range(2)))
        await CHECKS[job](made, filled)
        assert await made.stored(filled.waiting) == filled.waiting, (job, stage)
        assert await made.listed(f"orders-{tag}", "available") == filled.waiting, (job, stage)


async def killed(
    made: Instance, job: str, stage: str, folder: Path, now_ms: int | None = None
) -> None:
    """Start a driver that is killed at a stage; at `jvm STAGE` its Java alone is.

    With `now_ms` it judges by this time.
    """
    with (folder / f"driver-{job}.log").open("ab") as log:
        driver = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "tests.integration.janitor.jobs.driver",
                made.url,
                job,
            ),
            *([] if now_ms is None else [str(now_ms)]),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), STAGE: stage},
            stdout=log,
            stderr=log,
        )
    async with asyncio.timeout(PHASE_S):
        code = await driver.wait()
    if stage.startswith(f"{JAVA} "):
        assert code > 0, f"{job} ended with {code} although its Java was to be killed at {stage!r}"
        return
    assert code == -signal.SIGKILL, f"{job} was not killed at {stage!r}, but ended with {code}"


async def _cancelled(spark: SparkSession, made: Instance, job: str, stage: str) -> None:
    """The job, cancelled when its last phase begins; its first, to leave all calls to be made.

    Those that read row by row end as they read.
    """
    options = replace(OPTIONS, cancelled=threading.Event())
    phase = verifying.SNAPSHOTS
    if job in PHASES:
        phase = PHASES[job][SHARED_PHASES if "-call " in stage else -1]

    def report(progress: Progress) -> None:
        if progress.phase == phase:
            options.cancelled.set()

    with pytest.raises(JobCancelled):
        await run(spark, made, job, options, report)


async def _done(spark: SparkSession, made: Instance, job: str) -> None:
    await run(spark, made, job, OPTIONS)


async def run(
    spark: SparkSession,
    made: Instance,
    job: str,
    options: JobOptions,
    report: Report = lambda _: None,
) -> None:
    """Do a job in a thread of its own, with Spark where it needs that."""
    if job in VERIFYING:
        await asyncio.to_thread(verifying.run_job, job, made.url, options, report)
    else:
        await asyncio.to_thread(run_on, spark, job, made.url, options, report)


# --- What is there, and what is to become of it -----------------------------


async def fill(made: Instance, tag: str) -> Filled:
    """Put something of everything into an instance, and wait until what is to be due is."""
    client = made.client
    filled = Filled(tag)
    await client.create_queue(f"orders-{tag}")
    filled.waiting = await made.publish(f"orders-{tag}", 20, payload=BLOB)
    filled.over = await made.publish(f"orders-{tag}", 500, retention_s=1)
    for queue in LETTERS:
        if tag == "0":
            await client.create_queue(queue, max_attempts=1)
        filled.dead_letters[queue] = set()
    await fail_letters(made, filled)
    for number in range(PRUNED):
        queue = f"prints-{tag}-{number}"
        await client.create_queue(queue, done_retention=1)
        printed = await made.publish(queue, 10)
        for message in await made.claim(queue, printed):
            await message.ack()
        filled.printed |= printed
    filled.unwanted = await made.publish("nobody", 500) | await made.publish(
        "nobody", 3, payload=BLOB
    )
    for _ in range(3):  # uploads that were never committed
        _upload(made)
    made.age_objects()
    filled.young = _upload(made)
    await made.routed()
    await asyncio.sleep(1.2)
    return filled


async def fail_letters(made: Instance, filled: Filled) -> None:
    """Make thirty dead letters in each of the queues for them."""
    for queue, ids in filled.dead_letters.items():
        dead_letters = await made.publish(queue, 30, payload=f"{queue} {filled.tag}".encode())
        for message in await made.claim(queue, dead_letters):
            await message.nack("boom")
        ids |= dead_letters


async def leave_over(made: Instance, filled: Filled) -> None:
    """Objects and claims of names that nothing needs, as processes that were killed leave them."""
    filled.left_objects = {str(_upload(made).relative_to(made.data)) for _ in range(3)}
    filled.left_names = {f"left-{filled.tag}-{number}" for number in range(2)}
    names = QueueNames(open_root(made.url).objects)
    for queue in filled.left_names:
        assert await names.claim(queue, (0,), UNCLAIMED)
    made.age(made.data / path for path in filled.left_objects)
    made.age((made.data / "queue-names").rglob("*.json"))


def _upload(made: Instance) -> Path:
    path = made.data / "blobs" / "ab" / secrets.token_hex(31)  # as Blobs names them
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(BLOB)
    return path


async def _after_retention(made: Instance, filled: Filled) -> None:
    assert await made.stored(filled.over) == set()
    dead_letters = set[int]().union(*filled.dead_letters.values())
    assert await made.stored(dead_letters | filled.printed) == dead_letters | filled.printed


async def _after_done(made: Instance, filled: Filled) -> None:
    for number in range(PRUNED):
        assert await made.listed(f"prints-{filled.tag}-{number}", "done") == set()


async def _after_dead_letters(made: Instance, filled: Filled) -> None:
    for queue, ids in filled.dead_letters.items():
        assert await made.listed(queue, "failed") == set()
        assert await made.listed(queue, "archived") == ids
    # What the kill left half written has another name.
    parts = sorted((made.data / "archive").rglob("part-??????.parquet"))
    table = pq.read_table(parts, partitioning="hive")
    found = table["message_id"].to_pylist()
    assert len(found) == len(set(found))
    assert set(found) >= set[int]().union(*filled.dead_letters.values())


async def _after_restore(made: Instance, filled: Filled) -> None:
    """Each dead letter is back once: a second restore finds it gone."""
    for queue, ids in filled.dead_letters.items():
        assert await made.listed(queue, "archived") == set()
        async with asyncio.timeout(PHASE_S):
            while len(there := await made.listed(queue, "available")) < len(ids):
                await asyncio.sleep(0.02)
        assert not there & ids
        claimed = await made.claim(queue, there)
        payloads = [message.payload for message in claimed]
        assert payloads == [f"{queue} {filled.tag}".encode()] * len(ids)
        assert await made.client.claim(queue, 1) == []
        for message in claimed:
            await message.ack()


async def _after_report(made: Instance, filled: Filled) -> None:
    """Of each run that got to its end; the others have left a folder without a page."""
    whole = 0
    for page in made.data.glob("reports/*/report.html"):
        rows = pq.read_table(page.parent / "report.parquet").to_pylist()
        counts = [row["waiting_count"] for row in rows if row["queue"] == f"orders-{filled.tag}"]
        if counts:  # not of an earlier wave
            assert sum(counts) == len(filled.waiting)
            whole += 1
    assert whole >= 2


async def _after_unreferenced(made: Instance, filled: Filled) -> None:
    assert await made.stored(filled.unwanted | filled.printed) == set()
    # All waves so far have left what waits, and this one what was just uploaded.
    assert len(made.objects) == len(filled.waiting) * (int(filled.tag) + 1) + 1
    assert filled.young.exists()


async def _after_repair(made: Instance, filled: Filled) -> None:
    assert not made.objects & filled.left_objects
    assert filled.young.exists()
    names = await made.names()
    assert not names & filled.left_names
    assert names >= {f"orders-{filled.tag}", *LETTERS}


CHECKS: Mapping[str, Callable[[Instance, Filled], Awaitable[None]]] = {
    "retention": _after_retention,
    "done": _after_done,
    "dead-letters": _after_dead_letters,
    "restore": _after_restore,
    "report": _after_report,
    "unreferenced": _after_unreferenced,
    "repair": _after_repair,
}
