"""Telemetry that records, by OpenTelemetry's SDK; loaded where the settings ask for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import opentelemetry.util.re
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.exporter import logger as exporter_log
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExportResult,
    MetricReader,
    MetricsData,
    NumberDataPoint,
    PeriodicExportingMetricReader,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Status
from opentelemetry.util.types import AttributeValue

from libs.serving.live_series import LiveSeries, Point
from libs.serving.telemetry import SCOPE_NAME, Telemetry
from slatemq._secrets import redacted

POINTS_MAX: Final = 4_000
"""Values of metrics in a request: of 500 bytes each with a queue's name of 255 characters, and a
collector takes 4 MB."""


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
    metrics = _MetricExporter(otlp_endpoint, insecure=insecure)
    telemetry = recording(
        service,
        instance,
        BatchSpanProcessor(OTLPSpanExporter(endpoint=otlp_endpoint, insecure=insecure)),
        PeriodicExportingMetricReader(metrics),
        *readers,
        sample_percent=sample_percent,
    )
    metrics.series = telemetry.series
    return telemetry


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


class _Failures(logging.Filter):
    """Makes warnings, most of which are held back, of exports that a collector did not take."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno == logging.ERROR:
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return exporter_log.isEnabledFor(record.levelno)


exporter_log.addFilter(_Failures())


def _without_header(record: logging.LogRecord) -> bool:
    """Of a header that is not in the form of the specification, which may be a secret."""
    record.args = ("***",)
    return True


logging.getLogger(opentelemetry.util.re.__name__).addFilter(_without_header)


class _MetricExporter(OTLPMetricExporter):
    """Sends the live series, too, in requests that a collector takes.

    Attributes:
        series: What is sent after what the instruments have.
    """

    def __init__(self, endpoint: str, *, insecure: bool) -> None:
        super().__init__(endpoint, insecure, max_export_batch_size=POINTS_MAX)
        self.series: Sequence[LiveSeries] = ()
        self._began_ns = time.time_ns()

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        result = super().export(metrics_data, timeout_millis, **kwargs)
        resource = metrics_data.resource_metrics[0]
        for metrics in self._live_metrics():
            if result is MetricExportResult.FAILURE:
                break  # Each of the others would wait as long.
            scope = ScopeMetrics(InstrumentationScope(SCOPE_NAME), metrics, "")
            part = MetricsData([replace(resource, scope_metrics=[scope])])
            result = super().export(part, timeout_millis, **kwargs)
        return result

    def _live_metrics(self) -> Iterator[list[Metric]]:
        """What the live series are now, by requests."""
        metrics: list[Metric] = []
        room = POINTS_MAX
        for one in self.series:
            points = one.points()
            while taken := list(islice(points, room)):
                metrics.append(self._metric(one, taken))
                room -= len(taken)
                if not room:
                    yield metrics
                    metrics, room = [], POINTS_MAX
        if metrics:
            yield metrics

    def _metric(self, one: LiveSeries, points: Iterable[Point]) -> Metric:
        now_ns = time.time_ns()
        found = [NumberDataPoint(labels, self._began_ns, now_ns, value) for value, labels in points]
        data = (
            Sum(found, AggregationTemporality.CUMULATIVE, True) if one.is_counter else Gauge(found)
        )
        return Metric(one.name, one.description, one.unit, data)


class _Redacting(SpanProcessor):
    """Passes spans on without the secrets that libraries put into the texts of their errors."""

    def __init__(self, spans: SpanProcessor) -> None:
        self._spans = spans

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self._spans.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        has_texts = span.events or span.status.description
        self._spans.on_end(_redacted(span) if has_texts else span)

    def shutdown(self) -> None:
        self._spans.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._spans.force_flush(timeout_millis)


def _redacted(span: ReadableSpan) -> ReadableSpan:
    """A copy of a span with the texts of errors: in its status, and in exceptions, its events."""
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
