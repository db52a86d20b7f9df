"""What a real stack sends to a collector: one trace from a publish to the janitor's run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import pytest
from aiohttp import ClientSession
from opentelemetry import trace
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider

import slatemq
from services.scaler.stubs.externalscaler_pb2 import ScaledObjectRef
from services.scaler.stubs.externalscaler_pb2_grpc import ExternalScalerStub
from slatemq.errors import FailedPrecondition
from tests.acceptance.local_stack import LocalStack
from tests.forms import proof
from tests.integration.lone_service import running

pytestmark = [pytest.mark.stack, pytest.mark.slow]

WAIT_S = 60.0


class Exported(NamedTuple):
    """A span as the collector got it."""

    service: str
    name: str
    span_id: bytes
    parent_id: bytes


class Collector(
    trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer
):
    """Takes traces and metrics over OTLP, and keeps the spans by trace."""

    def __init__(self) -> None:
        self.spans: dict[bytes, list[Exported]] = {}
        self.metrics: set[str] = set()

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - both services have it
        if isinstance(request, metrics_service_pb2.ExportMetricsServiceRequest):
            self.metrics.update(
                metric.name
                for resource in request.resource_metrics
                for scope in resource.scope_metrics
                for metric in scope.metrics
            )
            return metrics_service_pb2.ExportMetricsServiceResponse()
        for resource in request.resource_spans:
            facts = {one.key: one.value.string_value for one in resource.resource.attributes}
            service = facts["service.name"].removeprefix("slatemq-")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    found = Exported(service, span.name, span.span_id, span.parent_span_id)
                    self.spans.setdefault(span.trace_id, []).append(found)
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """A collector, and its URL."""
    collector, server = Collector(), grpc.aio.server()
    adders: list[Any] = [
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server,
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server,
    ]
    for add in adders:
        add(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Iterator[trace.Tracer]:
    """The program's own."""
    provider = TracerProvider(shutdown_on_exit=False)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield provider.get_tracer("program")
    provider.shutdown()


@pytest.mark.parametrize("whole_run", [False, proof(True)])
async def test_one_trace_shows_publish_route_assign_claim_ack_and_the_janitors_run(
    tmp_path: Path, tracer: trace.Tracer, monkeypatch: pytest.MonkeyPatch, whole_run: bool
) -> None:
    # Given a stack that sends its spans to a collector
    async with collecting() as (collector, url):
        monkeypatch.setenv("SLATEMQ_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1000")
        stack = await asyncio.to_thread(LocalStack, tmp_path, ready=True)
        try:
            # When a program does all that within one span
            with tracer.start_as_current_span("order") as span:
                await _work(stack.endpoint, whole_run)
            trace_id = span.get_span_context().trace_id.to_bytes(16, "big")

            # Then the services' spans are in its trace, each below the one that caused it
            wanted = {
                ("ingest", "publish"),
                ("router", "route"),
                ("broker", "slatemq.v1.AssignmentService/Assign"),
                ("broker", "slatemq.v1.ConsumerService/Claim"),
                ("broker", "slatemq.v1.ConsumerService/Ack"),
                ("janitor", "slatemq.v1.JanitorService/RunJob"),
                ("janitor", "janitor report"),
            }
            if whole_run:  # What its child process, which has Spark, asks of the owners.
                wanted |= {("ingest", SNAPSHOT), ("broker", SNAPSHOT)}
            end_s = time.monotonic() + WAIT_S
            while missing := wanted - _names(collector.spans.get(trace_id, ())):
                assert time.monotonic() < end_s, (missing, sorted(_names(_all(collector))))
                await asyncio.sleep(0.1)
            spans = collector.spans[trace_id]
            # (what is published and what is routed, below the program's own span of the publish)
            made = {one.parent_id for one in spans if one.name in ("publish", "route")}
            assert len(made) == 1
            assert _parent(spans, "broker", "slatemq.v1.AssignmentService/Assign") == (
                "router",
                "route",
            )
            assert _parent(spans, "janitor", "janitor report") == (
                "janitor",
                "slatemq.v1.JanitorService/RunJob",
            )
            # And metrics come the same way
            async with asyncio.timeout(WAIT_S):
                while "slatemq.commit.duration" not in collector.metrics:
                    await asyncio.sleep(0.1)
        finally:
            await asyncio.to_thread(stack.close)


async def test_one_trace_shows_what_a_page_and_keda_have_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a stack with its console, and a scaler, that send their spans to a collector
    async with collecting() as (collector, url):
        monkeypatch.setenv("SLATEMQ_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        stack = await asyncio.to_thread(LocalStack, tmp_path, ready=True)
        try:
            async with slatemq.connect(stack.endpoint) as client:
                await client.create_queue("orders")

            # When KEDA asks, within a trace of its own, and a person opens a page
            async with (
                running("scaler", tmp_path, "--endpoint", stack.endpoint) as addresses,
                grpc.aio.insecure_channel(addresses["address"]) as channel,
            ):
                stub: Any = ExternalScalerStub(channel)
                reference = ScaledObjectRef(scalerMetadata={"queue": "orders", "target": "1"})
                metadata = (("traceparent", f"00-{KEDAS_TRACE.hex()}-{'b' * 16}-01"),)
                await stub.IsActive(reference, metadata=metadata, timeout=WAIT_S)
                pushed = stub.StreamIsActive(reference, metadata=metadata, timeout=WAIT_S)
                assert (await pushed.read()).result is False
                pushed.cancel()
            theirs = {"traceparent": f"00-{BROWSERS_TRACE.hex()}-{'b' * 16}-01"}
            url = f"{stack.console}/queue?queue=orders"
            async with ClientSession() as session, session.get(url, headers=theirs) as answer:
                assert answer.status == 200

            # Then the broker's span is below each, and what samples the instance is in neither
            read = ("broker", "slatemq.v1.QueueService/GetQueue")
            call = ("scaler", "externalscaler.ExternalScaler/IsActive")
            stream = ("scaler", "externalscaler.ExternalScaler/StreamIsActive")
            spans = await _until(lambda: collector.spans.get(KEDAS_TRACE), call, stream, read)
            assert _parent(spans, *read) == call
            page = ("console", "GET /queue")
            spans = await _until(lambda: _trace_of(collector, page), page, read)
            assert _parent(spans, *read) == page
            assert ("broker", "slatemq.v1.QueueService/ListQueues") not in _names(spans)
            # And a browser does not choose the trace
            assert BROWSERS_TRACE not in collector.spans
        finally:
            await asyncio.to_thread(stack.close)


async def _until(
    spans: Callable[[], Sequence[Exported] | None], *wanted: tuple[str, str]
) -> Sequence[Exported]:
    """The spans of a trace, once it has these."""
    async with asyncio.timeout(WAIT_S):
        while not {*wanted} <= _names(found := spans() or ()):
            await asyncio.sleep(0.1)
    return found


def _trace_of(collector: Collector, span: tuple[str, str]) -> Sequence[Exported] | None:
    """The spans of the trace that has this one."""
    return next((one for one in collector.spans.values() if span in _names(one)), None)


KEDAS_TRACE = bytes.fromhex("a" * 32)
BROWSERS_TRACE = bytes.fromhex("c" * 32)

SNAPSHOT = "slatemq.v1.SnapshotService/CreateSnapshot"


async def _work(endpoint: str, whole_run: bool) -> None:
    async with slatemq.connect(endpoint, tracing=True) as client:
        await client.create_queue("orders")
        await client.publish("x", {"queue": "orders"})
        (message,) = await client.claim("orders", wait=30)
        assert await client.ack([message.lease_token]) == [None]
        run = await client.run_job("report")
        async for seen in client.watch_job_run(run.run_id):
            if seen.progress is not None and not whole_run:
                with suppress(FailedPrecondition):  # It may have ended since.
                    await client.cancel_job_run(run.run_id)
            run = seen
        assert run.state == "done" or (run.state == "cancelled" and not whole_run), run.error


def _all(collector: Collector) -> list[Exported]:
    return [span for spans in collector.spans.values() for span in spans]


def _names(spans: Sequence[Exported]) -> set[tuple[str, str]]:
    return {(span.service, span.name) for span in spans}


def _parent(spans: Sequence[Exported], service: str, name: str) -> tuple[str, str]:
    """Which span is above this one; a call that was refused was sent again from another one."""
    above = {one.parent_id for one in spans if (one.service, one.name) == (service, name)}
    (parent,) = {(one.service, one.name) for one in spans if one.span_id in above}
    return parent
