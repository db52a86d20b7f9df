"""More time for leases after a standstill, given in steps. Pure, like the shard.

Whoever was alive when time was lost could neither ack nor extend in it. Between two steps commands
may come and commits begin: a lease that ends is passed over, one claimed meanwhile has its time
anyway, and a crash leaves the rest to the grace of the restart. Only ending leases by the clock
must wait until all is given: see `ShardOwner`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from services.broker.core.leases.lease_bucket import LeaseBucket
from services.broker.core.leases.leases import GRACE_MS
from services.broker.core.queue import Queue

STEP_LEASES: Final = 4000
"""Leases that one step looks at at most, and those of a bucket more: some 5 ms."""

BUCKET_LEASES: Final = 16
"""What a bucket counts for where it has fewer leases: it is a record of its own."""


class LeaseGrace:
    """What is left of the leases that were alive at a time."""

    def __init__(self, queues: Iterable[Queue], since_ms: int, now_ms: int) -> None:
        """Give the leases of these queues that were alive at `since_ms` a grace from `now_ms` on.

        It is that of a restart: the lease's length, or GRACE_MS where that is shorter.
        """
        self.is_done = False
        self._since_ms = since_ms
        self._now_ms = now_ms
        self._buckets = _buckets_of([queue for queue in queues if queue.in_flight.count])

    def step(self) -> list[Queue]:
        """Goes on a little; gives the queues with leases that have more time now."""
        looked_at, changed = 0, dict[Queue, None]()
        for queue, bucket in self._buckets:
            if bucket.count and bucket.lengthen(self._since_ms, self._now_ms, GRACE_MS):
                queue.lengthened(bucket)
                changed[queue] = None
            looked_at += max(bucket.count, BUCKET_LEASES)
            if looked_at >= STEP_LEASES:
                return list(changed)
        self.is_done = True
        return list(changed)


def _buckets_of(queues: Iterable[Queue]) -> Iterator[tuple[Queue, LeaseBucket]]:
    for queue in queues:
        for bucket in list(queue.in_flight.buckets_from(0)):  # a deleted queue has none any more
            yield queue, bucket
