"""What the calls of a job's processes carry."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.storage.database.roots import open_root
from services.janitor.jobs.owners import owners_of
from slatemq.v1 import ingest_pb2, ingest_pb2_grpc
from tests.forms import proof
from tests.integration.janitor.runs.janitors import QUIET, Run, janitor, until
from tests.integration.router.peers import LogMemory, MemoryIngest

TRACE = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=1",
}


class Noting(MemoryIngest):
    """Notes the trace context of calls."""

    def __init__(self) -> None:
        super().__init__(LogMemory())
        self.seen: list[dict[str, Any]] = []

    async def GetLogStatus(  # noqa: N802
        self, request: ingest_pb2.GetLogStatusRequest, context: Any
    ) -> ingest_pb2.GetLogStatusResponse:
        metadata = dict(context.invocation_metadata())
        self.seen.append({name: metadata[name] for name in TRACE if name in metadata})
        return await super().GetLogStatus(request, context)


@pytest.mark.parametrize("context", [TRACE, {}])
async def test_calls_to_owners_carry_the_trace_context_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: dict[str, str]
) -> None:
    for name in TRACE:
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in context.items():
        monkeypatch.setenv(name.upper(), value)
    url, ingest, server = (tmp_path / "data").as_uri(), Noting(), grpc.aio.server()
    ingest_pb2_grpc.add_IngestServiceServicer_to_server(ingest, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    await TopologyDirectory(open_root(url).objects).announce(Peer("ingest", 0, address))

    def call() -> None:
        with owners_of(url) as owners:
            owners.call(
                "ingest",
                0,
                lambda channel: ingest_pb2_grpc.IngestServiceStub(channel).GetLogStatus,
                ingest_pb2.GetLogStatusRequest(),
            )

    await asyncio.to_thread(call)
    assert ingest.seen == [context]
    await server.stop(0)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["context", proof("traces")])
async def test_calls_of_a_run_and_of_its_spark_workers_are_in_the_trace_of_the_run(
    tmp_path: Path, job: str
) -> None:
    """What the janitor records goes nowhere: nothing listens there.

    The short form starts no Spark. That workers have the context of their driver, test_spark.py
    shows.
    """
    async with janitor(tmp_path, *QUIET, "--otlp-endpoint", "http://127.0.0.1:1") as there:
        runs = [await there.done(await there.run("report", one)) for one in (job, "context")]

        assert there.files() == []
        for run in runs:
            assert run.state == Run.STATE_DONE, run.error
            assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-0[13]", run.artifacts[0])
        (of_child, *of_workers), (of_other,) = (run.artifacts for run in runs)
        assert of_workers == [of_child] * (job == "traces")
        assert of_other.split("-")[1] != of_child.split("-")[1]


@pytest.mark.slow
async def test_log_lines_of_a_run_name_its_span_in_the_process_of_its_job_too(
    tmp_path: Path,
) -> None:
    arguments = ("--otlp-endpoint", "http://127.0.0.1:1", "--log-format", "json")
    async with janitor(tmp_path, *QUIET, *arguments) as there:
        run = await there.done(await there.run("report", "breaks"))
        assert run.state == Run.STATE_FAILED

        # The line of the job's process, and that of the janitor, name the same span.
        await until(lambda: "a run has ended" in there.log.read_text())
        lines = [json.loads(line) for line in there.log.read_text().splitlines()]
    (of_child,) = [line for line in lines if line["message"] == "the job failed"]
    (of_janitor,) = [line for line in lines if line["message"].startswith("a run has ended")]
    assert of_child["service"] == "janitor-spark"
    assert re.fullmatch("[0-9a-f]{32}", of_child["trace_id"])
    assert of_child["trace_id"] == of_janitor["trace_id"]
    assert of_child["span_id"] == of_janitor["span_id"]
