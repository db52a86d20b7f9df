"""What the router counts, and the spans of its calls: none of it without telemetry."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context

from libs.serving import telemetry as conventions
from libs.serving.live_series import Point
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

FALLBACK_QUEUES_MAX: Final = 100_000
"""Queues whose fallbacks are remembered although no broker known has them: perhaps they move."""


@dataclass(slots=True)
class _Counts:
    """What came of the messages of one route, since the start."""

    routed: int = 0
    judged: int = 0
    unmatched: int = 0
    refused: int = 0
    backfilled: int = 0


class Metrics:
    def __init__(self, telemetry: Telemetry, lags: Lags, is_known: Callable[[str], bool]) -> None:
        """Make the metrics; `lags` names all routes, and `is_known` whether a queue still exists.

        Both are called in a thread.
        """
        self._enabled = telemetry.enabled
        self._lags = lags
        self._is_known = is_known
        self._counts: dict[tuple[int, int], _Counts] = {}  # by ingest and broker shard
        self._fallbacks: Counter[str] = Counter()  # by queue
        self._moved_s: dict[tuple[int, int], float] = {}  # when each route last did all, or some
        self._measure_routes(telemetry)
        telemetry.create_live_counter(
            "slatemq.router.priority.fallbacks",
            self._fallbacks_of_queues,
            "{message}",
            "Messages that got a queue's fallback priority, since its priority gave an error or no "
            "integer",
        )

    def _measure_routes(self, telemetry: Telemetry) -> None:
        def counter(
            name: str, read: Callable[[_Counts], int], description: str, unit: str = "{message}"
        ) -> None:
            telemetry.create_live_counter(name, partial(self._counted, read), unit, description)

        counter(
            "slatemq.router.routed.messages",
            lambda counts: counts.routed,
            "Matches assigned to queues; a message counts once per queue it reached",
        )
        counter(
            "slatemq.router.judged.messages",
            lambda counts: counts.judged,
            "Messages judged for a broker shard, and assigned or passed over",
        )
        counter(
            "slatemq.router.unmatched.messages",
            lambda counts: counts.unmatched,
            "Of those judged, the ones that reached no queue of the broker shard",
        )
        counter(
            "slatemq.router.refused.ranges",
            lambda counts: counts.refused,
            "Ranges that a broker refused, to be judged again or dropped",
            "{range}",
        )
        counter(
            "slatemq.router.backfilled.messages",
            lambda counts: counts.backfilled,
            "Matches brought into queues that start before their creation",
        )
        telemetry.create_live_gauge(
            "slatemq.router.pending.messages",
            lambda: ((one.pending_count, _where(one)) for one in self._lags()),
            "{message}",
            "Messages read from a log and not yet assigned to a broker shard",
        )
        telemetry.create_live_gauge(
            "slatemq.router.lag",
            lambda: ((self._lag_s(one), _where(one)) for one in self._lags()),
            "s",
            "How long the first message waits that is not assigned to a broker shard",
        )

    def answered(self, broker: int, ingest: int, piece: Piece, *, applied: bool) -> None:
        if not self._enabled:
            return
        counts = self._counts.setdefault((ingest, broker), _Counts())
        if not applied:
            counts.refused += 1
            return
        self._moved_s[ingest, broker] = time.monotonic()
        counts.routed += piece.matches_count
        counts.judged += piece.messages_count
        counts.unmatched += piece.unmatched_count
        self._assigned(piece.columns)

    def backfilled(self, broker: int, ingest: int, columns: Columns) -> None:
        if not self._enabled:
            return
        counts = self._counts.setdefault((ingest, broker), _Counts())
        counts.backfilled += sum(len(column.message_ids) for column in columns.values())
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
                if len(self._fallbacks) >= FALLBACK_QUEUES_MAX and queue_id not in self._fallbacks:
                    self._forget_unknown()
                self._fallbacks[queue_id] += column.fallbacks_count

    def _forget_unknown(self) -> None:
        for queue_id in [one for one in self._fallbacks if not self._is_known(one)]:
            del self._fallbacks[queue_id]

    def _counted(self, read: Callable[[_Counts], int]) -> Iterator[Point]:
        for one in self._lags():
            counts = self._counts.get((one.ingest_shard, one.broker_shard))
            if counts is not None:
                yield read(counts), _where(one)

    def _fallbacks_of_queues(self) -> Iterator[Point]:
        for queue_id, count in list(self._fallbacks.items()):
            # One that is not known may be known again, as after a move: its count goes on.
            if self._is_known(queue_id):
                yield count, {MESSAGING_DESTINATION_NAME: queue_id}


def measure_shards(telemetry: Telemetry, counts: Callable[[], Mapping[str, int]]) -> None:
    """Registers how many shards of each service there are, by `counts`."""
    telemetry.create_live_gauge(
        "slatemq.router.shards",
        lambda: ((count, {"slatemq.service": service}) for service, count in counts().items()),
        "{shard}",
        "Shards of the topology, with a process or without one: neither removed nor given up",
    )


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
