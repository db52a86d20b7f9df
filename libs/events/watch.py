"""The state of a backend, looked at now and then.

=============================  ====================================================
instrument                     what
=============================  ====================================================
`slatemq.queue.pending`        tasks that are neither complete nor dead letters
`slatemq.queue.dead_letter`    tasks and events in the dead-letter place
=============================  ====================================================
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from opentelemetry.metrics import Meter, Observation

from libs.events.backend import BackendStats, QueueBackend
from libs.events.measures import BACKEND
from slatemq.errors import SlateMQError

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""How often `watch` looks at the backend."""

FRESH_S: Final = 1.0
"""For how long a look answers callers: many probes cost the backend no more than one."""

STATS_S: Final = 5.0
"""How long a look waits for counts."""


@dataclass(frozen=True)
class QueueHealth:
    """The state of a backend, as in `GET /health`.

    Attributes:
        backend: Its name in the settings.
        connected: Whether it answers, and takes what it is given.
        pending_tasks: Tasks that are neither complete nor dead letters. None where it is down, or
            takes too long to count: the last number would pass for this one.
        dead_letter_count: Tasks and events in the dead-letter place; None likewise.
    """

    backend: str
    connected: bool
    pending_tasks: int | None = None
    dead_letter_count: int | None = None


class BackendWatch:
    def __init__(
        self,
        backend: QueueBackend,
        name: str,
        meter: Meter,
        monotonic_s: Callable[[], float] = time.monotonic,
        *,
        has_gauges: bool = True,
    ) -> None:
        """`has_gauges`: for one backend of a process, so that each gauge has one value."""
        self._backend = backend
        self._monotonic_s = monotonic_s
        self._attributes = {BACKEND: name}
        self._health = QueueHealth(name, False)
        self._looked_at_s: float | None = None
        self._looking = asyncio.Lock()
        if not has_gauges:
            return
        meter.create_observable_gauge(
            "slatemq.queue.pending",
            callbacks=[lambda _: self._observe(self._health.pending_tasks)],
            description="Tasks that are neither complete nor dead letters",
        )
        meter.create_observable_gauge(
            "slatemq.queue.dead_letter",
            callbacks=[lambda _: self._observe(self._health.dead_letter_count)],
            description="Tasks and events in the dead-letter place",
        )

    async def health(self) -> QueueHealth:
        """The state now, or of a second ago; never raises."""
        async with self._looking:
            at_s = self._looked_at_s
            if at_s is None or self._monotonic_s() - at_s >= FRESH_S:
                self._health = await self._look()
                self._looked_at_s = self._monotonic_s()
        health = self._health
        return replace(health, connected=health.connected and not self._backend.refusal)

    @property
    def was_connected(self) -> bool:
        """Whether the backend answered at the last look, whatever it refuses."""
        return self._health.connected

    async def watch(self) -> None:
        """Look until cancelled, for the gauges."""
        while True:
            await self.health()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> QueueHealth:
        before = self._health
        is_connected = await self._backend.health_check()
        counts: BackendStats | None = None
        if is_connected:
            try:
                async with asyncio.timeout(STATS_S):
                    counts = await self._backend.stats()
            except TimeoutError:
                log.info("%s counts for over %g s: it has no counts now", before.backend, STATS_S)
            except SlateMQError as error:
                log.info("the backend went down while it was looked at: %s", error)
                is_connected = False
        if is_connected != before.connected:
            log.info("%s is %s", before.backend, "connected" if is_connected else "down")
        if counts is None:
            return QueueHealth(before.backend, is_connected)
        return QueueHealth(
            before.backend, is_connected, counts.pending_tasks, counts.dead_letter_count
        )

    def _observe(self, count: int | None) -> Iterable[Observation]:
        return [] if count is None else [Observation(count, self._attributes)]
