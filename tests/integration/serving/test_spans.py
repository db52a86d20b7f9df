from typing import Any

import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.serving.recording import recording
from libs.serving.telemetry import Telemetry
from tests.integration.serving.echo_service import METHODS

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
    assert metric.data.data_points[0].attributes["rpc.method"] == kind


async def test_a_failed_call_is_a_failed_span(
    channel: grpc.aio.Channel, spans: InMemorySpanExporter
) -> None:
    method: Any = channel.unary_unary(METHODS["uu"], StringValue.SerializeToString)

    with pytest.raises(grpc.aio.AioRpcError):
        await method(StringValue(value="refuse"))

    (span,) = spans.get_finished_spans()
    assert not span.status.is_ok
