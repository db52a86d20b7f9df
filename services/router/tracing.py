"""Spans of routing: each call that assigns is a part of the trace of a message that it assigns.

A call assigns messages of many traces, and a span has one parent. So it is the first message's; the
others are linked, as OpenTelemetry's messaging conventions have it for batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context

from libs.serving import telemetry as conventions
from libs.serving.telemetry import Telemetry, extract
from services.router.pieces import Piece

__all__ = ["Tracing"]

LINKS_MAX: Final = 32
"""Traces linked, and runs of messages looked at for each."""


class Tracing:
    """Makes the spans of a router."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def routing(self, broker_shard: int, pieces: Sequence[Piece]) -> AbstractContextManager[Any]:
        """Around the call that assigns these pieces."""
        if not self._telemetry.traces:
            return nullcontext()
        traced = list(_contexts(pieces))
        links = [trace.Link(trace.get_current_span(one).get_span_context()) for one in traced[1:]]
        return self._telemetry.tracer.start_as_current_span(
            "route",
            context=traced[0] if traced else Context(),
            kind=trace.SpanKind.CONSUMER,
            links=links,
            attributes={
                conventions.MESSAGING_SYSTEM: "slatemq",
                conventions.MESSAGING_OPERATION_NAME: "route",
                conventions.MESSAGING_OPERATION_TYPE: "process",
                conventions.MESSAGING_BATCH_MESSAGE_COUNT: sum(
                    one.messages_count for one in pieces
                ),
                "slatemq.broker.shard": broker_shard,
            },
        )


def _contexts(pieces: Sequence[Piece]) -> Iterator[Context]:
    """Of the traces of the first messages, each once."""
    seen: set[str] = set()
    for number, headers in enumerate(_headers(pieces)):
        if number >= LINKS_MAX * LINKS_MAX or len(seen) > LINKS_MAX:
            return
        value = headers.get("traceparent", "")
        if value and value not in seen:
            seen.add(value)
            context = extract(headers)
            if trace.get_current_span(context).get_span_context().is_valid:
                yield context


def _headers(pieces: Sequence[Piece]) -> Iterator[Mapping[str, str]]:
    for piece in pieces:
        for entry in piece.entries:
            for _, headers, *_rest in entry.peek():
                yield headers
