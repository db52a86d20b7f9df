"""What a store that hangs does to the health of a process that can, or cannot, do without it."""

from __future__ import annotations

import pytest
from opentelemetry import metrics

from libs.serving.health import Health
from libs.serving.store_watch import HUNG_MS, StoreWatch


class Watched:
    """A watch whose store and whose other backend a test lets hang."""

    def __init__(self) -> None:
        self.waiting_ms = 0
        self.can_do_without = True
        self.health = Health(["slatemq.v1.IngestService"])
        self._watch = StoreWatch(
            self.health,
            lambda: {"a commit": self.waiting_ms},
            metrics.NoOpMeter("test"),
            lambda: self.can_do_without,
        )

    async def look(self) -> bool:
        await self._watch.look()
        return self.health.is_serving


async def test_a_process_that_can_do_without_its_store_serves_while_that_hangs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched()
    await watched.health.serving()
    # Given a store that hangs
    watched.waiting_ms = HUNG_MS
    assert await watched.look()
    assert "the object store has not answered for 10 s" in caplog.text

    # When what it did with instead is away, too, then it does not serve until one of them is back
    watched.can_do_without = False
    assert not await watched.look()
    assert "a commit waits" in watched.health.reason
    watched.can_do_without = True
    assert await watched.look()
    watched.can_do_without = False
    assert not await watched.look()
    watched.waiting_ms = 0
    assert await watched.look()
