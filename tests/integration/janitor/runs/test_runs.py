"""JanitorService: runs in a real janitor process, each in a child of its own, through kills."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.storage.database.roots import open_root
from services.janitor.runs.history import RunStore
from services.janitor.snapshots import SnapshotName
from slatemq.v1 import janitor_pb2, queue_pb2
from tests.forms import proof
from tests.integration.broker.rig import refusal, running
from tests.integration.ingest.server import serving
from tests.integration.janitor.runs.janitors import QUIET, WAIT_S, Janitor, Run, janitor, until
from tests.integration.janitor.spark.test_taking import alive

Request = janitor_pb2.RunJobRequest

ENDS_S = 40
"""Within it everything cancelled has ended; a job that is not cancelled works for longer."""


async def test_a_run_is_begun_watched_and_kept(tmp_path: Path) -> None:
    # Given a janitor
    async with janitor(tmp_path) as there:
        # When a job is run
        run_id = await there.run("retention", "quick", dry_run=True)
        run = await there.done(run_id)

        # Then its end, and all that it reported, is there to be read
        assert run.state == Run.STATE_DONE
        assert run.request == Request(job="retention", queue_ids=["quick"], dry_run=True)
        assert run.trigger == Run.TRIGGER_REQUEST
        assert dict(run.counts) == {"messages_purged": 7, "messages_purged/orders": 4}
        assert list(run.artifacts) == ["reports/a.html"]
        assert [(one.phase, one.took_ms) for one in run.phases] == [("looking", 500)]
        assert run.progress.phase == "removing"
        assert run.created_at_ms <= run.started_at_ms <= run.ended_at_ms
        assert await there.get(run_id) == run
        assert "words on stdout" in there.log.read_text()
        assert not there.started()
        assert there.files() == []

        there.signal(signal.SIGTERM)
        assert await there.ended() == 0

    # And by the next janitor, too
    async with janitor(tmp_path) as there:
        assert await there.get(run_id) == run


async def test_what_a_job_writes_is_named_by_its_run(tmp_path: Path) -> None:
    async with janitor(tmp_path) as there:
        run = await there.done(await there.run("report", "named"))

        assert list(run.artifacts) == [f"reports/{run.run_id}/report.html"]


@pytest.mark.parametrize(
    ("job", "end"), [("removes", Run.STATE_DONE), ("removes-and-dies", Run.STATE_FAILED)]
)
async def test_what_a_run_asks_of_the_store_counts_as_the_janitors_own(
    tmp_path: Path, job: str, end: Run.State.ValueType
) -> None:
    async with janitor(tmp_path, *QUIET, "--http-port", "0") as there:
        assert await removals(there) == 0

        run = await there.done(await there.run("done", job))

        assert run.state == end
        async with asyncio.timeout(WAIT_S):
            while (count := await removals(there)) < 100:  # metrics may be a second old
                await asyncio.sleep(0.1)
        assert count == 100


async def removals(there: Janitor) -> float:
    """Requests to remove small objects, as the metrics of the janitor have it."""
    async with (
        ClientSession(f"http://{there.http_address}") as session,
        session.get("/metrics") as answer,
    ):
        text = await answer.text()
    (line,) = [
        line
        for line in text.splitlines()
        if line.startswith("slatemq_store_requests_total{")
        and 'client="objects"' in line
        and 'request="delete"' in line
    ]
    return float(line.rpartition(" ")[2])


FAULTS = {
    "fails": "broker 0 is down",
    "breaks": "ValueError: a fault",
    "dies": "Spark's process ended (-9)",
    "babbles": "a fault of the janitor: TypeError: Progress.__init__() got an unexpected",
}


async def test_a_job_that_fails_shows_why_and_the_next_is_run(tmp_path: Path) -> None:
    async with janitor(tmp_path) as there:
        for job, error in FAULTS.items():
            run = await there.done(await there.run("done", job))
            assert (run.state, run.error[: len(error)]) == (Run.STATE_FAILED, error)

        again = await there.done(await there.run("done", "quick"))

    assert again.state == Run.STATE_DONE


async def test_queues_that_do_not_exist_are_refused_before_anything_begins(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with serving(data.as_uri()), running(data) as rig, janitor(tmp_path) as there:
        await rig.create("orders")
        run_id = await there.run("done", "orders", request_id="first")
        await there.done(run_id)

        for request in (
            Request(job="done", queue_ids=["orders", "oders"]),
            Request(job="restore", queue_ids=["orders"], target_queue_id="oders"),
        ):
            _, *result = await refusal(there.stub.RunJob(request))
            assert result == ["QUEUE_NOT_FOUND", "queue 'oders' does not exist"]

        # A repeated request has its run, also when the queue is gone
        await rig.queues.DeleteQueue(queue_pb2.DeleteQueueRequest(queue_id="orders"))
        assert await there.run("done", "orders", request_id="first") == run_id
        assert (await refusal(there.run("done", "orders")))[1] == "QUEUE_NOT_FOUND"

        directory = TopologyDirectory(open_root(data.as_uri()).objects)
        await directory.announce(Peer("broker", 7, "127.0.0.1:1"))
        assert "broker 7 is down: " in (await refusal(there.run("done", "orders")))[2]
        listed = await there.stub.ListRuns(janitor_pb2.ListRunsRequest())
        assert [run.run_id for run in listed.runs] == [run_id]


@pytest.mark.parametrize("job", ["slow", "stubborn"])
async def test_a_cancelled_run_ends_within_seconds(tmp_path: Path, job: str) -> None:
    async with janitor(tmp_path) as there:
        run_id = await there.run("retention", job)
        await there.under_way(run_id)

        cancelled = await there.cancel(run_id)
        async with asyncio.timeout(ENDS_S):
            run = await there.done(run_id)

        assert cancelled.state == Run.STATE_CANCELLING
        assert (run.state, run.error) == (Run.STATE_CANCELLED, "")
        assert not there.started()
        assert (await there.cancel(run_id)).state == Run.STATE_CANCELLED


async def test_runs_of_other_jobs_wait_their_turn_and_can_be_cancelled_meanwhile(
    tmp_path: Path,
) -> None:
    async with janitor(tmp_path) as there:
        first = await there.run("retention", "slow")
        await there.under_way(first)
        second = await there.run("done", "quick")
        third = await there.run("report", "quick")
        assert (await there.get(second)).state == Run.STATE_WAITING

        await there.cancel(third)
        assert (await there.done(third)).state == Run.STATE_CANCELLED
        assert (await there.get(second)).state == Run.STATE_WAITING
        await there.cancel(first)
        assert (await there.done(second)).state == Run.STATE_DONE

        listed = await there.stub.ListRuns(janitor_pb2.ListRunsRequest())
        assert [run.run_id for run in listed.runs] == [third, second, first]


async def test_a_job_is_not_run_twice_at_once_and_a_repeated_request_gets_its_run(
    tmp_path: Path,
) -> None:
    async with janitor(tmp_path) as there, janitor(tmp_path, "--shard", "1", *QUIET) as other:
        run_id = await there.run("retention", "slow", request_id="mine")
        await there.under_way(run_id)

        for one in (there, other):
            assert (await refusal(one.run("retention", "quick")))[1] == "JOB_RUNNING"
            assert await one.run("retention", "slow", request_id="mine") == run_id

        # The other can look at it, watch it, and end it.
        assert (await other.get(run_id)).state == Run.STATE_RUNNING
        await other.cancel(run_id)
        assert (await other.done(run_id)).state == Run.STATE_CANCELLED
        assert await there.run("retention", "quick", request_id="mine") == run_id


async def test_a_stopped_janitor_ends_its_runs_first(tmp_path: Path) -> None:
    async with janitor(tmp_path, *QUIET, "--drain-ms", "60000") as there:
        run_id = await there.run("retention", "stubborn")
        waiting = await there.run("done", "quick")
        await there.under_way(run_id)
        begun = asyncio.Event()

        def has_ended(run: Run) -> bool:
            begun.set()
            return run.ended_at_ms > 0

        watched = asyncio.create_task(there.watched(run_id, has_ended))
        await begun.wait()

        there.signal(signal.SIGTERM)
        assert (await watched).state == Run.STATE_INTERRUPTED
        assert await there.ended() == 0
        assert not there.started()

    async with janitor(tmp_path) as there:
        for one in (run_id, waiting):
            run = await there.get(one)
            assert (run.state, run.error) == (Run.STATE_INTERRUPTED, "its janitor was stopped")


async def test_a_killed_janitor_leaves_no_process_and_its_successor_says_interrupted(
    tmp_path: Path,
) -> None:
    # Given a run that would never end by itself
    async with janitor(tmp_path) as there:
        run_id = await there.run("retention", "stubborn")
        await there.under_way(run_id)

        # When its janitor is killed
        there.signal(signal.SIGKILL)
        await there.ended()

        # Then the child is gone, too
        await until(lambda: not there.started())
        assert there.files()

    # And the next janitor removes its files, knows of it, and runs the job again
    async with janitor(tmp_path) as there:
        assert there.files() == []
        run = await there.get(run_id)
        assert run.state == Run.STATE_INTERRUPTED
        assert "died" in run.error
        assert (await there.done(await there.run("retention", "quick"))).state == Run.STATE_DONE


async def test_a_janitor_that_was_replaced_ends_its_run(tmp_path: Path) -> None:
    async with janitor(tmp_path) as older:
        run_id = await older.run("retention", "slow")
        await older.under_way(run_id)
        async with janitor(tmp_path) as newer:
            assert (await newer.get(run_id)).state == Run.STATE_INTERRUPTED
            # At its next heartbeat
            await until(lambda: not older.started())
            assert (await newer.get(run_id)).state == Run.STATE_INTERRUPTED


async def test_the_history_is_listed_in_pages_and_pruned(tmp_path: Path) -> None:
    async with janitor(tmp_path, *QUIET, "--runs-kept", "3") as there:
        ids = []
        for job in ("retention", "done", "retention", "done", "report"):
            ids.append(await there.run(job, "quick"))
            await there.done(ids[-1])
        store = RunStore(open_root((tmp_path / "data").as_uri()).objects)
        async with asyncio.timeout(ENDS_S):
            while len(await store.ids()) > 3:
                await asyncio.sleep(0.05)

        page = await there.stub.ListRuns(janitor_pb2.ListRunsRequest(page_size=2))
        assert [run.run_id for run in page.runs] == [ids[4], ids[3]]
        rest = await there.stub.ListRuns(
            janitor_pb2.ListRunsRequest(page_size=2, page_token=page.next_page_token)
        )
        assert ([run.run_id for run in rest.runs], rest.next_page_token) == ([ids[2]], "")
        of_job = await there.stub.ListRuns(janitor_pb2.ListRunsRequest(job="done"))
        assert [run.run_id for run in of_job.runs] == [ids[3]]


ID = "20260101-000000-000-retention-abcdef"

BAD_LETTERS: list[tuple[str, dict[str, Any]]] = [
    ("queue_id", {"queue_id": ""}),
    ("queue_id", {"queue_id": "a/b"}),
    ("handles", {"handles": ["q/1/f1"] * 1001}),
    ("handles[1]", {"handles": ["q/1/f1", "other/1/f1"]}),
    ("archived_from_ms", {"archived_from_ms": -1}),
    ("archived_until_ms", {"archived_until_ms": 1 << 48}),
    ("archived_until_ms", {"archived_from_ms": 5, "archived_until_ms": 5}),
    ("max_entries", {"max_entries": -1}),
    ("max_entries", {"handles": ["q/1/f1"], "max_entries": 1}),
    ("newest_first", {"handles": ["q/1/f1"], "newest_first": True}),
]

BAD: list[tuple[str, Any, str, str]] = [
    ("RunJob", Request(), "job", "INVALID_FIELD"),
    ("RunJob", Request(job="sweep"), "job", "INVALID_FIELD"),
    ("RunJob", Request(job="done", queue_ids=["a", "b/c"]), "queue_ids[1]", "INVALID_FIELD"),
    ("RunJob", Request(job="done", queue_ids=["q"] * 1001), "queue_ids", "INVALID_FIELD"),
    ("RunJob", Request(job="unreferenced", queue_ids=["q"]), "queue_ids", "INVALID_FIELD"),
    ("RunJob", Request(job="done", older_than_s=1), "older_than_s", "INVALID_FIELD"),
    ("RunJob", Request(job="dead-letters", older_than_s=-1), "older_than_s", "OUT_OF_RANGE"),
    ("RunJob", Request(job="dead-letters", older_than_s=1 << 32), "older_than_s", "OUT_OF_RANGE"),
    ("RunJob", Request(job="done", days=1), "days", "INVALID_FIELD"),
    ("RunJob", Request(job="report", days=-1), "days", "OUT_OF_RANGE"),
    ("RunJob", Request(job="report", days=3661), "days", "OUT_OF_RANGE"),
    ("RunJob", Request(job="done", target_queue_id="q"), "target_queue_id", "INVALID_FIELD"),
    ("RunJob", Request(job="restore", target_queue_id="q q"), "target_queue_id", "INVALID_FIELD"),
    ("RunJob", Request(job="done", message_ids=[1]), "message_ids", "INVALID_FIELD"),
    ("RunJob", Request(job="restore", message_ids=[1, 0]), "message_ids[1]", "OUT_OF_RANGE"),
    ("RunJob", Request(job="restore", message_ids=[1] * 10_001), "message_ids", "INVALID_FIELD"),
    ("RunJob", Request(job="done", failed_from_ms=1), "failed_from_ms", "INVALID_FIELD"),
    ("RunJob", Request(job="restore", failed_from_ms=-1), "failed_from_ms", "OUT_OF_RANGE"),
    (
        "RunJob",
        Request(job="restore", failed_from_ms=2, failed_until_ms=2),
        "failed_until_ms",
        "INVALID_FIELD",
    ),
    ("RunJob", Request(job="done", request_id="é" * 65), "request_id", "INVALID_FIELD"),
    ("GetRun", janitor_pb2.GetRunRequest(), "run_id", "INVALID_FIELD"),
    ("GetRun", janitor_pb2.GetRunRequest(run_id="../../x"), "run_id", "INVALID_FIELD"),
    ("CancelRun", janitor_pb2.CancelRunRequest(run_id="x"), "run_id", "INVALID_FIELD"),
    ("ListRuns", janitor_pb2.ListRunsRequest(job="x"), "job", "INVALID_FIELD"),
    ("ListRuns", janitor_pb2.ListRunsRequest(page_size=-1), "page_size", "OUT_OF_RANGE"),
    ("ListRuns", janitor_pb2.ListRunsRequest(page_token="x"), "page_token", "INVALID_PAGE_TOKEN"),
    ("GetRun", janitor_pb2.GetRunRequest(run_id=ID), f"run '{ID}' does not exist", "RUN_NOT_FOUND"),
    (
        "CancelRun",
        janitor_pb2.CancelRunRequest(run_id=ID),
        f"run '{ID}' does not exist",
        "RUN_NOT_FOUND",
    ),
]


async def test_what_makes_no_sense_is_refused_by_name_and_begins_nothing(tmp_path: Path) -> None:
    async with janitor(tmp_path) as there:
        for method, request, field, reason in BAD:
            _, *result = await refusal(getattr(there.stub, method)(request))
            assert result == [reason, field], request
        for field, fields in BAD_LETTERS:
            asked = janitor_pb2.ReadArchivedRequest(**{"queue_id": "q"} | fields)
            stream = there.stub.ReadArchived(asked)
            assert (await refusal(anext(aiter(stream))))[2] == field, asked
        stream = there.stub.WatchRun(janitor_pb2.WatchRunRequest(run_id="x"))
        assert (await refusal(anext(aiter(stream))))[2] == "run_id"

        run_id = await there.run("done", "quick")
        await there.done(run_id)
        assert (await refusal(there.cancel(run_id)))[1] == "RUN_ENDED"
        listed = await there.stub.ListRuns(janitor_pb2.ListRunsRequest())
        assert len(listed.runs) == 1


async def test_no_request_chooses_where_spark_runs_or_what_it_reads(tmp_path: Path) -> None:
    # Given a request with every field that it may have, and one that names a master as field 3
    request = Request(
        job="restore",
        dry_run=True,
        queue_ids=["states"],
        message_ids=[7],
        failed_from_ms=1,
        failed_until_ms=2,
        request_id="spark://127.0.0.1:1",
    )
    stranger = Request.FromString(
        Request(job="done", queue_ids=["states"]).SerializeToString()
        + b"\x1a\x13spark://127.0.0.1:1"
    )

    async with janitor(tmp_path, *QUIET, "--spark-master", "local[1]") as there:
        for asked in (request, stranger):
            begun = await there.stub.RunJob(asked)
            fields = dict(
                one.split("=", 1) for one in (await there.done(begun.run.run_id)).artifacts
            )

            # Then all but what it names is the janitor's own
            assert fields["root"] == (tmp_path / "data").as_uri()
            assert fields["master"] == "local[1]"
            assert fields["memory"] == "1g"
            assert fields["spark"] == "{}"
            assert fields["run"] == begun.run.run_id
    assert set(Request.DESCRIPTOR.fields_by_name) == {
        *("job", "dry_run", "queue_ids", "older_than_s", "days", "target_queue_id"),
        *("message_ids", "failed_from_ms", "failed_until_ms", "request_id", "sizes_only"),
    }


@pytest.mark.slow  # starts Spark
@pytest.mark.parametrize(
    ("job", "end"),
    [
        ("spark-stubborn", "kill"),
        proof("spark", "cancel"),
        proof("spark-stubborn", "cancel"),
        proof("spark", "stop"),
    ],
)
async def test_java_is_gone_seconds_after_the_end_and_so_are_its_files_and_snapshots(
    tmp_path: Path, job: str, end: str
) -> None:
    """Of four ends the short form has the one that leaves most behind."""
    # Given a run in the middle of its work, with Java and snapshots of both shards
    data = tmp_path / "data"
    drain = (*QUIET, "--drain-ms", "60000")  # An owner may be slow to release a snapshot.
    async with serving(data.as_uri()), running(data) as rig, janitor(tmp_path, *drain) as there:
        await rig.create("orders")
        assert not there.started()
        run_id = await there.run("retention", job)
        assert (await there.under_way(run_id)).progress.phase == "1 queues"
        assert there.started("java")
        (folder,) = there.files()
        assert {"artifacts", "blockmgr", "spark"} <= {
            name.split("-")[0] for name in os.listdir(there.temporary / folder)
        }
        store = RunStore(open_root(data.as_uri()).objects)
        async with asyncio.timeout(ENDS_S):
            while len(names := (await store.get(run_id)).run.snapshots) < 2:
                await asyncio.sleep(0.05)

        # When it is cancelled, stopped with its janitor, or its janitor is killed
        if end == "cancel":
            await there.cancel(run_id)
        else:
            there.signal(signal.SIGTERM if end == "stop" else signal.SIGKILL)

        # Then nothing is left of it within seconds
        await until(lambda: not there.started(), ENDS_S)
        if end == "cancel":
            assert (await there.done(run_id)).state == Run.STATE_CANCELLED
        else:
            await there.ended()
        if end == "kill":
            # Its successor releases what it has left, and removes its files.
            async with janitor(tmp_path) as successor:
                assert (await successor.get(run_id)).state == Run.STATE_INTERRUPTED
        assert there.files() == []
        root = open_root(data.as_uri())
        assert await alive(root, [SnapshotName(*name) for name in names]) == [False, False]
