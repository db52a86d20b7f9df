"""What a process sends to a collector."""

from __future__ import annotations

import pytest

from libs.serving.telemetry import configure
from services.broker.metrics import measure
from tests.integration.serving.otlp_collector import OtlpCollector, collecting
from tests.integration.waiting import eventually
from tests.unit.broker.core.shards import Rig


@pytest.fixture
def crowded() -> Rig:
    """A shard of 2,500 queues with the longest names."""
    rig = Rig()
    for number in range(2_500):
        rig.create(f"{number:0255}")
    return rig


async def test_a_collector_gets_all_series_of_2_500_queues_with_the_longest_names(
    crowded: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
    names = set(crowded.shard.queues)
    with collecting() as (collector, url):
        telemetry = configure("broker", "host/broker-0", url)
        telemetry.meter.create_counter("a").add(1)
        measure(telemetry, crowded.shard)
        await eventually(lambda: _queues(collector, "slatemq.queue.expired.messages") == names)
        telemetry.shutdown()

    assert _queues(collector, "slatemq.queue.messages") == names


def _queues(collector: OtlpCollector, name: str) -> set[str]:
    """The queues of which a metric came."""
    return {
        attribute.value.string_value
        for point in collector.points(name)
        for attribute in point.attributes
        if attribute.key == "messaging.destination.name"
    }
