"""What a look at a backend finds that answers: it is slow to count, or refuses calls."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.metrics import NoOpMeter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from libs.events import watch
from libs.events.backend import QueueBackend
from libs.events.watch import BackendWatch, QueueHealth
from slatemq.errors import FailedPrecondition, Unavailable


class CountingBackend(QueueBackend):
    """Answers every ping; it has 7 tasks and 1 dead letter, unless `count` fails."""

    NAME = "counting"
    _translated = nullcontext

    async def open(self, config: Any) -> None:
        tasks = SimpleNamespace(counts=self._counts, dequeue=lambda: self.dequeue())
        self._compose(SimpleNamespace(), tasks)

    async def disconnect(self) -> None: ...

    async def ping(self) -> None: ...

    async def _counts(self) -> tuple[int, int]:
        await self.count()
        return 7, 1

    async def count(self) -> None: ...

    async def dequeue(self) -> None: ...


async def refuse() -> None:
    raise FailedPrecondition("REFUSED", "no permission")


def gauges(reader: InMemoryMetricReader) -> dict[str, int]:
    """The gauges that have a value now."""
    data: Any = reader.get_metrics_data()
    return {
        metric.name: metric.data.data_points[0].value
        for resource in (data.resource_metrics if data is not None else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


async def test_a_backend_that_is_slow_to_count_is_connected_and_has_no_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a backend that has never been counted
    backend = CountingBackend()
    await backend.connect(None)
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("slatemq")
    looks = BackendWatch(backend, "redis", meter, iter(range(0, 100, 10)).__next__)

    # When its counts take too long, then it is connected, and not taken for empty
    with monkeypatch.context() as slow:
        slow.setattr(watch, "STATS_S", 0.01)
        slow.setattr(backend, "count", asyncio.Event().wait)
        assert await looks.health() == QueueHealth("redis", True)
        assert looks.was_connected
        assert gauges(reader) == {}

    # When it counts in time, then it has counts
    assert await looks.health() == QueueHealth("redis", True, 7, 1)
    assert gauges(reader) == {"slatemq.queue.pending": 7, "slatemq.queue.dead_letter": 1}

    # When it is slow again, then those are not taken for new ones
    monkeypatch.setattr(watch, "STATS_S", 0.01)
    monkeypatch.setattr(backend, "count", asyncio.Event().wait)
    assert await looks.health() == QueueHealth("redis", True)
    assert gauges(reader) == {}

    # When it cannot be reached to count, then it is not
    async def fail() -> None:
        raise Unavailable("gone")

    monkeypatch.setattr(backend, "count", fail)
    assert await looks.health() == QueueHealth("redis", False)


async def test_a_backend_that_refuses_a_call_is_unhealthy_and_still_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a backend that answers, and refuses to give tasks
    backend = CountingBackend()
    await backend.connect(None)
    looks = BackendWatch(backend, "redis", NoOpMeter("slatemq"), iter(range(0, 100, 10)).__next__)
    with monkeypatch.context() as refusing:
        refusing.setattr(backend, "dequeue", refuse)
        with pytest.raises(Unavailable, match="no permission"):
            await backend.dequeue_task()

    # Then its health says so, and it takes publishes nonetheless, as far as anyone knows
    assert await looks.health() == QueueHealth("redis", False, 7, 1)
    assert looks.was_connected

    # When it gives tasks again, then it is well
    await backend.dequeue_task()
    assert await looks.health() == QueueHealth("redis", True, 7, 1)
