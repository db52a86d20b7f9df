"""Spans and metrics of the client, as a program's own OpenTelemetry gets them."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc.aio
import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import slatemq
from tests.integration.client.peers import Instance


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    yield reader
    provider.shutdown()


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def named(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    (found,) = [span for span in spans.get_finished_spans() if span.name == name]
    return found


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_message_is_traced_from_its_publish_to_its_ack(
    spans: InMemorySpanExporter, measures: InMemoryMetricReader
) -> None:
    async with (
        Instance() as instance,
        slatemq.connect(instance.endpoint, tracing=True) as client,
    ):
        # When a message is published, consumed and acked
        await client.publish(b"x", {"a": "b"})
        (headers,) = instance.ingest.headers
        instance.broker.available.append((b"x", 0))
        real = instance.broker._claim

        def with_headers(count: int, size_bytes: int | None = None) -> Any:
            claimed = real(count, size_bytes)
            for one in claimed:
                one.message.headers.update(headers)
            return claimed

        instance.broker._claim = with_headers  # type: ignore[method-assign]
        async with client.consume("q") as messages, await anext(messages) as message:
            current = trace.get_current_span().get_span_context().span_id
            await message.ack()

    # Then the publish's context travelled in the headers
    publish, receive = named(spans, "publish"), named(spans, "receive q")
    process, ack = named(spans, "process q"), named(spans, "ack q")
    assert publish.kind is trace.SpanKind.PRODUCER
    assert publish.context is not None
    assert headers["a"] == "b"
    assert f"{publish.context.span_id:016x}" in headers["traceparent"]
    # and receiving and processing link to it
    for span, kind in ((receive, trace.SpanKind.CLIENT), (process, trace.SpanKind.CONSUMER)):
        assert span.kind is kind
        assert [link.context.span_id for link in span.links] == [publish.context.span_id]
    assert process.context is not None
    assert process.context.span_id == current
    assert ack.parent is not None
    assert ack.parent.span_id == current
    assert attributes(ack)["messaging.operation.type"] == "settle"
    assert set(attributes(process).items()) >= {
        ("messaging.system", "slatemq"),
        ("messaging.destination.name", "q"),
        ("messaging.message.body.size", 1),
    }

    # and the metrics have the conventions' names
    data: Any = measures.get_metrics_data()
    result = {m.name for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert result == {
        "messaging.client.sent.messages",
        "messaging.client.consumed.messages",
        "messaging.client.operation.duration",
        "messaging.process.duration",
    }


async def test_failures_are_marked_and_batches_counted(spans: InMemorySpanExporter) -> None:
    async with (
        Instance() as instance,
        slatemq.connect(instance.endpoint, tracing=True) as client,
    ):
        await client.publish_many([b"1", b"2", b"3"])
        instance.broker.available.append((b"x", 0))
        with pytest.raises(ValueError, match="bad"):
            async with client.consume("q") as messages, await anext(messages):
                raise ValueError("bad")
    assert attributes(named(spans, "publish"))["messaging.batch.message_count"] == 3
    contexts = {headers["traceparent"] for headers in instance.ingest.headers}
    assert len(contexts) == 1
    process = named(spans, "process q")
    assert process.status.status_code is trace.StatusCode.ERROR


class Metadata(grpc.aio.ServerInterceptor):
    """Keeps the trace context of each call that servers get, by method."""

    def __init__(self) -> None:
        self.contexts: dict[str, list[str | None]] = {}

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        method = handler_call_details.method.rpartition("/")[2]
        carried = dict(handler_call_details.invocation_metadata or ())
        self.contexts.setdefault(method, []).append(carried.get("traceparent"))
        return await continuation(handler_call_details)


@pytest.mark.parametrize("tracing", [True, False])
async def test_every_call_carries_the_trace_context_in_its_metadata(
    spans: InMemorySpanExporter, measures: InMemoryMetricReader, tracing: bool
) -> None:
    seen = Metadata()
    async with Instance(interceptors=[seen]) as instance:
        tracer = trace.get_tracer("a program")
        with tracer.start_as_current_span("work") as span:
            context = span.get_span_context()
            async with slatemq.connect(instance.endpoint, tracing=tracing) as client:
                await client.publish_many([b"a", b"b"])
                await client.publish(b"c")
                await client.get_queue("q")
                instance.broker.available.append((b"x", 0))
                (message,) = await client.claim("q")
                await message.ack()
    methods = {"GetTopology", "Publish", "GetQueue", "Claim", "Ack"}
    assert seen.contexts.keys() >= methods
    carried = [parent for method in methods for parent in seen.contexts[method]]
    if tracing:
        trace_id = f"-{context.trace_id:032x}-"
        assert all(parent is not None and trace_id in parent for parent in carried)
    else:
        assert set(carried) == {None}


def test_without_the_switch_opentelemetry_is_not_even_loaded() -> None:
    code = (
        "import sys, slatemq, slatemq.sync; c = slatemq.connect('localhost:1');"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert ended.returncode == 0, ended.stderr


async def test_nothing_is_added_to_headers_without_the_switch() -> None:
    async with Instance() as instance, slatemq.connect(instance.endpoint) as client:
        await asyncio.gather(client.publish(b"x"), client.publish_many([b"y"]))
    assert instance.ingest.headers == [{}, {}]
