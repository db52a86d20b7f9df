"""The client's runs, asynchronous and synchronous, against a real janitor."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

import slatemq
import slatemq.sync
from slatemq._admin.janitor import JobRun, JobRunState
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from slatemq.v1 import janitor_pb2, janitor_pb2_grpc, topology_pb2_grpc
from tests.integration.broker.rig import running
from tests.integration.client.peers import Directory, refuse
from tests.integration.janitor.runs.janitors import QUIET, WAIT_S, Janitor, janitor, until
from tests.ports import free_ports


async def test_a_run_is_begun_waited_for_and_listed(tmp_path: Path) -> None:
    async with janitor(tmp_path) as there, slatemq.connect(there.address) as client:
        job_runs: list[JobRun] = []
        begun = await client.run_job("retention", dry_run=True, queue_ids=["quick"])
        run = await client.wait_job_run(begun, on_progress=job_runs.append)

        assert begun.state is JobRunState.WAITING
        assert (run.job, run.dry_run, run.queue_ids) == ("retention", True, ["quick"])
        assert (run.state, run.counts) == (
            JobRunState.DONE,
            {"messages_purged": 7, "messages_purged/orders": 4},
        )
        assert run.phases == [("looking", 500)]
        assert run.artifacts == ["reports/a.html"]
        assert not run.scheduled
        assert job_runs[-1] == run
        assert await client.get_job_run(run.run_id) == run
        assert [one async for one in client.list_job_runs()] == [run]
        assert [one async for one in client.list_job_runs("done")] == []
        assert (await client.topology()).janitors == {0: there.address}

        async def services() -> list[tuple[str, bool]]:
            return [(one.service, one.serving) for one in (await client.status()).services]

        async with asyncio.timeout(WAIT_S):
            while await services() != [("janitor", True)]:
                await asyncio.sleep(0.05)


async def test_the_options_of_each_job_arrive(tmp_path: Path) -> None:
    data = tmp_path / "data"
    async with (
        running(data) as rig,
        janitor(tmp_path) as there,
        slatemq.connect(there.address) as client,
    ):
        await rig.create("t")
        restore = await client.run_job(
            "restore", into="t", message_ids=[7], failed_from=1, failed_until=2
        )
        dead_letters = await client.run_job("dead-letters", older_than=60)
        report = await client.run_job("report", days=3)

        asked = (await there.get(restore.run_id)).request
        assert (asked.target_queue_id, list(asked.message_ids)) == ("t", [7])
        assert (asked.failed_from_ms, asked.failed_until_ms) == (1, 2)
        assert (await there.get(dead_letters.run_id)).request.older_than_s == 60
        assert (await there.get(report.run_id)).request.days == 3


async def test_a_report_is_read_for_as_long_as_it_is_kept(tmp_path: Path) -> None:
    page = "<!DOCTYPE html><title>Größe</title>".encode()
    async with janitor(tmp_path) as there, slatemq.connect(there.address) as client:
        run = await client.wait_job_run(await client.run_job("retention", queue_ids=["quick"]))
        with pytest.raises(NotFound) as refused:
            await client.read_report(run)
        assert refused.value.reason == "REPORT_NOT_FOUND"

        (tmp_path / "data" / "reports").mkdir()
        (tmp_path / "data" / "reports" / "a.html").write_bytes(page)

        assert await client.read_report(run.run_id) == page
        with pytest.raises(NotFound):
            await client.read_report("20260101-000000-000-report-abcdef")
        with pytest.raises(InvalidArgument):
            await client.read_report("../../etc/passwd")


async def test_refusals_are_the_clients_errors(tmp_path: Path) -> None:
    async with janitor(tmp_path) as there, slatemq.connect(there.address) as client:
        with pytest.raises(InvalidArgument) as refused:
            await client.run_job("sweep")
        assert refused.value.field == "job"
        with pytest.raises(InvalidArgument) as refused:
            await client.run_job("done", queue_ids="orders")
        assert refused.value.field == "queue_ids"
        with pytest.raises(InvalidArgument):
            await client.get_job_run(5)  # type: ignore[arg-type]
        with pytest.raises(NotFound):
            await client.get_job_run("20260101-000000-000-done-abcdef")

        run = await client.run_job("retention", queue_ids=["slow"])
        with pytest.raises(FailedPrecondition) as running:
            await client.run_job("retention")
        assert running.value.metadata["run_id"] == run.run_id
        await client.cancel_job_run(run)
        assert (await client.wait_job_run(run)).state is JobRunState.CANCELLED
        done = await client.wait_job_run(await client.run_job("done"))
        with pytest.raises(FailedPrecondition) as ended:
            await client.cancel_job_run(done)
        assert ended.value.reason == "RUN_ENDED"


async def test_a_watch_goes_on_with_the_next_janitor(tmp_path: Path) -> None:
    # Given a client that waits for a run
    place = ("--port", str(free_ports(1)[0]))
    async with (
        janitor(tmp_path, *QUIET, *place) as there,
        slatemq.connect(there.address, call_timeout=WAIT_S) as client,
    ):
        begun = await client.run_job("retention", queue_ids=["slow"])
        seen = asyncio.Event()
        waiting = asyncio.create_task(client.wait_job_run(begun, on_progress=lambda _: seen.set()))
        await seen.wait()

        # When the janitor dies, and another takes its place
        there.signal(signal.SIGKILL)
        await there.ended()
        successor = Janitor(tmp_path, *QUIET, *place)
        await successor.start()
        try:
            # Then it gets what became of it
            assert (await waiting).state is JobRunState.INTERRUPTED
        finally:
            await successor.close()


CALL_S = 0.5

RUN_ID = "20260101-000000-000-retention-abcdef"


class Breaking(janitor_pb2_grpc.JanitorServiceServicer):
    """Breaks the first watch after its first answer; the next one has the end."""

    def __init__(self) -> None:
        self.may_break = asyncio.Event()

    async def WatchRun(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        run = janitor_pb2.Run(run_id=request.run_id, state=janitor_pb2.Run.STATE_RUNNING)
        if self.may_break.is_set():
            run.state, run.ended_at_ms = janitor_pb2.Run.STATE_DONE, 1
        yield janitor_pb2.WatchRunResponse(run=run)
        await self.may_break.wait()
        await refuse(context, Unavailable("the janitor is stopping"))


async def test_a_watch_outlives_a_break_after_a_quiet_spell_longer_than_a_call() -> None:
    breaking, directory, server = Breaking(), Directory(), grpc.aio.server()  # type: ignore[abstract]
    topology_pb2_grpc.add_TopologyServiceServicer_to_server(directory, server)
    janitor_pb2_grpc.add_JanitorServiceServicer_to_server(breaking, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    directory.put("janitors", 0, address)
    await server.start()
    async with slatemq.connect(address, call_timeout=CALL_S) as client:
        # Given a watch that has waited for a change for longer than a call may take
        watch = client.watch_job_run(RUN_ID)
        assert (await anext(watch)).state is JobRunState.RUNNING
        change = asyncio.create_task(anext(watch))
        quiet_until = time.monotonic() + CALL_S
        await until(lambda: time.monotonic() > quiet_until)

        # When it breaks
        breaking.may_break.set()

        # Then it goes on
        assert (await change).state is JobRunState.DONE
        assert [run async for run in watch] == []
    await server.stop(None)


async def test_without_a_janitor_it_is_unavailable(tmp_path: Path) -> None:
    async with janitor(tmp_path) as there:
        client = slatemq.connect(there.address, call_timeout=0.5)
        async with client:
            there.signal(signal.SIGKILL)
            await there.ended()
            with pytest.raises(Unavailable):
                await client.run_job("retention")


async def test_the_synchronous_face_has_the_same(tmp_path: Path) -> None:
    def work(address: str) -> None:
        with slatemq.sync.connect(address) as client:
            run = client.wait_job_run(client.run_job("retention", queue_ids=["quick"]))
            assert run.state is JobRunState.DONE
            assert client.get_job_run(run) == run
            assert list(client.list_job_runs("retention")) == [run]
            slow = client.run_job("done", queue_ids=["slow"])
            states = []
            for one in client.watch_job_run(slow):
                if one.state is JobRunState.RUNNING:
                    client.cancel_job_run(slow)
                states.append(one.state)
            assert states[-1] is JobRunState.CANCELLED

    async with janitor(tmp_path) as there:
        await asyncio.to_thread(work, there.address)
