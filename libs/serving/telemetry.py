"""Traces and metrics by OpenTelemetry's messaging conventions, and W3C context in headers.

Nothing is sent unless an OTLP endpoint is configured, and nothing is measured unless that or an
HTTP port is. Without both every tracer and instrument is the API's no-op, and calls are not even
looked at, so that the cost is none.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from libs.serving import limits
from libs.serving.live_series import LiveSeries, Point
from slatemq._rpc.metadata_channels import CallMetadata

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger(__name__)

SCOPE_NAME = "slatemq"

SHUTDOWN_S: Final = 1.0
"""How long the end of a process waits for its collector, and with it the successor of its shard."""

MESSAGING_SYSTEM = "messaging.system"
MESSAGING_OPERATION_NAME = "messaging.operation.name"
MESSAGING_OPERATION_TYPE = "messaging.operation.type"
MESSAGING_DESTINATION_NAME = "messaging.destination.name"
MESSAGING_BATCH_MESSAGE_COUNT = "messaging.batch.message_count"
"""Attribute names of OpenTelemetry's messaging conventions, as services use them."""

SENT_MESSAGES = "messaging.client.sent.messages"
"""Name of OpenTelemetry's metric of what was published."""

_PROPAGATOR = TraceContextTextMapPropagator()


class Telemetry:
    """The tracer and the meter of one process.

    Attributes:
        enabled: Whether anything is recorded at all.
        traces: Whether spans are.
        tracer: For spans of the service's own.
        meter: For instruments of the service's own.
        call_duration: Of calls, served or refused, in ms.
        series: What is measured without instruments: see `live_series`.
    """

    def __init__(
        self, tracers: TracerProvider | None = None, meters: MeterProvider | None = None
    ) -> None:
        """Record with these providers; without them, record nothing."""
        self.enabled = tracers is not None or meters is not None
        self.traces = tracers is not None
        self._tracers = tracers
        self._meters = meters
        self.series: list[LiveSeries] = []
        self.tracer: trace.Tracer = (
            tracers.get_tracer(SCOPE_NAME) if tracers else trace.NoOpTracer()
        )
        self.meter: metrics.Meter = (
            meters.get_meter(SCOPE_NAME) if meters else metrics.NoOpMeter(SCOPE_NAME)
        )
        self.call_duration = self.meter.create_histogram(
            "rpc.server.duration",
            unit="ms",
            description="Duration of calls, served or refused, by their status",
        )

        self._slow_steps = self.meter.create_counter(
            "slatemq.loop.slow_steps",
            unit="{step}",
            description="Steps of the event loop that took the processor longer than slow_step_ms",
        )

    def create_live_gauge(
        self, name: str, read: Callable[[], Iterable[Point]], unit: str, description: str
    ) -> None:
        """Measure what comes and goes: `read` returns what there is; it is called in a thread."""
        self.series.append(LiveSeries(name, read, unit, description, is_counter=False))

    def create_live_counter(
        self, name: str, read: Callable[[], Iterable[Point]], unit: str, description: str
    ) -> None:
        """Like `create_live_gauge`, for what counts since the start."""
        self.series.append(LiveSeries(name, read, unit, description, is_counter=True))

    def record_slow_step(self, name: str) -> None:
        """Count a slow step of the event loop, by the name of what it ran."""
        self._slow_steps.add(1, {"slatemq.step": name})

    @property
    def carrier(self) -> CallMetadata | None:
        """Gives the current trace context as metadata of a call to another process.

        None without traces, so that such a call costs nothing more.
        """
        return _carried if self.traces else None

    def shutdown(self) -> None:
        """Export what is left, in SHUTDOWN_S at most, and stop; call it off the event loop.

        What has not ended then does not hold up the end of the process.
        """
        providers = [one for one in (self._tracers, self._meters) if one is not None]
        ends = [threading.Thread(target=one.shutdown, daemon=True) for one in providers]
        for end in ends:
            end.start()
        until_s = time.monotonic() + SHUTDOWN_S
        for end in ends:
            end.join(max(0.0, until_s - time.monotonic()))
        if any(end.is_alive() for end in ends):
            log.warning("the last spans and metrics are lost: the collector did not take them")


def instance_id(service: str, shard: int | None, *, has_standbys: bool) -> str:
    """What distinguishes a process from all others of its service, as `service.instance.id`.

    ::

        slatemq-ingest-0/ingest-0     the host, which is the pod or the container, and the shard
        slatemq-console-x7/console-1  without a shard: with the process, as numbered on its host
        db3/broker-0-4711             with standbys, of which one host may have two for a shard
    """
    parts = [service]
    if shard is not None:
        parts.append(str(shard))
    if shard is None or has_standbys:
        parts.append(str(os.getpid()))
    return f"{socket.gethostname()}/{'-'.join(parts)}"


def configure(
    service: str,
    instance: str,
    otlp_endpoint: str = "",
    sample_percent: int = 100,
    readers: Sequence[MetricReader] = (),
) -> Telemetry:
    """Set up telemetry by the settings: with an empty endpoint and no readers, none.

    Args:
        service: Name of the service, e.g. `broker`.
        instance: Distinguishes processes of one service: see `instance_id`.
        otlp_endpoint: URL of an OTLP/gRPC collector; `http://` means without TLS.
        sample_percent: Share of new traces to record; a caller's decision is always followed.
        readers: What reads the metrics beside the collector.
    """
    if not otlp_endpoint and not readers:
        return Telemetry()
    # Loaded where something is recorded: the SDK and its exporters are a tenth of a second.
    telemetry: Telemetry = import_module("libs.serving.recording").exporting(
        service, instance, otlp_endpoint, sample_percent, readers
    )
    return telemetry


def _carried() -> tuple[tuple[str, str], ...]:
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return tuple(carrier.items())


def inject(headers: MutableMapping[str, str], context: Context | None = None) -> None:
    """Put the current trace context into a message's headers, where there is room for it.

    A context that the producer set by itself stays. When the message has no room for both
    `traceparent` and `tracestate`, the state is left out, or both: a trace is never worth a
    refused message.
    """
    if "traceparent" in headers:
        return
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    for key in ("traceparent", "tracestate"):
        value = carrier.get(key)
        if value is None or len(headers) >= limits.HEADERS_COUNT_MAX:
            return
        if len(value.encode()) <= limits.HEADER_TEXT_BYTES_MAX:
            headers.setdefault(key, value)


def extract(headers: Mapping[str, Any]) -> Context:
    """The trace context in headers or metadata; empty where there is none."""
    carrier = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
    return _PROPAGATOR.extract(carrier, Context())
