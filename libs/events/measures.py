"""Counters of what goes through a backend.

=============================  ====================================================
instrument                     what
=============================  ====================================================
`slatemq.queue.published`      events and tasks that the backend has
`slatemq.queue.consumed`       events acknowledged, tasks completed
`slatemq.queue.failed`         publishes, deliveries and attempts that failed
`slatemq.queue.latency_ms`     from the event or the task until it was published, or
                               finished
=============================  ====================================================
"""

from __future__ import annotations

from typing import Final

from opentelemetry.metrics import Counter, Meter

from slatemq.events.envelope import parse_timestamp
from slatemq.models import now_ms

BOUNDS_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 60_000, 600_000)

EVENT: Final = "event"
TASK: Final = "task"

BACKEND: Final = "slatemq.queue.backend"
"""The attribute that names the backend as the settings do."""


class QueueMeasures:
    """The instruments of one backend."""

    def __init__(self, name: str, meter: Meter) -> None:
        self._attributes = {
            (kind, operation): {
                BACKEND: name,
                "slatemq.queue.kind": kind,
                "slatemq.queue.operation": operation,
            }
            for kind in (EVENT, TASK)
            for operation in ("publish", "consume")
        }
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
        # Shown as 0 from the start: an alert on a counter that is absent never fires.
        for (_, operation), attributes in self._attributes.items():
            (self._published if operation == "publish" else self._consumed).add(0, attributes)
            self._failed.add(0, attributes)

    def note_published(self, kind: str, since: str) -> None:
        """`since`: the time of the event, or when the task was accepted."""
        self._note(self._published, kind, "publish", since)

    def note_consumed(self, kind: str, since: str) -> None:
        self._note(self._consumed, kind, "consume", since)

    def note_failed(self, kind: str, operation: str, count: int = 1) -> None:
        self._failed.add(count, self._attributes[kind, operation])

    def _note(self, counter: Counter, kind: str, operation: str, since: str) -> None:
        attributes = self._attributes[kind, operation]
        counter.add(1, attributes)
        latency_ms = max(0, now_ms() - parse_timestamp("since", since))
        self._latency_ms.record(latency_ms, attributes)
