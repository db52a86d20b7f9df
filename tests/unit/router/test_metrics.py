"""What the router counts."""

from __future__ import annotations

from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.filters import Allowance
from libs.serving.recording import recording
from libs.serving.telemetry import MESSAGING_DESTINATION_NAME
from services.router.entries import LogEntry
from services.router.metrics import Metrics, RouteLag
from services.router.pieces import Piece
from services.router.routing import BrokerRules, QueueRule


def test_priorities_that_failed_are_counted_by_queue_once_they_are_assigned() -> None:
    reader = InMemoryMetricReader()
    spans = SimpleSpanProcessor(InMemorySpanExporter())
    metrics = Metrics(recording("router", "router-0", spans, reader), lambda: ())
    rules = BrokerRules(Allowance(now_ns=lambda: 0))
    rules.change([QueueRule("a", "true", 'int(headers["p"])'), QueueRule("b", "true", "3")])
    piece = Piece(0, 1, 0)
    assert piece.add(LogEntry([((1, 0, 0, 0, 0), {}, -1, (5, 5), "")], 10), rules)

    metrics.answered(0, 0, piece, applied=False)
    metrics.answered(0, 0, piece, applied=True)

    assert _points(reader, "slatemq.router.priority.fallbacks") == {"a": 2}


def test_the_lag_is_the_age_of_the_oldest_message_or_since_the_route_moved() -> None:
    reader = InMemoryMetricReader()
    spans = SimpleSpanProcessor(InMemorySpanExporter())
    long_ago_ms = 1_000
    routes = [
        RouteLag(0, 0, 5, long_ago_ms, True),
        RouteLag(0, 1, 0, None, True),
        RouteLag(0, 2, 0, None, False),
    ]
    Metrics(recording("router", "router-0", spans, reader), lambda: routes)

    _points(reader, "slatemq.router.lag", "slatemq.broker.shard")
    lags = _points(reader, "slatemq.router.lag", "slatemq.broker.shard")

    assert lags[0] > 1e9
    assert 0 < lags[1] < 1e9
    assert lags[2] == 0


def test_a_route_that_was_looked_at_before_it_was_answered_shows_that_it_refused_nothing() -> None:
    reader = InMemoryMetricReader()
    spans = SimpleSpanProcessor(InMemorySpanExporter())
    routes = [RouteLag(0, 7, 0, None, True)]
    metrics = Metrics(recording("router", "router-0", spans, reader), lambda: routes)
    assert _points(reader, "slatemq.router.lag", "slatemq.broker.shard").keys() == {7}

    metrics.answered(7, 0, Piece(0, 1, 0), applied=True)

    assert _points(reader, "slatemq.router.refused.ranges", "slatemq.broker.shard") == {7: 0}


def _points(
    reader: InMemoryMetricReader, name: str, label: str = MESSAGING_DESTINATION_NAME
) -> dict[object, int | float]:
    data = reader.get_metrics_data()
    assert data is not None
    found: dict[object, int | float] = {}
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points if metric.name == name else ():
                    assert isinstance(point, NumberDataPoint)
                    assert point.attributes is not None
                    found[point.attributes[label]] = point.value
    return found
