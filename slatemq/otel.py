"""Spans and metrics by OpenTelemetry's messaging conventions, where the program asks for them.

A publish is a PRODUCER span, whose context travels in the headers `traceparent` and `tracestate`;
taking a message over is a CLIENT span, working on it a CONSUMER span that links to the publish
(many messages of many producers meet in one consumer), settling it a CLIENT span, also where that
goes on in the background. What fails is recorded, too, with `error.type`. The metadata of every
call carries the context that is current when it begins, for the spans of the services. Needs the
extra `otel`; what is recorded goes to the program's own providers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

HEADERS_MAX = 255
HEADER_BYTES_MAX = 65_535
"""Bounds of a message: where a context has no room, the message goes without."""

SCOPE = "slatemq"
DURATION_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)


Attributes = Mapping[str, Any]

NoteResults = Callable[[Iterable[BaseException | None]], None]
"""Takes for each message None, or why it was refused."""


class Telemetry:
    """Records with the global tracer and meter providers of the program."""

    def __init__(self, endpoint: str) -> None:
        """Take tracer and instruments; `endpoint` says where the server is."""
        self._tracer = trace.get_tracer(SCOPE)
        self._propagator = TraceContextTextMapPropagator()
        host, _, port = endpoint.rpartition(":")
        self._facts: dict[str, Any] = {"messaging.system": "slatemq", "server.address": host}
        if port.isdecimal():
            self._facts["server.port"] = int(port)
        meter = metrics.get_meter(SCOPE)
        self._sent = meter.create_counter("messaging.client.sent.messages", unit="{message}")
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", unit="{message}"
        )
        self._durations = meter.create_histogram(
            "messaging.client.operation.duration",
            unit="s",
            explicit_bucket_boundaries_advisory=DURATION_BUCKETS_S,
        )
        self._process_durations = meter.create_histogram(
            "messaging.process.duration",
            unit="s",
            explicit_bucket_boundaries_advisory=DURATION_BUCKETS_S,
        )

    def carried(self) -> list[tuple[str, str]]:
        """The current context as the metadata of a call; empty where there is none."""
        context: dict[str, str] = {}
        self._propagator.inject(context)
        return list(context.items())

    @contextmanager
    def publishing(self, messages: OutgoingMessages, is_batch: bool) -> Iterator[None]:
        """Around a publish: adds its context to the messages that have none."""
        facts = self._named("publish", "send", "")
        subject = of_batch(len(messages)) if is_batch else {}
        try:
            with self._operation(trace.SpanKind.PRODUCER, facts, subject):
                carried: dict[str, str] = {}
                self._propagator.inject(carried)
                messages.change_headers(lambda headers: inject(headers, carried))
                yield
        finally:
            self._sent.add(len(messages), facts)

    @contextmanager
    def receiving(
        self, queue_id: str, failures: type[BaseException]
    ) -> Iterator[list[DeliveredMessage]]:
        """Around a wait for messages, which are added to the list, or for one of these failures."""
        facts, began_ns = self._named("receive", "receive", queue_id), time.time_ns()
        messages: list[DeliveredMessage] = []
        try:
            yield messages
        except failures as error:
            self._receive(facts, began_ns, (), error)
            raise
        self._consumed.add(len(messages), facts)
        self._receive(facts, began_ns, messages, None)

    def _receive(
        self,
        facts: dict[str, Any],
        began_ns: int,
        messages: Sequence[DeliveredMessage],
        error: BaseException | None,
    ) -> None:
        now_ns = time.time_ns()
        span = self._tracer.start_span(
            _title(facts),
            kind=trace.SpanKind.CLIENT,
            links=[link for message in messages for link in self._links(message.headers)],
            attributes={**facts, **of_batch(len(messages))},
            start_time=began_ns,
        )
        _note(span, facts, error)
        self._durations.record((now_ns - began_ns) / 1e9, facts)
        span.end(now_ns)

    def processing(self, message: DeliveredMessage) -> Processing:
        """Begins the work on a message; its span is the current one until it ends."""
        return Processing(self, message)

    @contextmanager
    def settling(
        self, name: str, queue_id: str, *, message_id: int = 0, count: int = 0
    ) -> Iterator[NoteResults]:
        """Around an ack, nack or release of one message, or of so many, whose results are noted.

        The queue is empty where it is not known.
        """
        facts = self._named(name, "settle", queue_id)
        subject = of_batch(count) if count else of_message(message_id)
        with self._operation(trace.SpanKind.CLIENT, facts, subject) as span:
            yield lambda results: _note(span, facts, _first_error(results))

    @contextmanager
    def settling_soon(
        self, name: str, queue_id: str, *, message_id: int = 0, count: int = 0
    ) -> Iterator[NoteResults]:
        """Around what begins to settle in the background, which ends as its results are noted."""
        facts = self._named(name, "settle", queue_id)
        subject = of_batch(count) if count else of_message(message_id)
        began = time.monotonic()
        span = self._tracer.start_span(
            _title(facts), kind=trace.SpanKind.CLIENT, attributes={**facts, **subject}
        )

        def end(results: Iterable[BaseException | None]) -> None:
            _note(span, facts, _first_error(results))
            self._durations.record(time.monotonic() - began, facts)
            span.end()

        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            try:
                yield end
            except Exception as error:
                end([error])  # It did not begin.
                raise

    @contextmanager
    def _operation(
        self, kind: trace.SpanKind, facts: dict[str, Any], subject: Attributes
    ) -> Iterator[trace.Span]:
        """Adds `error.type` to the facts where it fails."""
        began = time.monotonic()
        attributes = {**facts, **subject}
        try:
            with self._tracer.start_as_current_span(
                _title(facts), kind=kind, attributes=attributes, set_status_on_exception=False
            ) as span:
                try:
                    yield span
                except BaseException as error:
                    _note(span, facts, error)
                    raise
        finally:
            self._durations.record(time.monotonic() - began, facts)

    def _named(self, name: str, operation_type: str, queue_id: str) -> dict[str, Any]:
        facts = {
            **self._facts,
            "messaging.operation.name": name,
            "messaging.operation.type": operation_type,
        }
        if queue_id:
            facts["messaging.destination.name"] = queue_id
        return facts

    def _links(self, headers: Mapping[str, str]) -> list[trace.Link]:
        carrier = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        if not carrier:
            return []
        context = self._propagator.extract(carrier, Context())
        created = trace.get_current_span(context).get_span_context()
        return [trace.Link(created)] if created.is_valid else []


def of_message(message_id: int) -> Attributes:
    """What an operation is about."""
    return {"messaging.message.id": str(message_id)}


def of_batch(count: int) -> Attributes:
    """What an operation on so many messages is about."""
    return {"messaging.batch.message_count": count}


def _title(facts: Attributes) -> str:
    """The name of a span: of its operation, and of the queue where there is one."""
    name, queue_id = facts["messaging.operation.name"], facts.get("messaging.destination.name")
    return f"{name} {queue_id}" if queue_id else str(name)


def _first_error(results: Iterable[BaseException | None]) -> BaseException | None:
    return next((one for one in results if one is not None), None)


def _note(span: trace.Span, facts: dict[str, Any], error: BaseException | None) -> None:
    """Marks what has failed, in its span and in what its metrics have."""
    if error is not None:
        facts["error.type"] = error_type(error)
        span.set_attribute("error.type", facts["error.type"])
        span.set_status(trace.StatusCode.ERROR, f"{type(error).__name__}: {error}")


class OutgoingMessages(Protocol):
    """What telemetry needs of messages that are published together."""

    def __len__(self) -> int: ...

    def change_headers(self, change: Callable[[MutableMapping[str, str]], None]) -> None:
        """Change the headers of all."""


class DeliveredMessage(Protocol):
    """What telemetry reads of a message that a consumer has; its headers have the trace context."""

    @property
    def queue_id(self) -> str: ...

    @property
    def message_id(self) -> int: ...

    @property
    def payload(self) -> bytes: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def attempts_count(self) -> int: ...


class Processing:
    """The work on one message."""

    def __init__(self, telemetry: Telemetry, message: DeliveredMessage) -> None:
        queue_id = message.queue_id
        self._telemetry = telemetry
        self._facts = telemetry._named("process", "process", queue_id)
        self._began = time.monotonic()
        self._scope = telemetry._tracer.start_as_current_span(
            f"process {queue_id}",
            kind=trace.SpanKind.CONSUMER,
            links=telemetry._links(message.headers),
            attributes={
                **self._facts,
                **of_message(message.message_id),
                "messaging.message.body.size": len(message.payload),
                "messaging.slatemq.message.delivery_attempt": message.attempts_count,
            },
        )
        self._scope.__enter__()

    def end(self, error: BaseException | None) -> None:
        if error is not None:
            self._facts["error.type"] = error_type(error)
        duration_s = time.monotonic() - self._began
        self._telemetry._process_durations.record(duration_s, self._facts)
        self._scope.__exit__(type(error) if error else None, error, None)


def inject(headers: MutableMapping[str, str], carried: Mapping[str, str]) -> None:
    """Adds `traceparent` and `tracestate`, unless there is a context already, or no room."""
    if "traceparent" in headers:
        return
    for key in ("traceparent", "tracestate"):
        value = carried.get(key)
        if value is None or len(headers) >= HEADERS_MAX:
            return
        if len(value.encode()) <= HEADER_BYTES_MAX:
            headers[key] = value


def error_type(error: BaseException) -> str:
    """What the conventions call `error.type`: our reason, or the exception's name."""
    return str(getattr(error, "reason", "")) or type(error).__name__
