"""What a broker measures of its queues."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

from libs.serving.telemetry import Telemetry
from services.broker.core.shard import Nack
from services.broker.metrics import measure
from tests.unit.broker.core.shards import Rig

Found = dict[str, dict[tuple[object, ...], Any]]


def read(reader: InMemoryMetricReader) -> Found:
    """Values by metric and labels, but for the queue's name."""
    data = reader.get_metrics_data()
    assert data is not None
    found: Found = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            labels = dict(point.attributes or {})
            if labels.pop("messaging.destination.name") != "orders":
                continue
            values = found.setdefault(metric.name, {})
            values[tuple(labels[name] for name in sorted(labels))] = point.value  # type: ignore[union-attr]
    return found


async def test_depths_by_state_and_priority_and_failed_attempts_are_measured() -> None:
    reader = InMemoryMetricReader()
    rig = Rig()
    meters = MeterProvider([reader], shutdown_on_exit=False)
    measure(Telemetry(TracerProvider(shutdown_on_exit=False), meters), rig.shard)
    rig.create(max_attempts=1)
    await rig.route([1, 2, 3], priority=7)
    later = rig.now_ms + 1_000_000_000_000
    await rig.route([4], priority=9, visible_at_ms=later)
    nacked, _ = await rig.claim(2, lease_ms=1000)
    await rig.nack(Nack(nacked.token, "no"))
    rig.now_ms += 1000
    await rig.expire()

    found = read(reader)

    assert found["slatemq.queue.messages"] == {
        ("available",): 1,
        ("delayed",): 1,
        ("in_flight",): 0,
        ("done",): 0,
        ("failed",): 2,
        ("archived",): 0,
    }
    assert found["slatemq.queue.priority.messages"] == {(7, "available"): 1, (9, "delayed"): 1}
    assert found["slatemq.queue.failed.attempts"] == {("nacked",): 1, ("lease_expired",): 1}
    assert found["slatemq.queue.expired.messages"] == {(): 0}
    assert found["slatemq.queue.claimed.messages"] == {(): 2}
    assert found["slatemq.queue.redelivered.messages"] == {(): 0}
    assert found["slatemq.queue.quarantined"] == {(): 0}
    (queue,) = rig.shard.queues.values()
    rig.shard.quarantine(queue, "slow", rig.now_ms)
    assert read(reader)["slatemq.queue.quarantined"] == {(): 1}
    assert set(found["slatemq.queue.oldest_claimable.age"]) == {()}


async def test_acks_and_messages_that_are_to_be_delivered_again_are_counted() -> None:
    reader = InMemoryMetricReader()
    rig = Rig()
    meters = MeterProvider([reader], shutdown_on_exit=False)
    measure(Telemetry(TracerProvider(shutdown_on_exit=False), meters), rig.shard)
    rig.create(max_attempts=3)
    await rig.route([1, 2, 3], priority=7)
    nacked, _, acked = await rig.claim(3, lease_ms=1000)
    await rig.nack(Nack(nacked.token, "no"))
    await rig.run(lambda: rig.shard.leases.ack([acked.token], rig.now_ms))
    rig.now_ms += 1000
    await rig.expire()

    found = read(reader)

    assert found["slatemq.queue.acked.messages"] == {(): 1}
    assert found["slatemq.queue.redelivered.messages"] == {(): 2}


class Changing:
    """What waits in a queue, read from another thread while the broker changes it."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> object:
        raise self._error


@pytest.mark.parametrize("error", [KeyError(7), IndexError(), RuntimeError("changed size")])
def test_a_queue_that_changes_while_it_is_read_hides_no_other(error: Exception) -> None:
    reader = InMemoryMetricReader()
    rig = Rig()
    meters = MeterProvider([reader], shutdown_on_exit=False)
    measure(Telemetry(TracerProvider(shutdown_on_exit=False), meters), rig.shard)
    rig.create("changing").waiting = Changing(error)  # type: ignore[assignment]
    rig.create("orders")

    depths = read(reader)["slatemq.queue.messages"]

    assert depths.keys() >= {("available",), ("delayed",)}
