"""Telemetry that records, by OpenTelemetry's SDK; loaded where the settings ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Status
from opentelemetry.util.types import AttributeValue

from libs.serving.telemetry import Telemetry
from slatemq._secrets import redacted


def exporting(
    service: str,
    instance: str,
    otlp_endpoint: str,
    sample_percent: int,
    readers: Sequence[MetricReader],
) -> Telemetry:
    """Telemetry for these readers, and for the collector if there is one; see `configure`."""
    if not otlp_endpoint:
        return Telemetry(None, _meters(service, instance, readers))
    insecure = not otlp_endpoint.startswith("https://")
    return recording(
        service,
        instance,
        BatchSpanProcessor(OTLPSpanExporter(endpoint=otlp_endpoint, insecure=insecure)),
        PeriodicExportingMetricReader(
            OTLPMetricExporter(endpoint=otlp_endpoint, insecure=insecure)
        ),
        *readers,
        sample_percent=sample_percent,
    )


def recording(
    service: str,
    instance: str,
    spans: SpanProcessor,
    *measures: MetricReader,
    sample_percent: int = 100,
) -> Telemetry:
    resource = _resource(service, instance)
    sampler = ParentBased(TraceIdRatioBased(sample_percent / 100))
    tracers = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
    tracers.add_span_processor(_Redacting(spans))
    return Telemetry(tracers, _meters(service, instance, measures))


def _meters(service: str, instance: str, readers: Sequence[MetricReader]) -> MeterProvider:
    return MeterProvider(readers, resource=_resource(service, instance), shutdown_on_exit=False)


def _resource(service: str, instance: str) -> Resource:
    own = Resource.create(
        {
            "service.name": f"slatemq-{service}",
            "service.namespace": "slatemq",
            "service.instance.id": instance,
        }
    )
    # Last, since an operator knows better: OTEL_RESOURCE_ATTRIBUTES.
    return own.merge(OTELResourceDetector().detect())


class _Redacting(SpanProcessor):
    """Passes spans on without the secrets that libraries put into the texts of their errors."""

    def __init__(self, spans: SpanProcessor) -> None:
        self._spans = spans

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self._spans.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.on_end(_redacted(span) if span.events else span)

    def shutdown(self) -> None:
        self._spans.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._spans.force_flush(timeout_millis)


def _redacted(span: ReadableSpan) -> ReadableSpan:
    """A copy of a span with events: exceptions, whose texts its status repeats."""
    events = [
        Event(one.name, _redacted_texts(one.attributes or {}), one.timestamp) for one in span.events
    ]
    status = span.status
    if status.description:
        status = Status(status.status_code, redacted(status.description))
    return ReadableSpan(
        name=span.name,
        context=span.context,
        parent=span.parent,
        resource=span.resource,
        attributes=span.attributes,
        events=events,
        links=span.links,
        kind=span.kind,
        status=status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


def _redacted_texts(attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    return {
        name: redacted(value) if isinstance(value, str) else value
        for name, value in attributes.items()
    }
