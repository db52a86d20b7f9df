from collections.abc import AsyncIterator

from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.serving import recording
from slatemq.v1.ingest_pb2 import PublishRequest, PublishRun, PublishStreamRequest
from tests.integration.ingest.server import message, serving


async def test_a_publish_is_traced_counted_and_carried_on_in_the_headers() -> None:
    spans, measures = InMemorySpanExporter(), InMemoryMetricReader()
    result = recording.recording("ingest", "ingest-0", SimpleSpanProcessor(spans), measures)
    full = {f"k{n}": "" for n in range(255)}
    async with serving(telemetry=result) as ingest:
        ids = await ingest.publish(
            message(b"a"), PublishRun(payloads=[b""], headers=full), message(traceparent="mine"),
            request_id="r",
        )  # fmt: skip

        # The first message carries the span; there was no room in the second, and the third had one
        traced, crowded, own = [dict(m.headers) for m in (await ingest.read(*ids)).messages]
        (span,) = [span for span in spans.get_finished_spans() if span.name == "publish"]
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" in traced["traceparent"]
        assert crowded == full
        assert own == {"traceparent": "mine"}
        assert span.attributes is not None
        assert span.attributes["messaging.batch.message_count"] == 3

        # A repeat, though it comes with another span, has the same content
        assert ids == await ingest.publish(
            message(b"a"), PublishRun(payloads=[b""], headers=full), message(traceparent="mine"),
            request_id="r",
        )  # fmt: skip

    assert ("messaging.client.sent.messages", 6) in _sums(measures)
    result.shutdown()


async def test_publishes_of_a_stream_are_counted_without_traces() -> None:
    measures = InMemoryMetricReader()
    result = recording.exporting("ingest", "ingest-0", "", 100, [measures])
    async with serving(telemetry=result) as ingest:

        async def requests() -> AsyncIterator[PublishStreamRequest]:
            for number in (1, 2):
                run = PublishRun(payloads=[b"a", b"b"])
                yield PublishStreamRequest(number=number, publish=PublishRequest(runs=[run]))

        answers = [part async for part in ingest.stub.PublishStream(requests())]

    assert sum(len(part.answers) for part in answers) == 2
    assert ("messaging.client.sent.messages", 4) in _sums(measures)
    result.shutdown()


def _sums(measures: InMemoryMetricReader) -> list[tuple[str, int | float]]:
    data = measures.get_metrics_data()
    assert data is not None
    return [
        (metric.name, point.value)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
        if isinstance(point, NumberDataPoint)
    ]
