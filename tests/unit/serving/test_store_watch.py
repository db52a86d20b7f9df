"""What a store that hangs does to the health of a process that can, or cannot, do without it."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from libs.serving.process.health import Health
from libs.serving.process.store_watch import A_READ, HUNG_MS, StoreWatch


class Watched:
    """A watch whose store and whose other backend a test lets hang."""

    def __init__(self) -> None:
        self.waiting_ms = self.reading_ms = 0
        self.can_do_without = True
        self.health = Health(["slatemq.v1.IngestService"])
        self._reader = InMemoryMetricReader()
        self._watch = StoreWatch(
            self.health,
            lambda: {"a commit": self.waiting_ms, A_READ: self.reading_ms},
            MeterProvider([self._reader]).get_meter("test"),
            lambda: self.can_do_without,
        )

    async def look(self) -> bool:
        await self._watch.look()
        return self.health.is_serving

    def metric_ms(self) -> object:
        """What the gauge of the metrics shows."""
        metrics_data = self._reader.get_metrics_data()
        assert metrics_data is not None
        (gauge,) = metrics_data.resource_metrics[0].scope_metrics[0].metrics
        assert gauge.name == "slatemq.store.waiting"
        (point,) = gauge.data.data_points
        return getattr(point, "value", None)


async def test_the_metric_of_a_store_that_hangs_rises_and_falls() -> None:
    watched = Watched()
    for waiting_ms in (0, 500, HUNG_MS, 0):
        watched.waiting_ms = waiting_ms
        await watched.look()
        assert watched.metric_ms() == waiting_ms


async def test_a_read_that_hangs_is_reported_and_stops_no_other_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched()
    watched.can_do_without = False
    await watched.health.serving()
    watched.reading_ms = HUNG_MS
    assert await watched.look()
    assert f"has not answered for 10 s: {A_READ} waits" in caplog.text
    assert watched.metric_ms() == HUNG_MS

    watched.waiting_ms = HUNG_MS
    assert not await watched.look()
    watched.waiting_ms = 0
    assert await watched.look()
    watched.reading_ms = 0
    await watched.look()
    assert "the object store answers again" in caplog.text


async def test_a_process_that_can_do_without_its_store_serves_while_that_hangs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched()
    await watched.health.serving()
    # Given a store that hangs
    watched.waiting_ms = HUNG_MS
    assert await watched.look()
    assert "the object store has not answered for 10 s" in caplog.text

    # When what it did with instead is down, too, then it does not serve until one of them is back
    watched.can_do_without = False
    assert not await watched.look()
    assert "a commit waits" in watched.health.reason
    watched.can_do_without = True
    assert await watched.look()
    watched.can_do_without = False
    assert not await watched.look()
    watched.waiting_ms = 0
    assert await watched.look()


async def test_the_metric_asks_nothing_that_changes_beside_its_own_thread() -> None:
    watched = Watched()
    watched.waiting_ms = HUNG_MS
    await watched.look()

    watched.waiting_ms = 0

    assert watched.metric_ms() == HUNG_MS, "what was seen last, until the next look"
