"""Looks for work at a real ingest and a real broker; and a janitor on them that starts no Java."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.storage.database.blobs import Blobs
from libs.storage.database.roots import open_root
from services.janitor.archive_paths import ARCHIVE_FOLDER, EMPTY_BYTES
from services.janitor.runs.change_detector import SCHEDULED, Ages, ChangeDetector
from slatemq.errors import Unavailable
from slatemq.v1 import janitor_pb2
from tests.integration.broker.rig import Rig, running
from tests.integration.ingest.server import Ingest, serving
from tests.integration.janitor.runs.janitors import WAIT_S, Janitor, Run, janitor, until

HOUR_MS, DAY_MS = 3_600_000, 86_400_000

AGES = Ages(replay_window_s=7 * 86_400, dead_letters_s=3 * 86_400, grace_s=60)


@asynccontextmanager
async def looked_at(
    folder: Path, ages: Ages = AGES
) -> AsyncIterator[tuple[ChangeDetector, Ingest, Rig, TopologyDirectory]]:
    objects = open_root(folder.as_uri()).objects
    directory = TopologyDirectory(objects)
    channels = Channels(directory)
    async with serving(folder.as_uri()) as ingest, running(folder) as rig:
        yield ChangeDetector(directory, channels, objects, ages), ingest, rig, directory
        await channels.close()
        await directory.close()


WITH_EVIDENCE = [job for job in SCHEDULED if job != "backup"]
"""Jobs that wait for something to change; a backup is taken each time."""


async def probe(detector: ChangeDetector, now_ms: int) -> dict[str, Mapping[str, int]]:
    """What there is for each job, but for those for which there is none."""
    found = {job: await detector.look(job, now_ms) for job in WITH_EVIDENCE}
    return {job: item for job, item in found.items() if item}


async def test_an_instance_without_messages_has_no_work_ever(tmp_path: Path) -> None:
    async with looked_at(tmp_path) as (detector, _, rig, _):
        await rig.create("orders", done_retention_s=1, failed_retention_s=1)

        assert await probe(detector, time.time_ns() // 1_000_000 + 1000 * DAY_MS) == {}


async def test_a_backup_is_due_each_time_also_of_queues_without_messages(tmp_path: Path) -> None:
    async with looked_at(tmp_path) as (detector, _, rig, _):
        await rig.create("orders")
        first, second = [await detector.look("backup", now_ms) for now_ms in (1, 2)]
        assert first
        assert first != second


async def test_a_backup_is_looked_at_again_until_all_shards_are_announced(tmp_path: Path) -> None:
    objects = open_root(tmp_path.as_uri()).objects
    directory = TopologyDirectory(objects)
    channels = Channels(directory)
    detector = ChangeDetector(directory, channels, objects, AGES)
    try:
        # Given a janitor that is started before the rest of its instance
        with pytest.raises(Unavailable, match="no ingest or broker has announced itself yet"):
            await detector.look("backup", 1)

        async with serving(tmp_path.as_uri()):
            # When a shard whose database was restored, say, is not announced
            await objects.put("broker/0/manifest/00000000000000000001.manifest", b"restored")
            with pytest.raises(Unavailable, match="broker/0 has a database but is not in"):
                await detector.look("backup", 1)
    finally:
        await channels.close()
        await directory.close()


async def test_messages_are_work_once_they_are_old_enough(tmp_path: Path) -> None:
    async with looked_at(tmp_path) as (detector, ingest, _, _):
        first = (await ingest.send(b"1"))[-1]
        now_ms = time.time_ns() // 1_000_000

        assert await probe(detector, now_ms) == {"report": {"ingest/0": first}}
        assert (await probe(detector, now_ms + HOUR_MS + 61_000)).keys() == {
            "retention",
            "report",
        }
        old = await probe(detector, now_ms + 7 * DAY_MS + 61_000)
        assert old["unreferenced"] == old["retention"] == {"ingest/0": first}

        # And newer ones are other evidence.
        later = (await ingest.send(b"2"))[-1]
        now_ms = time.time_ns() // 1_000_000
        newer = await detector.look("unreferenced", now_ms + 7 * DAY_MS + 61_000)
        assert newer == {"ingest/0": later}


async def test_with_a_replay_window_for_ever_nothing_is_unreferenced(tmp_path: Path) -> None:
    async with looked_at(tmp_path, Ages(0, 0, 0)) as (detector, ingest, _, _):
        await ingest.send(b"1")

        assert await detector.look("unreferenced", time.time_ns() // 1_000_000 + 99 * DAY_MS) == {}


async def test_objects_that_may_be_orphans_are_work_once_they_are_old_enough(
    tmp_path: Path,
) -> None:
    async with looked_at(tmp_path, Ages(0, 0, 60)) as (detector, _, _, _):
        blobs = Blobs(open_root(tmp_path.as_uri()))
        await blobs.put(b"an upload that was never committed")
        now_ms = time.time_ns() // 1_000_000

        assert await detector.look("unreferenced", now_ms) == {}
        assert await detector.look("unreferenced", now_ms + DAY_MS + 62_000) == {"objects": 1}


async def test_emptied_parts_of_the_archive_are_work_once_they_are_old_enough(
    tmp_path: Path,
) -> None:
    async with looked_at(tmp_path, Ages(0, 0, 60)) as (detector, _, _, _):
        objects = open_root(tmp_path.as_uri()).objects
        folder = f"{ARCHIVE_FOLDER}/queue=orders/day=2026-11-29"
        now_ms = time.time_ns() // 1_000_000
        old_ms = now_ms + DAY_MS + 62_000

        await objects.put(f"{folder}/part-000002.parquet", b"x" * EMPTY_BYTES)
        assert await detector.look("unreferenced", old_ms) == {}
        await objects.put(f"{folder}/part-000001.parquet", b"x" * (EMPTY_BYTES - 1))
        assert await detector.look("unreferenced", now_ms) == {}
        assert await detector.look("unreferenced", old_ms) == {"emptied": 1}


async def test_done_messages_are_work_once_one_of_them_may_be_past_its_retention(
    tmp_path: Path,
) -> None:
    async with looked_at(tmp_path) as (detector, _, rig, _):
        await rig.create("orders", done_retention_s=86_400)
        await rig.create("kept", done_retention_s=0)
        for queue in ("orders", "kept"):
            await rig.assign([1, 2], queue)
            claimed = await rig.claim(queue, max_messages=2)
            await rig.ack(*(one.lease_token for one in claimed))
        now_ms = rig.clock.now_ms()

        assert await detector.look("done", now_ms) == {}
        assert await detector.look("done", now_ms + DAY_MS + 61_000) == {"broker/0": 2}


async def test_dead_letters_are_work_for_the_archive_and_past_their_queues_retention(
    tmp_path: Path,
) -> None:
    async with looked_at(tmp_path) as (detector, _, rig, _):
        for queue, kept_s in (("kept", 0), ("orders", 3600)):
            await rig.create(queue, max_attempts=1, failed_retention_s=kept_s)
            await rig.assign([1], queue)
            await rig.nack((await rig.claim(queue))[0].lease_token, reason="no")
        now_ms = rig.clock.now_ms()

        assert await detector.look("dead-letters", now_ms) == {}
        assert await detector.look("dead-letters", now_ms + 3 * DAY_MS + 1000) == {"failed/0": 2}
        assert await detector.look("retention", now_ms + 60_000) == {}
        # One of the queue that keeps them for an hour; the other keeps them for ever.
        assert await detector.look("retention", now_ms + HOUR_MS + 62_000) == {"failed/0": 1}


async def test_while_a_shard_is_down_that_is_unknown(tmp_path: Path) -> None:
    async with looked_at(tmp_path) as (detector, _, _, directory):
        await directory.announce(Peer("broker", 7, "127.0.0.1:1"))
        await directory.announce(Peer("ingest", 7, "127.0.0.1:1"))

        for job in SCHEDULED:
            with pytest.raises(Unavailable, match=r"(broker|ingest) 7 is down"):
                await detector.look(job, 1000 * DAY_MS)


EVERY_SECOND = (
    *("--retention-schedule", "1s", "--unreferenced-schedule", "1s", "--done-schedule", "1s"),
    *("--dead-letters-schedule", "1s", "--report-schedule", "1s"),
    *("--schedule-jitter-s", "0", "--log-level", "debug"),
)


async def test_a_janitor_of_an_idle_instance_starts_no_java_and_stays_small(tmp_path: Path) -> None:
    # Given the janitor as it is, every job of which is due each second, and nothing to do
    data = tmp_path / "data"
    async with serving(data.as_uri()), running(data) as rig:
        await rig.create("orders")
        async with janitor(tmp_path, *EVERY_SECOND, own_jobs=False) as there:
            assert there.process is not None

            # When it has looked some times for every job
            def looks() -> int:
                assert there.started() == []
                said = there.log.read_text()
                return min(said.count(f"nothing to do for {job}") for job in WITH_EVIDENCE)

            await until(lambda: looks() >= 3)

            # Then it has started no process at all, and kept no run
            listed = await there.stub.ListRuns(janitor_pb2.ListRunsRequest())
            assert not listed.runs
            # Nor has it Spark in memory itself.
            most_kb, libraries = memory_of(there.process.pid)
            assert most_kb < 120_000
            assert "pyarrow" not in libraries
            there.signal(signal.SIGTERM)
            assert await there.ended() == 0


def memory_of(pid: int) -> tuple[int, str]:
    """The most memory that a process has had, in KiB, and the files that it has loaded."""
    folder = Path(f"/proc/{pid}")
    most = (folder / "status").read_text().partition("VmHWM:")[2]
    return int(most.split()[0]), (folder / "maps").read_text()


async def test_work_begins_a_run_by_the_schedule_and_the_same_work_no_other(tmp_path: Path) -> None:
    # Given an instance with a message, of which a report can be made
    data = tmp_path / "data"
    async with serving(data.as_uri()) as ingest, running(data) as rig:
        await rig.create("orders")
        sent = (await ingest.send(b"1"))[-1]
        async with janitor(tmp_path, *EVERY_SECOND) as there:

            async def runs() -> list[Run]:
                listed = await there.stub.ListRuns(janitor_pb2.ListRunsRequest())
                return [run for run in listed.runs if run.ended_at_ms]

            # When it is due, a run is begun, and not again for what was seen
            async with asyncio.timeout(WAIT_S):
                while not await runs():
                    await asyncio.sleep(0.05)
            await until(lambda: there.log.read_text().count("nothing to do for report") >= 2)
            (run,) = await runs()
            assert (run.request.job, run.state) == ("report", Run.STATE_DONE)
            assert run.trigger == Run.TRIGGER_SCHEDULE

            # But it is when there is something new
            assert (await ingest.send(b"2"))[-1] > sent
            async with asyncio.timeout(WAIT_S):
                while len(await runs()) < 2:
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--retention-schedule", "hourly", "retention_schedule: 'hourly' is neither"),
        ("--report-schedule", "99 * * * *", "report_schedule: '99 * * * *': Bad minute"),
        ("--spark-master", "mesos://x", "spark_master: 'mesos://x' is not a Spark master"),
        ("--spark-memory", "much", "spark_memory: 'much' must be a size such as 512m or 4g"),
        ("--runs-kept", "0", "must be at least 1"),
    ],
)
async def test_settings_that_mean_nothing_end_it_at_once(
    tmp_path: Path, flag: str, value: str, said: str
) -> None:
    there = Janitor(tmp_path, flag, value)

    assert await there.refused() == 2
    assert said in there.log.read_text()
