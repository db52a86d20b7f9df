"""Where delayed messages go: into buckets of their time that only one commit writes.

What another commit adds for the same time goes into buckets with higher numbers. So no bucket has
to be read to add a message, however much waits in the database, and no bucket has more than
TIMED_BUCKET_MAX messages, however many are due together.
"""

from __future__ import annotations

from libs.storage.layout.buckets import MAX_ORDER_MS, BucketKind, lane_order, number_of, order_of
from libs.storage.records.queues import AvailableMessage
from services.broker.core.waiting.bucket import Bucket
from services.broker.core.waiting.lane import Lane
from services.broker.core.waiting.orders import Orders

TIMED_BUCKET_MAX = 500
"""Messages in a timed bucket at most: a claim that leaves some behind writes them again."""

TIMED_LAST_MS = MAX_ORDER_MS - (1 << 20)
"""The latest time for which there are buckets (2248); what is due later is due then."""


def leaves_at(item: AvailableMessage) -> int:
    """When a delayed message leaves its lane: to be claimed, or past its retention."""
    return min(item.visible_at_ms, item.retention_deadline_ms or item.visible_at_ms, TIMED_LAST_MS)


class OpenTimedBuckets:
    """The timed buckets of one queue that the next commit writes for the first time."""

    __slots__ = ("_by_time", "_number", "_orders")

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._by_time: dict[tuple[int, int], Bucket] = {}  # by priority and order
        self._number = 0  # the highest one used since the last commit

    def add(self, lane: Lane, item: AvailableMessage) -> Bucket:
        """Adds a message behind all others of its time; returns the bucket."""
        time = order_of(lane.epoch, leaves_at(item), 0)
        bucket = self._by_time.get((lane.priority, time))
        if bucket is None or lane.find(bucket.order) is not bucket:
            return self._begin(lane, time, 0, item)
        if bucket.count >= TIMED_BUCKET_MAX:
            return self._begin(lane, time, number_of(bucket.order), item)
        lane.extend(bucket, [item])
        return bucket

    def _begin(self, lane: Lane, time: int, after: int, item: AvailableMessage) -> Bucket:
        """Begins a bucket whose number is above `after` and was in no commit before."""
        if self._number <= after:
            self._number = number_of(self._orders.next(0))
        bucket = Bucket(lane_order(BucketKind.TIMED, time, self._number), [item])
        lane.add(bucket)
        self._by_time[lane.priority, time] = bucket
        return bucket

    def close(self) -> None:
        """Notes that a commit has them: later messages go into others."""
        if self._number:
            self._by_time.clear()
            self._number = 0
