"""What the router counts. Without a telemetry endpoint every instrument here does nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from libs.serving.telemetry import MESSAGING_DESTINATION_NAME, Telemetry
from services.router.pieces import Piece
from services.router.routing import Columns

Lags = Callable[[], Iterable[tuple[int, int, int]]]
"""Ingest shard, broker shard and pending messages, for each route."""


class Metrics:
    """Counters of judged, routed and unmatched messages; a gauge of what waits."""

    def __init__(self, telemetry: Telemetry, lags: Lags) -> None:
        """Make the instruments; `lags` is asked whenever they are collected."""
        meter = telemetry.meter
        self._enabled = telemetry.enabled
        self._routed = meter.create_counter(
            "slatemq.router.routed.messages",
            unit="{message}",
            description="Matches assigned to queues; a message counts once per queue it reached",
        )
        self._judged = meter.create_counter(
            "slatemq.router.judged.messages",
            unit="{message}",
            description="Messages judged for a broker shard, and assigned or passed over",
        )
        self._unmatched = meter.create_counter(
            "slatemq.router.unmatched.messages",
            unit="{message}",
            description="Of those judged, the ones that reached no queue of the broker shard",
        )
        self._refused = meter.create_counter(
            "slatemq.router.refused.ranges",
            unit="{range}",
            description="Ranges that a broker refused, to be judged again or dropped",
        )
        self._backfilled = meter.create_counter(
            "slatemq.router.backfilled.messages",
            unit="{message}",
            description="Matches brought into queues that start before their creation",
        )
        self._fallbacks = meter.create_counter(
            "slatemq.router.priority.fallbacks",
            unit="{message}",
            description="Messages that got a queue's fallback priority, since its priority gave an "
            "error or no integer",
        )
        meter.create_observable_gauge(
            "slatemq.router.pending.messages",
            callbacks=[lambda _: _observations(_, lags)],
            unit="{message}",
            description="Messages read from a log and not yet assigned to a broker shard",
        )

    def answered(self, broker: int, ingest: int, piece: Piece, *, applied: bool) -> None:
        """A piece came back."""
        if not self._enabled:
            return
        where = {"slatemq.broker.shard": broker, "slatemq.ingest.shard": ingest}
        if not applied:
            self._refused.add(1, where)
            return
        self._routed.add(piece.matches_count, where)
        self._judged.add(piece.messages_count, where)
        self._unmatched.add(piece.unmatched_count, where)
        self._assigned(piece.columns)

    def backfilled(self, broker: int, ingest: int, columns: Columns) -> None:
        """A piece of a replay was applied."""
        if not self._enabled:
            return
        count = sum(len(column.message_ids) for column in columns.values())
        where = {"slatemq.broker.shard": broker, "slatemq.ingest.shard": ingest}
        self._backfilled.add(count, where)
        self._assigned(columns)

    def _assigned(self, columns: Columns) -> None:
        for queue_id, column in columns.items():
            if column.fallbacks_count:
                queue = {MESSAGING_DESTINATION_NAME: queue_id}
                self._fallbacks.add(column.fallbacks_count, queue)


def _observations(_: CallbackOptions, lags: Lags) -> list[Observation]:
    return [
        Observation(count, {"slatemq.broker.shard": broker, "slatemq.ingest.shard": ingest})
        for ingest, broker, count in lags()
    ]
