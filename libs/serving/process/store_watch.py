"""A store that hangs is seen: in the log, in a metric, and in the health of the process.

SlateDB waits for its store silently, and gives up after a while or never; meanwhile all callers of
the process wait, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from opentelemetry import metrics

from libs.serving.process.health import Health

log = logging.getLogger(__name__)

LOOK_S: Final = 0.5
"""How often the watch looks."""

SLOW_MS: Final = 3_000
"""A commit takes 1 ms on a disk and 50 ms on S3: this is worth a line in the log."""

HUNG_MS: Final = 10_000
"""From here on the process is not serving, unless it can do without the store: calls between
services have ended by their deadlines."""

A_READ: Final = "a read of the database"
"""Holds up its own callers alone: with nothing but that, the process serves on."""

SAY_AGAIN_S: Final = 30.0
"""How often the log repeats that the store is still silent."""


class StoreWatch:
    """Reports operations of the store that keep an owner waiting."""

    def __init__(
        self,
        health: Health,
        waits_ms: Callable[[], Mapping[str, int]],
        meter: metrics.Meter,
        serves_without: Callable[[], bool] = lambda: False,
    ) -> None:
        """`waits_ms` returns how long the store has not answered, by what waits for it.

        `serves_without`: whether the process serves all the same now.
        """
        self._health = health
        self._waits_ms = waits_ms
        self._serves_without = serves_without
        self._waiting_ms = 0
        self._is_hung = False
        self._said_at_ms = 0
        meter.create_observable_gauge(
            "slatemq.store.waiting",
            callbacks=[self._observe],
            unit="ms",
            description="How long the object store has not answered; 0: nothing waits for it",
        )

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        waits_ms = self._waits_ms()
        what = max(waits_ms, key=lambda one: waits_ms[one])
        before_ms, self._waiting_ms = self._waiting_ms, waits_ms[what]
        if self._waiting_ms < SLOW_MS:
            if self._said_at_ms:
                log.warning("the object store answers again, after %.0f s", before_ms / 1000)
                self._said_at_ms = 0
            await self._serve_again()
            return
        said = f"the object store has not answered for {self._waiting_ms // 1000} s: {what} waits"
        if not self._said_at_ms or self._waiting_ms - self._said_at_ms > SAY_AGAIN_S * 1000:
            self._said_at_ms = self._waiting_ms
            log.warning("%s", said)
        if self._waiting_ms < HUNG_MS:
            return
        if self._serves_without() or not any(
            ms >= HUNG_MS for one, ms in waits_ms.items() if one != A_READ
        ):
            await self._serve_again()
        else:
            if not self._is_hung:
                log.error("not serving: %s", said)
            self._is_hung = True
            await self._health.not_serving(said)

    async def _serve_again(self) -> None:
        if self._is_hung:
            self._is_hung = False
            await self._health.serving()

    def _observe(self, _: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        # As of the last look: this is another thread, and what waits changes meanwhile.
        return [metrics.Observation(self._waiting_ms)]
