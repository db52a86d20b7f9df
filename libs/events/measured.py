"""A backend whose events and tasks are counted, and whose state is known.

=============================  ====================================================
instrument                     what
=============================  ====================================================
`slatemq.queue.published`      events and tasks that the backend has
`slatemq.queue.consumed`       events acknowledged, tasks completed
`slatemq.queue.failed`         publishes, deliveries and attempts that failed
`slatemq.queue.pending`        tasks that are neither complete nor dead letters
`slatemq.queue.dead_letter`    tasks and events in the dead-letter place
`slatemq.queue.latency_ms`     from the event or the task until it was published, or
                               finished
=============================  ====================================================

The two gauges are of the last look at the backend, which `watch` repeats.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry import metrics

from libs.events.backend import BackendStats, Handler, QueueBackend
from libs.events.tasks import FailedTask, UnreadableTask, WriteTask
from libs.events.wall_clock import now_ms
from slatemq.errors import SlateMQError
from slatemq.events.envelope import Event, parse_timestamp

__all__ = ["MeasuredBackend", "QueueHealth"]

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""How often `watch` looks at the backend."""

FRESH_S: Final = 1.0
"""For how long a look answers those who ask: many probes cost the backend no more than one."""

STATS_S: Final = 5.0

BOUNDS_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 60_000, 600_000)

EVENT: Final = "event"
TASK: Final = "task"


@dataclass(frozen=True)
class QueueHealth:
    """The state of a backend, as `GET /health` tells it; while it is away its counts are the last.

    Attributes:
        backend: Its name in the settings.
        connected: Whether it answers.
        pending_tasks: Tasks that are neither complete nor dead letters.
        dead_letter_count: Tasks and events in the dead-letter place.
    """

    backend: str
    connected: bool
    pending_tasks: int
    dead_letter_count: int


class MeasuredBackend:
    """A QueueBackend around another."""

    def __init__(
        self,
        inner: QueueBackend[Any],
        name: str,
        meter: metrics.Meter,
        monotonic_s: Callable[[], float] = time.monotonic,
        *,
        has_gauges: bool = True,
    ) -> None:
        """`name` is that of the backend in the settings.

        `has_gauges` is for one backend of a process: another one's values would stand beside them.
        """
        self._inner = inner
        self._monotonic_s = monotonic_s
        self._attributes = {"slatemq.queue.backend": name}
        self._facts = {
            (kind, operation): self._attributes
            | {"slatemq.queue.kind": kind, "slatemq.queue.operation": operation}
            for kind in (EVENT, TASK)
            for operation in ("publish", "consume")
        }
        self._health = QueueHealth(name, False, 0, 0)
        self._looked_at_s: float | None = None
        self._looking = asyncio.Lock()
        self._delivered: dict[str, Event] = {}
        self._dequeued: dict[str, WriteTask] = {}
        self._published = meter.create_counter(
            "slatemq.queue.published", description="Events and tasks that the backend has"
        )
        self._consumed = meter.create_counter(
            "slatemq.queue.consumed", description="Events acknowledged, and tasks completed"
        )
        self._failed = meter.create_counter(
            "slatemq.queue.failed", description="Publishes, deliveries and attempts that failed"
        )
        self._latency_ms = meter.create_histogram(
            "slatemq.queue.latency_ms",
            description="ms from an event or a task until it was published, or finished",
            explicit_bucket_boundaries_advisory=BOUNDS_MS,
        )
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

    # --- State --------------------------------------------------------------

    async def health(self) -> QueueHealth:
        """The state now, or of a second ago; never raises."""
        async with self._looking:
            at_s = self._looked_at_s
            if at_s is None or self._monotonic_s() - at_s >= FRESH_S:
                self._health = await self._look()
                self._looked_at_s = self._monotonic_s()
        return self._health

    @property
    def was_connected(self) -> bool:
        """Whether the backend answered at the last look."""
        return self._health.connected

    async def watch(self) -> None:
        """Look until cancelled, for the gauges."""
        while True:
            await self.health()
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> QueueHealth:
        before = self._health
        is_connected = await self._inner.health_check()
        counts = BackendStats(before.pending_tasks, before.dead_letter_count)
        if is_connected:
            try:
                async with asyncio.timeout(STATS_S):
                    counts = await self._inner.stats()
            except (SlateMQError, TimeoutError) as error:
                log.info("the backend went away while it was looked at: %s", error)
                is_connected = False
        if is_connected != before.connected:
            log.info("%s is %s", before.backend, "connected" if is_connected else "away")
        return QueueHealth(
            before.backend, is_connected, counts.pending_tasks, counts.dead_letter_count
        )

    # --- Life cycle ---------------------------------------------------------

    async def connect(self, config: Any) -> None:
        """See QueueBackend."""
        await self._inner.connect(config)

    async def close(self) -> None:
        """See QueueBackend."""
        await self._inner.close()

    async def health_check(self) -> bool:
        """See QueueBackend."""
        return await self._inner.health_check()

    # --- Events -------------------------------------------------------------

    async def publish(self, event: Event) -> None:
        """See QueueBackend."""
        await self.publish_batch([event])

    async def publish_batch(self, events: Sequence[Event]) -> None:
        """See QueueBackend."""
        try:
            await self._inner.publish_batch(events)
        except SlateMQError:
            self._count(self._failed, EVENT, "publish", len(events))
            raise
        self._count(self._published, EVENT, "publish", len(events))
        for event in events:
            self._record(EVENT, "publish", event.timestamp)

    async def subscribe(self, event_types: Sequence[str], handler: Handler) -> None:
        """See QueueBackend."""

        async def counted(event: Event) -> None:
            self._delivered[event.id] = event
            try:
                await handler(event)
            finally:
                # Acknowledged events have gone from there.
                if self._delivered.pop(event.id, None) is not None:
                    self._count(self._failed, EVENT, "consume")

        await self._inner.subscribe(event_types, counted)

    async def acknowledge(self, event_id: str) -> None:
        """See QueueBackend."""
        await self._inner.acknowledge(event_id)
        event = self._delivered.pop(event_id, None)
        if event is not None:
            self._count(self._consumed, EVENT, "consume")
            self._record(EVENT, "consume", event.timestamp)

    # --- Tasks --------------------------------------------------------------

    async def enqueue_task(self, task: WriteTask) -> str:
        """See QueueBackend."""
        try:
            task_id = await self._inner.enqueue_task(task)
        except SlateMQError:
            self._count(self._failed, TASK, "publish")
            raise
        self._count(self._published, TASK, "publish")
        self._record(TASK, "publish", task.created_at)
        return task_id

    async def dequeue_task(self) -> WriteTask | None:
        """See QueueBackend."""
        task = await self._inner.dequeue_task()
        if task is not None:
            self._dequeued[task.task_id] = task
        return task

    async def complete_task(self, task_id: str) -> None:
        """See QueueBackend."""
        await self._inner.complete_task(task_id)
        task = self._dequeued.pop(task_id, None)
        if task is not None:
            self._count(self._consumed, TASK, "consume")
            self._record(TASK, "consume", task.created_at)

    async def fail_task(self, task_id: str, error: str) -> None:
        """See QueueBackend."""
        await self._inner.fail_task(task_id, error)
        if self._dequeued.pop(task_id, None) is not None:
            self._count(self._failed, TASK, "consume")

    async def retry_failed_tasks(self) -> int:
        """See QueueBackend."""
        return await self._inner.retry_failed_tasks()

    async def trim_tasks(self) -> bool:
        """See QueueBackend."""
        return await self._inner.trim_tasks()

    # --- What waits ---------------------------------------------------------

    async def stats(self) -> BackendStats:
        """See QueueBackend."""
        return await self._inner.stats()

    async def failed_tasks(self, limit: int) -> Sequence[FailedTask | UnreadableTask]:
        """See QueueBackend."""
        return await self._inner.failed_tasks(limit)

    # --- Measuring ----------------------------------------------------------

    def _observe(self, value: int) -> Iterable[metrics.Observation]:
        return [metrics.Observation(value, self._attributes)]

    def _count(self, counter: metrics.Counter, kind: str, operation: str, count: int = 1) -> None:
        counter.add(count, self._facts[kind, operation])

    def _record(self, kind: str, operation: str, since: str) -> None:
        latency_ms = max(0, now_ms() - parse_timestamp("since", since))
        self._latency_ms.record(latency_ms, self._facts[kind, operation])
