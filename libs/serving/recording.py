"""Telemetry that records, by OpenTelemetry's SDK; loaded where the settings ask for it."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from libs.serving.telemetry import Telemetry


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
    tracers.add_span_processor(spans)
    return Telemetry(tracers, _meters(service, instance, measures))


def _meters(service: str, instance: str, readers: Sequence[MetricReader]) -> MeterProvider:
    return MeterProvider(readers, resource=_resource(service, instance), shutdown_on_exit=False)


def _resource(service: str, instance: str) -> Resource:
    return Resource.create(
        {
            "service.name": f"slatemq-{service}",
            "service.namespace": "slatemq",
            "service.instance.id": instance,
        }
    )
