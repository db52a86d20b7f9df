"""More time for leases after a standstill, given in steps. Pure, like the shard.

While time was lost, no consumer could ack or extend. Between two steps commands may run and commits
begin: a lease that ends is skipped, one claimed meanwhile has its full time anyway, and a crash
leaves the rest to the grace of the restart. Only the end of leases by the clock must wait for the
last step: see `ShardOwner`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from services.broker.core.leases.lease_bucket import LeaseBucket
from services.broker.core.leases.leases import GRACE_MS
from services.broker.core.queue import Queue

STEP_LEASES: Final = 4000
"""Leases of one step at most, plus those of one bucket: some 5 ms."""

BUCKET_LEASES: Final = 16
"""What a bucket with fewer leases counts for: it is a record of its own."""


class LeaseGrace:
    """The leases that were alive at a time, as far as they have no grace yet."""

    def __init__(self, queues: Iterable[Queue], since_ms: int, now_ms: int) -> None:
        """Give the leases of these queues that were alive at `since_ms` a grace from `now_ms` on.

        It is that of a restart: the lease's length, or GRACE_MS where that is shorter.
        """
        self.is_done = False
        self._since_ms = since_ms
        self._now_ms = now_ms
        self._buckets = _buckets_of([queue for queue in queues if queue.leases.count])

    def step(self) -> list[Queue]:
        """Goes on a little; returns the queues with leases that have more time now."""
        looked_at, changed = 0, dict[Queue, None]()
        for queue, bucket in self._buckets:
            if bucket.count and bucket.lengthen(self._since_ms, self._now_ms, GRACE_MS):
                queue.leases.note_changed(bucket)
                changed[queue] = None
            looked_at += max(bucket.count, BUCKET_LEASES)
            if looked_at >= STEP_LEASES:
                return list(changed)
        self.is_done = True
        return list(changed)


def _buckets_of(queues: Iterable[Queue]) -> Iterator[tuple[Queue, LeaseBucket]]:
    for queue in queues:
        for bucket in list(queue.leases.buckets_from(0)):  # a deleted queue has none any more
            yield queue, bucket
