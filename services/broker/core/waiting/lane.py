"""A lane: the available messages of one queue that share a priority and a kind, in order.

A lane is a row of buckets, each one record in the database. Messages leave at the front; ready
messages join at the end, timed ones where their time puts them. Only a prefix of the lane is held
in memory, so that a lane of ten million costs what a lane of ten thousand does: see LaneMemory.

Of a timed lane it is known up to where the messages were counted whose time has come:

    [bucket][bucket] ... due_until | . . . [bucket] ...
     `due_count` messages            not due, or not counted yet
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Sequence

from libs.storage.layout.buckets import BucketKind, lane_order, last_lane_order, order_in_time
from libs.storage.records.queues import AvailableMessage
from libs.storage.records.states import LaneRecord
from services.broker.core.waiting import lane_cache
from services.broker.core.waiting.bucket import Bucket
from services.broker.core.waiting.lane_cache import BY_ORDER, COMPLETE, LaneMemory

READY_BUCKET_MAX = 1000
"""Messages in a bucket at most: a bucket is read whole, so this bounds what one claim must load."""

IsOver = Callable[[AvailableMessage], bool]
"""Whether a message must leave without being handed out."""


class Lane(LaneMemory):
    """See the module's text."""

    __slots__ = ("due_count", "due_until", "epoch", "kind", "priority")

    def __init__(self, priority: int, kind: BucketKind, epoch: int) -> None:
        super().__init__()
        self.priority = priority
        self.kind = kind
        self.epoch = epoch
        self.due_until = 0
        """The last order up to which the messages are counted whose time has come."""
        self.due_count = 0
        """How many messages wait up to there."""

    @classmethod
    def restore(cls, record: LaneRecord, epoch: int) -> Lane:
        """The lane as its queue's state record tells it; buckets are read when they are needed."""
        kind = BucketKind(record.kind)
        lane = cls(record.priority, kind, epoch)
        head = lane_order(kind, record.head_order)
        lane.count = record.waiting_count
        lane.tail = last_lane_order(kind, record.tail_order)
        lane._head_order = head
        lane._head_offset = record.head_offset
        lane._taken_until = head
        lane.known_until = head - 1 if record.waiting_count else COMPLETE
        return lane

    def record(self) -> LaneRecord:
        """The lane's part of the queue's state record."""
        if self._front < len(self._cached):
            head = self._cached[self._front]
            order, offset = head.order, head.start
        else:
            order, offset = self._head_order, self._head_offset
            if not self.complete and order < self.first_unknown:
                order, offset = self.first_unknown, 0
        kind, tail = self.kind, self.tail
        if kind is BucketKind.TIMED:
            order, tail = order_in_time(kind, order), order_in_time(kind, tail)
        return LaneRecord(self.priority, kind, order, offset, tail, self.count)

    @property
    def earliest_in_time(self) -> int | None:
        """As `earliest`, to be compared with orders of other lanes."""
        earliest = self.earliest
        return None if earliest is None else order_in_time(self.kind, earliest)

    # --- Messages join ------------------------------------------------------

    def add(self, bucket: Bucket) -> None:
        """Adds a bucket whose order no bucket of the lane has."""
        order, count = bucket.order, bucket.count
        self._came(order, count)
        self.changed[order] = bucket
        if order > self.tail and self.complete and self._cached_count < lane_cache.CACHED_MAX:
            # Behind all others, and all others are in memory: as it mostly is.
            self.tail = order
            self._cached.append(bucket)
            self._cached_count += count
            return
        if order in self._gone:
            bucket.stored = True  # the row that is being deleted is written again
            del self._gone[order]
        self._place(bucket)
        self.tail = max(self.tail, order)

    def _came(self, order: int, count: int) -> None:
        self.count += count
        if order <= self.due_until:
            self.due_count += count

    def _place(self, bucket: Bucket) -> None:
        order = bucket.order
        head = self.head
        last = self._cached[-1].order if head is not None else 0
        if order > self.known_until:
            self._overlay[order] = bucket
        elif self._ends_before(order, last):
            # Not at `last`: what lay between the two may be in the database still.
            self.known_until = order - 1
            self._overlay[order] = bucket
        else:
            self._cached_count += bucket.left
            if order > last:
                self._cached.append(bucket)
            else:
                if head is not None and order < head.order:
                    self._trim_head(head)
                insort(self._cached, bucket, lo=self._front, key=BY_ORDER)

    def _ends_before(self, order: int, last: int) -> bool:
        full = self.complete and self._cached_count >= lane_cache.CACHED_MAX
        return full and order > last and order > self._taken_until

    def extend(self, bucket: Bucket, items: Iterable[AvailableMessage]) -> None:
        """Adds messages at the end of a bucket that is in memory, and writes it again."""
        before = bucket.count
        bucket.append(items)
        added = bucket.count - before
        self._came(bucket.order, added)
        self.changed[bucket.order] = bucket
        self._gone.pop(bucket.order, None)
        if bucket.order <= self.known_until:
            self._cached_count += added
        else:
            self._overlay[bucket.order] = bucket

    # --- Messages leave -----------------------------------------------------

    def taken(self, bucket: Bucket, until: int, kept: Sequence[int]) -> None:
        """Removes the messages of a cached bucket before index `until`, but for those `kept`."""
        removed = until - bucket.start - len(kept)
        self._cached_count -= removed
        self._taken_until = max(self._taken_until, bucket.order)
        self._left(bucket.order, removed)
        if kept:
            bucket.keep(until, kept)
            self.changed[bucket.order] = bucket
        else:
            bucket.start = until

    def _left(self, order: int, count: int) -> None:
        self.count -= count
        if order <= self.due_until:
            self.due_count -= count
        if not self.count:
            self.known_until = COMPLETE  # whatever was not read in cannot hold anything

    def settle(self, visited: int) -> None:
        """After messages of the first `visited` buckets were taken: drops the empty ones.

        Only the head of a ready lane may keep an offset, since the state record has room for one;
        another bucket from which messages were taken is written again.
        """
        cached, front = self._cached, self._front
        end = min(front + visited, len(cached))
        left = []
        for bucket in cached[front:end]:
            if bucket.left:
                left.append(bucket)
            else:
                self._drop(bucket)
        for bucket in left[self.kind is BucketKind.READY :]:
            self._trim_head(bucket)
        self._front = end - len(left)
        cached[self._front : end] = left
        if self._front == len(cached) or self._front > 512:
            del cached[: self._front]
            self._front = 0

    def _drop(self, bucket: Bucket) -> None:
        self._head_order, self._head_offset = bucket.order + 1, 0
        if bucket.stored:
            self.changed[bucket.order] = None
        else:
            self.changed.pop(bucket.order, None)

    def put_back(self, order: int, items: Sequence[tuple[int, AvailableMessage]]) -> None:
        """Returns messages that were taken from the bucket of this order: (place, message)."""
        bucket = self.find(order)
        if bucket is None:
            bucket = Bucket(order, [], stored=True)
            bucket.insert(items)
            self.add(bucket)
            return
        bucket.insert(items)
        self._came(order, len(items))
        self._cached_count += len(items)
        self.changed[order] = bucket

    def _trim_head(self, bucket: Bucket) -> None:
        if bucket.start:
            bucket.trim()
            self.changed[bucket.order] = bucket

    def remove(self, bucket: Bucket, indexes: Collection[int]) -> None:
        """Removes messages from a bucket that `find` gave, wherever it lies."""
        order = bucket.order
        in_cache = order <= self.known_until
        if order == self._head_order:
            self._head_offset = 0
        bucket.remove(indexes)
        self.changed[order] = bucket
        if in_cache:
            self._cached_count -= len(indexes)
        else:
            self._overlay[order] = bucket
        if not bucket.count:
            self._vanish(order, bucket)
        self._left(order, len(indexes))

    def _vanish(self, order: int, bucket: Bucket) -> None:
        index = self._cached_index(order)
        if index is not None:
            del self._cached[index]
        self._overlay.pop(order, None)
        if bucket.stored:
            self.changed[order] = None
            self._gone[order] = 0
        else:
            del self.changed[order]

    # --- Time comes ---------------------------------------------------------

    def look_at_due(self, until_order: int, is_over: IsOver, limit: int) -> int:
        """Counts what is due up to an order, and removes what must leave, as far as memory knows.

        Looks at about `limit` messages and gives how many; `due_until` tells how far it came.
        """
        looked_at = 0
        for bucket in self.cached_between(self.due_until + 1, until_order):
            if looked_at >= limit:
                return looked_at
            looked_at += bucket.left
            self._is_due(bucket, is_over)
        self.due_until = max(self.due_until, min(until_order, self.known_until))
        return looked_at

    def _is_due(self, bucket: Bucket, is_over: IsOver) -> None:
        self.due_until = bucket.order
        self.due_count += bucket.left
        items = bucket.items
        over = {index for index in range(bucket.start, len(items)) if is_over(items[index])}
        if over:
            self.remove(bucket, over)

    def offer_due(
        self,
        rows: Sequence[tuple[int, list[AvailableMessage]]],
        first: int,
        through: int,
        is_over: IsOver,
    ) -> None:
        """As `look_at_due` for what was read between two orders; `first` follows `due_until`."""
        read = dict(rows)
        for order, items in self.merged(rows, first, through):
            if order in read and any(map(is_over, items)):
                self.pin(order, read[order])
            bucket = self.find(order)
            if bucket is None:
                self.due_count += len(items)
            else:
                self._is_due(bucket, is_over)
        self.due_until = through

    def due_now(self, until_order: int) -> int:
        """How many messages are due up to an order, as far as memory tells."""
        later = self.cached_between(self.due_until + 1, until_order)
        return self.due_count + sum(bucket.left for bucket in later)
