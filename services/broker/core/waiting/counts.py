"""How many messages of a queue wait, by priority."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from libs.storage.layout.buckets import BucketKind, split_order
from services.broker.core.waiting.lane import Lane


@dataclass(frozen=True, slots=True)
class Counts:
    """What waits in a queue at one moment.

    `by_priority` has (priority, available, delayed), ascending; `oldest_claimable_ms` is how long
    the oldest claimable message has been claimable, None if there is none.
    """

    available: int
    delayed: int
    by_priority: tuple[tuple[int, int, int], ...]
    oldest_claimable_ms: int | None


def counts_of(lanes: Iterable[Lane], due_until: int, now_ms: int) -> Counts:
    """The counts of these lanes; timed messages up to the order `due_until` are available."""
    by_priority: dict[int, tuple[int, int]] = {}
    oldest = []
    for lane in lanes:
        if not lane.count:
            continue
        available, delayed = by_priority.get(lane.priority, (0, 0))
        claimable = lane.count if lane.kind == BucketKind.READY else lane.due_now(due_until)
        if claimable and lane.earliest_in_time is not None:
            oldest.append(split_order(lane.earliest_in_time).ms)
        by_priority[lane.priority] = (available + claimable, delayed + lane.count - claimable)
    return Counts(
        available=sum(available for available, _ in by_priority.values()),
        delayed=sum(delayed for _, delayed in by_priority.values()),
        by_priority=tuple((name, *counts) for name, counts in sorted(by_priority.items())),
        oldest_claimable_ms=max(0, now_ms - min(oldest)) if oldest else None,
    )
