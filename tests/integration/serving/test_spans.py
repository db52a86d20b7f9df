"""Spans, durations and log lines of the calls that a server serves, and of those it refuses."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from io import StringIO
from typing import Any

import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from libs.serving.peers.channels import open_channel
from libs.serving.process.logs import JsonLines
from libs.serving.recording import recording
from libs.serving.requests import guard
from libs.serving.requests.doors import ServiceDoor
from libs.serving.requests.gate import Gate
from libs.serving.requests.guard import CallGuard
from libs.serving.telemetry import Telemetry
from slatemq import errors
from tests.integration.serving.echo_service import METHODS, NAME, EchoServicer
from tests.integration.serving.test_guard import KINDS, call, word

TRACE = "1" * 32


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def measures() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def telemetry(spans: InMemorySpanExporter, measures: InMemoryMetricReader) -> Telemetry:
    return recording("echo", "echo-0", SimpleSpanProcessor(spans), measures)


@pytest.fixture
def lines() -> Iterator[StringIO]:
    """What the guard logs, as JSON."""
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines("echo"))
    guard.log.addHandler(handler)
    yield stream
    guard.log.removeHandler(handler)


@asynccontextmanager
async def guarded_by(guard: CallGuard) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[guard])
    EchoServicer().add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def counted(measures: InMemoryMetricReader, calls: int) -> dict[tuple[str, str], int]:
    """How many calls there were, by method and status, once there were so many.

    A caller may know the end of its call before its server has counted it.
    """
    async with asyncio.timeout(60):
        while True:
            data: Any = measures.get_metrics_data()
            found = {
                (
                    point.attributes["rpc.method"],
                    point.attributes["rpc.response.status_code"],
                ): point.count
                for resource in (data.resource_metrics if data else ())
                for metric in resource.scope_metrics[0].metrics
                for point in metric.data.data_points
            }
            if sum(found.values()) >= calls:
                return found
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["uu", "us"])
async def test_a_call_is_a_span_under_the_callers(
    channel: grpc.aio.Channel,
    spans: InMemorySpanExporter,
    measures: InMemoryMetricReader,
    kind: str,
) -> None:
    make: Any = channel.unary_unary if kind == "uu" else channel.unary_stream
    method = make(METHODS[kind], StringValue.SerializeToString)
    metadata = (("traceparent", f"00-{TRACE}-{'2' * 16}-01"),)

    call = method(StringValue(value="hello"), metadata=metadata, timeout=60)
    _ = [answer async for answer in call] if kind == "us" else await call
    await call.code()

    (span,) = spans.get_finished_spans()
    assert span.name == f"test.Echo/{kind}"
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    data: Any = measures.get_metrics_data()
    (metric,) = data.resource_metrics[0].scope_metrics[0].metrics
    assert metric.name == "rpc.server.duration"
    assert dict(metric.data.data_points[0].attributes) == {
        "rpc.system": "grpc",
        "rpc.service": NAME,
        "rpc.method": kind,
        "rpc.response.status_code": "OK",
    }


async def test_a_failed_call_is_a_failed_span(
    channel: grpc.aio.Channel, spans: InMemorySpanExporter, measures: InMemoryMetricReader
) -> None:
    method: Any = channel.unary_unary(METHODS["uu"], StringValue.SerializeToString)

    with pytest.raises(grpc.aio.AioRpcError):
        await method(StringValue(value="refuse"))

    await counted(measures, 1)
    (span,) = spans.get_finished_spans()
    assert not span.status.is_ok


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_that_no_handler_gets_are_spans_and_counted_with_their_status(
    channel: grpc.aio.Channel,
    gate: Gate,
    spans: InMemorySpanExporter,
    measures: InMemoryMetricReader,
    kind: str,
) -> None:
    # When a request cannot be read, and when the gate is closed
    with pytest.raises(errors.InvalidArgument):
        await call(channel, kind, b"\xff\xff\xff")
    gate.close("NOT_SERVING", "the service is stopping")
    with pytest.raises(errors.Unavailable):
        await call(channel, kind, word("hello"))

    # Then both are in the metrics, and are failed spans
    assert await counted(measures, 2) == {(kind, "INVALID_ARGUMENT"): 1, (kind, "UNAVAILABLE"): 1}
    found = spans.get_finished_spans()
    assert {span.name for span in found} == {f"{NAME}/{kind}"}
    assert not any(span.status.is_ok for span in found)
    facts = [dict(span.attributes or {}) for span in found]
    assert [(one["rpc.response.status_code"], one["error.type"]) for one in facts] == [
        ("INVALID_ARGUMENT", "UNDECODABLE"),
        ("UNAVAILABLE", "NOT_SERVING"),
    ]


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_that_a_door_refuses_are_counted(
    gate: Gate, telemetry: Telemetry, measures: InMemoryMetricReader, kind: str
) -> None:
    guard = CallGuard(gate, telemetry).of_door(ServiceDoor("services"))
    async with guarded_by(guard) as channel:
        with pytest.raises(errors.PermissionDenied):
            await call(channel, kind, word("hello"))

        assert await counted(measures, 1) == {(kind, "PERMISSION_DENIED"): 1}


async def test_a_caller_makes_no_series_by_naming_methods_that_there_are_not(
    channel: grpc.aio.Channel, spans: InMemorySpanExporter, measures: InMemoryMetricReader
) -> None:
    for name in (f"/{NAME}/a", f"/{NAME}/b", "/grpc.health.v1.Health/c", "/slatemq.v1.Foo/d"):
        method: Any = channel.unary_unary(name)
        with pytest.raises(grpc.aio.AioRpcError):
            await method(b"", timeout=60)

    assert await counted(measures, 4) == {("_OTHER", "UNIMPLEMENTED"): 4}
    assert {span.name for span in spans.get_finished_spans()} == {"_OTHER"}


@pytest.mark.parametrize("kind", KINDS)
async def test_the_line_of_an_error_names_the_span_of_its_call(
    channel: grpc.aio.Channel,
    spans: InMemorySpanExporter,
    measures: InMemoryMetricReader,
    lines: StringIO,
    kind: str,
) -> None:
    with pytest.raises(errors.Internal):
        await call(channel, kind, word("fail"))

    await counted(measures, 1)
    (span,) = spans.get_finished_spans()
    line = json.loads(lines.getvalue())
    assert line["message"] == "unexpected error"
    assert span.context is not None
    assert line["trace_id"] == f"{span.context.trace_id:032x}"
    assert line["span_id"] == f"{span.context.span_id:016x}"
    (event,) = span.events
    assert (event.attributes or {})["exception.type"] == "RuntimeError"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_that_its_client_ends_is_cancelled_and_no_error(
    spans: InMemorySpanExporter,
    measures: InMemoryMetricReader,
    channel: grpc.aio.Channel,
    servicer: EchoServicer,
    kind: str,
) -> None:
    calling = asyncio.create_task(call(channel, kind, word("wait")))
    async with asyncio.timeout(60):
        await servicer.waiting.wait()
        calling.cancel()
        assert await counted(measures, 1) == {(kind, "CANCELLED"): 1}
    (span,) = spans.get_finished_spans()
    assert span.status.status_code is not StatusCode.ERROR
