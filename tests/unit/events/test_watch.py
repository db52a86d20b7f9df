"""What a look at a backend finds that answers, and is slow to count."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.metrics import NoOpMeter

from libs.events import watch
from libs.events.backend import QueueBackend
from libs.events.watch import BackendWatch, QueueHealth
from slatemq.errors import Unavailable


class CountingBackend(QueueBackend):
    """Answers every ping; it has 7 tasks and 1 dead letter, unless `count` fails."""

    NAME = "counting"
    _translated = nullcontext

    async def open(self, config: Any) -> None:
        self._compose(SimpleNamespace(), SimpleNamespace(counts=self._counts))

    async def disconnect(self) -> None: ...

    async def ping(self) -> None: ...

    async def _counts(self) -> tuple[int, int]:
        await self.count()
        return 7, 1

    async def count(self) -> None: ...


async def test_a_backend_that_is_slow_to_count_is_connected_and_keeps_its_last_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a backend that was counted
    backend = CountingBackend()
    await backend.connect(None)
    looks = BackendWatch(backend, "redis", NoOpMeter("slatemq"), iter(range(0, 100, 10)).__next__)
    counted = QueueHealth("redis", True, 7, 1)
    assert await looks.health() == counted

    # When its counts take too long, then it is connected
    monkeypatch.setattr(watch, "STATS_S", 0.01)
    monkeypatch.setattr(backend, "count", asyncio.Event().wait)
    assert await looks.health() == counted
    assert looks.was_connected

    # When it cannot be reached to count, then it is not
    async def fail() -> None:
        raise Unavailable("gone")

    monkeypatch.setattr(backend, "count", fail)
    assert await looks.health() == QueueHealth("redis", False, 7, 1)
