"""What the router counts, and the spans of its calls: none of it without telemetry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import Counter, Observation

from libs.serving import telemetry as conventions
from libs.serving.telemetry import MESSAGING_DESTINATION_NAME, Telemetry, extract
from services.router.pieces import Piece
from services.router.routing import Columns


class RouteLag(NamedTuple):
    """How far a route is behind its log.

    Attributes:
        pending_count: Messages read and not yet assigned.
        oldest_received_ms: When ingest received the first of them; None without any.
        is_behind: Whether the log has messages that the broker has not, as far as is known.
    """

    ingest_shard: int
    broker_shard: int
    pending_count: int
    oldest_received_ms: int | None
    is_behind: bool


Lags = Callable[[], Iterable[RouteLag]]


class Metrics:
    def __init__(self, telemetry: Telemetry, lags: Lags) -> None:
        """Make the instruments; `lags` is asked whenever they are collected."""
        meter = telemetry.meter
        self._enabled = telemetry.enabled

        def counter(name: str, description: str, unit: str = "{message}") -> Counter:
            return meter.create_counter(name, unit=unit, description=description)

        self._routed = counter(
            "slatemq.router.routed.messages",
            description="Matches assigned to queues; a message counts once per queue it reached",
        )
        self._judged = counter(
            "slatemq.router.judged.messages",
            description="Messages judged for a broker shard, and assigned or passed over",
        )
        self._unmatched = counter(
            "slatemq.router.unmatched.messages",
            description="Of those judged, the ones that reached no queue of the broker shard",
        )
        self._refused = counter(
            "slatemq.router.refused.ranges",
            unit="{range}",
            description="Ranges that a broker refused, to be judged again or dropped",
        )
        self._backfilled = counter(
            "slatemq.router.backfilled.messages",
            description="Matches brought into queues that start before their creation",
        )
        self._fallbacks = counter(
            "slatemq.router.priority.fallbacks",
            description="Messages that got a queue's fallback priority, since its priority gave an "
            "error or no integer",
        )
        meter.create_observable_gauge(
            "slatemq.router.pending.messages",
            callbacks=[
                lambda _: [Observation(one.pending_count, _where(one)) for one in lags()],
            ],
            unit="{message}",
            description="Messages read from a log and not yet assigned to a broker shard",
        )
        meter.create_observable_gauge(
            "slatemq.router.lag",
            callbacks=[lambda _: [Observation(self._lag_s(one), _where(one)) for one in lags()]],
            unit="s",
            description="How long the first message waits that is not assigned to a broker shard",
        )
        self._moved_s: dict[tuple[int, int], float] = {}  # when each route last did all, or some
        self._answered: set[tuple[int, int]] = set()

    def answered(self, broker: int, ingest: int, piece: Piece, *, applied: bool) -> None:
        if not self._enabled:
            return
        where = {"slatemq.broker.shard": broker, "slatemq.ingest.shard": ingest}
        if not applied:
            self._refused.add(1, where)
            return
        if (ingest, broker) not in self._answered:
            self._answered.add((ingest, broker))
            self._refused.add(0, where)  # So that there is a number before the first one.
        self._moved_s[ingest, broker] = time.monotonic()
        self._routed.add(piece.matches_count, where)
        self._judged.add(piece.messages_count, where)
        self._unmatched.add(piece.unmatched_count, where)
        self._assigned(piece.columns)

    def backfilled(self, broker: int, ingest: int, columns: Columns) -> None:
        if not self._enabled:
            return
        count = sum(len(column.message_ids) for column in columns.values())
        where = {"slatemq.broker.shard": broker, "slatemq.ingest.shard": ingest}
        self._backfilled.add(count, where)
        self._assigned(columns)

    def _lag_s(self, route: RouteLag) -> float:
        """By the clocks of ingest and router where the message is here.

        Where it is not, as while a broker is down, since the route last moved.
        """
        where = (route.ingest_shard, route.broker_shard)
        if route.oldest_received_ms is not None:
            return max(time.time() - route.oldest_received_ms / 1000, 0.0)
        now_s = time.monotonic()
        if not route.is_behind:
            self._moved_s[where] = now_s
            return 0.0
        return now_s - self._moved_s.setdefault(where, now_s)

    def _assigned(self, columns: Columns) -> None:
        for queue_id, column in columns.items():
            if column.fallbacks_count:
                queue = {MESSAGING_DESTINATION_NAME: queue_id}
                self._fallbacks.add(column.fallbacks_count, queue)


def _where(route: RouteLag) -> dict[str, int]:
    return {"slatemq.broker.shard": route.broker_shard, "slatemq.ingest.shard": route.ingest_shard}


LINKS_MAX: Final = 32
"""Traces linked, and runs of messages looked at for each."""


class Tracing:
    """Makes the spans of a router: each call that assigns is in the trace of a message it assigns.

    A call assigns messages of many traces, and a span has one parent. So it is the first message's;
    the others are linked, as OpenTelemetry's messaging conventions have it for batches.
    """

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
