"""What the router counts."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from libs.filters import Allowance
from libs.serving.telemetry import MESSAGING_DESTINATION_NAME, Telemetry, configure
from services.router import metrics as router_metrics
from services.router.entries import LogEntry
from services.router.metrics import Metrics, RouteLag
from services.router.pieces import Piece
from services.router.routing import BrokerRules, QueueColumns, QueueRule


def test_priorities_that_failed_are_counted_by_queue_and_never_count_backwards() -> None:
    telemetry = _recorded()
    known = {"a", "b"}
    metrics = Metrics(telemetry, lambda: (), known.__contains__)
    rules = BrokerRules(Allowance(now_ns=lambda: 0))
    rules.change([QueueRule("a", "true", 'int(headers["p"])'), QueueRule("b", "true", "3")])
    piece = Piece(0, 1, 0)
    assert piece.add(LogEntry([((1, 0, 0, 0, 0), {}, -1, (5, 5), "")], 10), rules)

    metrics.answered(0, 0, piece, applied=False)
    metrics.answered(0, 0, piece, applied=True)

    assert _points(telemetry, "slatemq.router.priority.fallbacks") == {"a": 2}
    known.remove("a")  # As while it moves, or while its broker is connected to again.
    assert _points(telemetry, "slatemq.router.priority.fallbacks") == {}
    known.add("a")
    metrics.answered(0, 0, piece, applied=True)
    assert _points(telemetry, "slatemq.router.priority.fallbacks") == {"a": 4}


def test_counts_of_queues_that_are_gone_are_forgotten_where_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_metrics, "FALLBACK_QUEUES_MAX", 2)
    telemetry, known = _recorded(), {"gone", "kept", "new"}
    metrics = Metrics(telemetry, lambda: (), known.__contains__)
    column = QueueColumns()
    column.fallbacks_count = 1
    for queue_id in ("gone", "kept", "new"):
        metrics.backfilled(0, 0, {queue_id: column})
        known.discard("gone")

    known.add("gone")
    assert _points(telemetry, "slatemq.router.priority.fallbacks") == {"kept": 1, "new": 1}


def test_the_lag_is_the_age_of_the_oldest_message_or_since_the_route_moved() -> None:
    telemetry = _recorded()
    long_ago_ms = 1_000
    routes = [
        RouteLag(0, 0, 5, long_ago_ms, True),
        RouteLag(0, 1, 0, None, True),
        RouteLag(0, 2, 0, None, False),
    ]
    Metrics(telemetry, lambda: routes, lambda _: True)

    _points(telemetry, "slatemq.router.lag", "slatemq.broker.shard")
    lags = _points(telemetry, "slatemq.router.lag", "slatemq.broker.shard")

    assert lags[0] > 1e9
    assert 0 < lags[1] < 1e9
    assert lags[2] == 0


def test_a_route_that_was_looked_at_before_it_was_answered_shows_that_it_refused_nothing() -> None:
    telemetry = _recorded()
    routes = [RouteLag(0, 7, 0, None, True)]
    metrics = Metrics(telemetry, lambda: routes, lambda _: True)
    assert _points(telemetry, "slatemq.router.lag", "slatemq.broker.shard").keys() == {7}

    metrics.answered(7, 0, Piece(0, 1, 0), applied=True)

    assert _points(telemetry, "slatemq.router.refused.ranges", "slatemq.broker.shard") == {7: 0}


def test_each_of_2_500_routes_has_series_until_a_shard_is_removed() -> None:
    telemetry = _recorded()
    routes = [RouteLag(ingest, 0, 0, None, False) for ingest in range(2_500)]
    metrics = Metrics(telemetry, lambda: routes, lambda _: True)
    for ingest in range(2_500):
        metrics.answered(0, ingest, Piece(0, 1, 0), applied=True)

    for name in ("pending.messages", "judged.messages"):
        found = _points(telemetry, f"slatemq.router.{name}", "slatemq.ingest.shard")
        assert len(found) == 2_500
    del routes[1:]
    for name in ("pending.messages", "judged.messages"):
        found = _points(telemetry, f"slatemq.router.{name}", "slatemq.ingest.shard")
        assert found == {0: 0}


def _points(
    telemetry: Telemetry, name: str, label: str = MESSAGING_DESTINATION_NAME
) -> dict[object, int | float]:
    return {
        attributes[label]: value
        for metric in telemetry.series
        for value, attributes in (metric.points() if metric.name == name else ())
    }


def _recorded() -> Telemetry:
    """Telemetry that has a reader, without which nothing is counted."""
    return configure("router", "router-0", readers=[InMemoryMetricReader()])
