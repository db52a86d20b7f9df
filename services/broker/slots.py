"""The milliseconds of a timed lane: which bucket a message joins, and what must be read before.

A message joins the last bucket of its millisecond, or begins the next one when that is full; a
millisecond whose buckets are all full passes it on to the next millisecond. So the last bucket must
be known before: that of a lane in the database only is read, and remembered for the next message.
"""

from __future__ import annotations

from collections.abc import Sequence

from libs.storage.buckets import MAX_ORDER_MS, MAX_ORDER_N, order_of
from libs.storage.queues import AvailableMessage
from services.broker.lanes import TIMED_BUCKET_MAX, Lane
from services.broker.waiting_buckets import Bucket

LAST_N = MAX_ORDER_N
"""The last bucket of a millisecond."""

MILLISECOND = MAX_ORDER_N + 1
"""From an order to that of the next millisecond."""

TIMED_LAST_MS = MAX_ORDER_MS - (1 << 20)
"""The latest time for which there are buckets (2248); what is due later is due then."""


def leaves_at(visible_at_ms: int, deadline_ms: int) -> int:
    """When a delayed message leaves its lane: to be claimed, or past its retention."""
    return min(visible_at_ms, deadline_ms or visible_at_ms)


def unknown_slot(lane: Lane, leaves_ms: int) -> int | None:
    """The first order of a millisecond that must be read before `join`, if any."""
    first, last = _slot(lane, leaves_ms)
    if not lane.knows(first, first + LAST_N):
        return first
    after = first + MILLISECOND
    if _is_full(last) and not lane.knows(after, after + LAST_N):
        return after
    return None


def tell_slot(
    lane: Lane, first_order: int, rows: Sequence[tuple[int, list[AvailableMessage]]]
) -> None:
    """Tells a lane which buckets of a millisecond are in the database, ascending."""
    rows = [row for row in rows if not lane.has_none(row[0])]
    bucket = Bucket(*rows[-1], stored=True) if rows else None
    in_memory = lane.last_between(first_order, first_order + LAST_N)
    if bucket is None or (in_memory is not None and in_memory.order >= bucket.order):
        bucket = in_memory  # the read began before this was written
    lane.remember(first_order, bucket)


def join(lane: Lane, leaves_ms: int, item: AvailableMessage) -> Bucket:
    """Adds a message to its millisecond; gives the bucket. See `unknown_slot`."""
    first, bucket = _slot(lane, leaves_ms)
    full = bucket is not None and bucket.count >= TIMED_BUCKET_MAX
    if bucket is not None and (not full or bucket.order & LAST_N == LAST_N):
        lane.extend(bucket, [item])
    else:
        bucket = Bucket(bucket.order + 1 if bucket else first, [item])
        lane.add(bucket)
    if first + LAST_N > lane.known_until:
        lane.remember(first, bucket)
    return bucket


def _slot(lane: Lane, leaves_ms: int) -> tuple[int, Bucket | None]:
    """The first order of the millisecond to which a message is added, and its last bucket.

    A millisecond whose buckets are all full passes on to the next one, if that is known.
    """
    first = order_of(lane.epoch, min(leaves_ms, TIMED_LAST_MS), 0)
    while True:
        bucket = lane.last_known(first, first + LAST_N)
        if not _is_full(bucket):
            return first, bucket
        after = first + MILLISECOND
        if not lane.knows(after, after + LAST_N):
            return first, bucket
        first = after


def _is_full(bucket: Bucket | None) -> bool:
    """Whether this is the last bucket that its millisecond has, and full."""
    if bucket is None or bucket.order & LAST_N != LAST_N:
        return False
    return bucket.count >= TIMED_BUCKET_MAX
