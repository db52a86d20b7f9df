"""A lane: the available messages of one queue that share a priority and a kind, in order.

A lane is a row of buckets, each one record in the database. Messages leave at the front; ready
messages join at the end, timed ones where their time puts them. Only a prefix of the lane is held
in memory, so a lane of ten million costs what a lane of ten thousand does:

    cached (from the head, without a gap)         not in memory           overlay
    [bucket][bucket][bucket] ... known_until | . . . . . . . . . . | [bucket] [bucket]
     ^ head, its first `start` messages removed                       not durable yet, or open

The overlay holds what was added or changed beyond the cached prefix until the commit that writes
it is durable: until then the database cannot return it. For the same time the lane remembers which
buckets were removed out of turn: a read that began earlier must not bring them back.

Claims pass over messages that cannot be had now. Where these are all of the prefix, what lies
beyond is read as well, and of it those buckets are pinned in the overlay that have others:

    [bucket] ... known_until | . . . [bucket] . . . passed_until | . . . not read

A timed lane knows how many messages are due up to the order to which it has counted them:

    [bucket][bucket] ... due_until | . . . [bucket] ...
     `due_count` messages            not due, or not counted yet
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from operator import attrgetter

from libs.storage.layout.buckets import (
    MAX_LANE_ORDER,
    BucketKind,
    lane_order,
    last_lane_order,
    order_in_time,
)
from libs.storage.records.queues import AvailableMessage
from libs.storage.records.states import LaneRecord
from services.broker.core.waiting.bucket import Bucket

READY_BUCKET_MAX = 1000
"""Messages in a bucket at most: a bucket is read whole, so this bounds what one claim must load."""

CACHED_MAX = 20_000
"""Messages of a lane in memory at most (about 4 MB); the rest is read back when its turn comes."""

EMPTIED_PART = 256
"""Emptied buckets at the front of a lane stay while they are no more than one in this many of all:
dropping each at once could shift CACHED_MAX others, and each may still hold a thousand messages."""

PINNED_MAX = 64
"""Buckets beyond the cached prefix that were read for a change that did not come, at most."""

MESSAGE_BYTES = 100
"""About what one message of a lane takes in memory."""

BUCKET_BYTES = 400
"""About what a bucket takes without its messages."""

COMPLETE = MAX_LANE_ORDER
"""`known_until` of a lane that is in memory whole."""

BY_ORDER = attrgetter("order")

_lane_record: Callable[[tuple[int, BucketKind, int, int, int, int]], LaneRecord] = partial(
    tuple.__new__, LaneRecord
)
"""Like `LaneRecord`, without a call in Python: a commit may make ten thousand."""

IsOver = Callable[[AvailableMessage], bool]
"""Whether a message must leave undelivered."""


class Lane:
    """All orders are lane orders; they contain the epoch of the lanes."""

    __slots__ = (
        "_cached",
        "_front",
        "_gone",
        "_head_offset",
        "_head_order",
        "_overlay",
        "_passed",
        "_pinned",
        "_reading",
        "_removed_until",
        "cached_count",
        "changed",
        "count",
        "due_count",
        "due_until",
        "epoch",
        "kind",
        "known_until",
        "loading",
        "passed_until",
        "priority",
        "tail",
    )

    def __init__(self, priority: int, kind: BucketKind, epoch: int) -> None:
        self.priority = priority
        self.kind = kind
        self.epoch = epoch
        self.count = 0
        self.tail = 0  # the highest order ever used in this lane
        self.known_until = COMPLETE
        self.loading = False
        # To write, or (None) to delete, in the next commit.
        self.changed: dict[int, Bucket | None] = {}
        self.due_until = 0
        self.due_count = 0
        # Up to this order all is in memory but what was passed over.
        self.passed_until = 0
        self._passed: dict[int, int] = {}  # causes, each with the lowest order that it has there
        self._cached: list[Bucket] = []
        self._front = 0  # index of the head in _cached: cheaper than shifting the list each time
        self.cached_count = 0  # messages of the cached prefix
        self._overlay: dict[int, Bucket] = {}
        self._head_order = 0  # the lowest order that the head can have, while nothing is cached
        self._head_offset = 0  # messages of that bucket that were removed
        self._removed_until = 0  # the last order from which messages were removed at the front
        # Orders without a bucket, even if a read returns one, and the commit that deleted it.
        self._gone: dict[int, int] = {}
        # Orders that were read in order to be changed: dropped like what is durable.
        self._pinned: list[int] = []
        self._reading: Counter[range] = Counter()  # orders being read for something else

    @classmethod
    def restore(cls, record: LaneRecord, epoch: int) -> Lane:
        """The lane of a stored state; its buckets are read when they are needed."""
        kind = BucketKind(record.kind)
        lane = cls(record.priority, kind, epoch)
        head = lane_order(kind, record.head_order)
        lane.count = record.waiting_count
        lane.tail = last_lane_order(kind, record.tail_order)
        lane._head_order = head
        lane._head_offset = record.head_offset
        lane.known_until = head - 1 if record.waiting_count else COMPLETE
        return lane

    def record(self) -> LaneRecord:
        """The lane's part of the queue's state record."""
        if self._front < len(self._cached):
            head = self._cached[self._front]
            order, offset = head.order, head.start
        else:
            order, offset = self._head_order, self._head_offset
            if self.known_until != COMPLETE and order <= self.known_until:
                order, offset = self.known_until + 1, 0
        kind, tail = self.kind, self.tail
        if kind is BucketKind.TIMED:
            order, tail = order_in_time(kind, order), order_in_time(kind, tail)
        return _lane_record((self.priority, kind, order, offset, tail, self.count))

    @property
    def head(self) -> Bucket | None:
        """The first bucket in memory; None when the lane is empty or must be read first."""
        return self._cached[self._front] if self._front < len(self._cached) else None

    @property
    def complete(self) -> bool:
        """Whether nothing of the lane has to be read from the database."""
        return self.known_until == COMPLETE

    @property
    def crowded(self) -> bool:
        """Whether more of it is in memory than should be."""
        return self.cached_count > CACHED_MAX

    @property
    def roomy(self) -> bool:
        """Whether more of it may be read although nothing in memory was removed."""
        return 2 * self.cached_count <= CACHED_MAX

    @property
    def held_bytes(self) -> int:
        """About what the cached prefix takes."""
        buckets = len(self._cached) - self._front
        return MESSAGE_BYTES * self.cached_count + BUCKET_BYTES * buckets

    @property
    def to_write(self) -> bool:
        """Whether the next commit has something to do here."""
        return bool(self.changed or self._pinned or self.crowded)

    @property
    def first_unknown(self) -> int:
        """The lowest order that may hold a bucket not in memory."""
        return self.known_until + 1

    @property
    def examined_until(self) -> int:
        """Up to here nothing has to be read for a claim, while what was passed over still is."""
        return max(self.known_until, self.passed_until)

    @property
    def earliest(self) -> int | None:
        """The order of the head, or a lower bound while it is not in memory; None when empty."""
        head = self.head
        if head is not None:
            return head.order
        return None if self.complete else self.first_unknown

    @property
    def earliest_in_time(self) -> int | None:
        """Like `earliest`, comparable with the orders of other lanes."""
        earliest = self.earliest
        return None if earliest is None else order_in_time(self.kind, earliest)

    # --- Buckets in memory --------------------------------------------------

    def cached_from(self, position: int) -> Bucket | None:
        """The bucket `position` places behind the head, if it is in memory."""
        index = self._front + position
        return self._cached[index] if index < len(self._cached) else None

    def cached_between(self, first_order: int, last_order: int) -> list[Bucket]:
        """The buckets of the cached prefix between two orders, ascending."""
        first = bisect_left(self._cached, first_order, lo=self._front, key=BY_ORDER)
        return self._cached[first : bisect_right(self._cached, last_order, lo=first, key=BY_ORDER)]

    def in_memory(self) -> list[Bucket]:
        return [*self._cached[self._front :], *self._overlay.values()]

    def find(self, order: int) -> Bucket | None:
        if order in self._overlay:
            return self._overlay[order]
        index = self._cached_index(order)
        return None if index is None else self._cached[index]

    def _cached_index(self, order: int) -> int | None:
        index = bisect_left(self._cached, order, lo=self._front, key=BY_ORDER)
        if index < len(self._cached) and self._cached[index].order == order:
            return index
        return None

    def has_none(self, order: int) -> bool:
        """Whether memory alone proves that there is no bucket of this order."""
        if order in self._gone:
            return True
        known = order <= self.known_until or order > self.tail
        return known and self.find(order) is None

    # --- Messages join ------------------------------------------------------

    def add(self, bucket: Bucket) -> None:
        """Adds a bucket whose order no bucket of the lane has."""
        order, count = bucket.order, bucket.count
        self._count_in(order, count)
        self.changed[order] = bucket
        if order > self.tail and self.complete and self.cached_count < CACHED_MAX:
            # The usual case: behind all others, and all others are in memory.
            self.tail = order
            self._cached.append(bucket)
            self.cached_count += count
            return
        if order in self._gone:
            bucket.stored = True  # the row that is being deleted is written again
            del self._gone[order]
        self._place(bucket)
        self.tail = max(self.tail, order)

    def _count_in(self, order: int, count: int) -> None:
        self.count += count
        if order <= self.due_until:
            self.due_count += count

    def _place(self, bucket: Bucket) -> None:
        order = bucket.order
        head = self.head
        last = self._cached[-1].order if head is not None else 0
        if order > self.known_until:
            self._overlay[order] = bucket
        elif (
            self.complete
            and self.cached_count >= CACHED_MAX
            and order > max(last, self._removed_until)
        ):
            # Not at `last`: what lay between the two may still be in the database.
            self._know_until(order - 1)
            self._overlay[order] = bucket
        else:
            self.cached_count += bucket.left
            if order > last:
                self._cached.append(bucket)
            else:
                if head is not None and order < head.order:
                    self._trim(head)
                insort(self._cached, bucket, lo=self._front, key=BY_ORDER)

    def _know_until(self, order: int) -> None:
        """Shortens the cached prefix."""
        self.known_until = order
        self.passed_until = 0
        self._passed = {}

    def extend(self, bucket: Bucket, items: Iterable[AvailableMessage]) -> None:
        """Adds messages at the end of a bucket that is in memory, and writes it again."""
        before = bucket.count
        bucket.append(items)
        added = bucket.count - before
        self._count_in(bucket.order, added)
        self.changed[bucket.order] = bucket
        self._gone.pop(bucket.order, None)
        if bucket.order <= self.known_until:
            self.cached_count += added
        else:
            self._overlay[bucket.order] = bucket

    # --- Messages leave -----------------------------------------------------

    def remove_before(self, bucket: Bucket, until: int, kept: Sequence[int]) -> None:
        """Removes the messages of a cached bucket before index `until`, except those `kept`."""
        removed = until - bucket.start - len(kept)
        self.cached_count -= removed
        self._removed_until = max(self._removed_until, bucket.order)
        self._count_out(bucket.order, removed)
        if kept:
            bucket.keep(until, kept)
            self.changed[bucket.order] = bucket
        else:
            bucket.start = until

    def _count_out(self, order: int, count: int) -> None:
        self.count -= count
        if order <= self.due_until:
            self.due_count -= count
        if not self.count:
            self.known_until = COMPLETE  # what was never read cannot hold anything

    def drop_emptied(self, visited: int) -> None:
        """Drops the empty buckets among the first `visited`, after messages were removed there.

        Only the head of a ready lane may keep an offset, since the state record has room for one;
        any other bucket from which messages were removed is written again.
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
            self._trim(bucket)
        self._front = end - len(left)
        cached[self._front : end] = left
        if EMPTIED_PART * self._front > len(cached):
            del cached[: self._front]
            self._front = 0

    def _drop(self, bucket: Bucket) -> None:
        self._head_order, self._head_offset = bucket.order + 1, 0
        if bucket.stored:
            self.changed[bucket.order] = None
        else:
            self.changed.pop(bucket.order, None)

    def _trim(self, bucket: Bucket) -> None:
        if bucket.start:
            bucket.trim()
            self.changed[bucket.order] = bucket

    def reinsert(self, order: int, items: Sequence[tuple[int, AvailableMessage]]) -> None:
        """Returns messages that were removed from the bucket of this order: (place, message)."""
        # Others of it may come back as well, to places that no read of the database knows.
        self._removed_until = max(self._removed_until, order)
        bucket = self.find(order)
        if bucket is None:
            bucket = Bucket(order, [], stored=True)
            bucket.insert(items)
            self.add(bucket)
            return
        bucket.insert(items)
        self._count_in(order, len(items))
        if order <= self.known_until:
            self.cached_count += len(items)
        self.changed[order] = bucket

    def remove(self, bucket: Bucket, indexes: Collection[int]) -> None:
        """Removes messages from a bucket that `find` returned, wherever it lies."""
        order = bucket.order
        in_cache = order <= self.known_until
        if order == self._head_order:
            self._head_offset = 0
        bucket.remove(indexes)
        self.changed[order] = bucket
        if in_cache:
            self.cached_count -= len(indexes)
        else:
            self._overlay[order] = bucket
        if not bucket.count:
            self._delete(order, bucket)
        self._count_out(order, len(indexes))

    def _delete(self, order: int, bucket: Bucket) -> None:
        index = self._cached_index(order)
        if index is not None:
            del self._cached[index]
        self._overlay.pop(order, None)
        if bucket.stored:
            self.changed[order] = None
            self._gone[order] = 0
        else:
            del self.changed[order]

    # --- Messages are passed over -------------------------------------------

    def look_again(self, holds: Callable[[int], bool]) -> None:
        """Has what was passed over read again, from the first whose cause does not hold."""
        for cause in [cause for cause in self._passed if not holds(cause)]:
            self.passed_until = min(self.passed_until, self._passed.pop(cause) - 1)

    def beyond(self, last_order: int) -> list[Bucket]:
        """The buckets beyond the cached prefix up to `passed_until`, and to this order."""
        last = min(self.passed_until, last_order)
        return [self._overlay[o] for o in sorted(self._overlay) if self.known_until < o <= last]

    def offer_beyond(
        self,
        rows: Sequence[tuple[int, list[AvailableMessage]]],
        first: int,
        through: int,
        cause_of: Callable[[AvailableMessage], int | None],
    ) -> None:
        """Takes in what was read from `first`, which followed `examined_until`, to `through`.

        Buckets with a message that has no cause to be passed over are pinned; others are passed
        over.
        """
        read, pinned = dict(rows), 0
        for order, items in self.merged(rows, first, through):
            if order not in read:
                continue
            causes = [cause for one in items if (cause := cause_of(one)) is not None]
            if len(causes) == len(items):
                for cause in set(causes):
                    self._passed.setdefault(cause, order)
                continue
            if pinned >= PINNED_MAX // 2:
                through = order - 1
                break
            self.pin(order, read[order])
            pinned += 1
        if first == self.examined_until + 1:  # Else what one of these has replaced comes first.
            self.passed_until = through

    # --- Messages fall due --------------------------------------------------

    def look_at_due(self, until_order: int, is_over: IsOver, limit: int) -> int:
        """Counts what is due up to an order, as far as it is in memory; removes what is over.

        Looks at about `limit` messages and returns how many; `due_until` is how far it came.
        """
        looked_at = 0
        for bucket in self.cached_between(self.due_until + 1, until_order):
            if looked_at >= limit:
                return looked_at
            looked_at += bucket.left
            self._count_due(bucket, is_over)
        self.due_until = max(self.due_until, min(until_order, self.known_until))
        return looked_at

    def _count_due(self, bucket: Bucket, is_over: IsOver) -> None:
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
        """Like `look_at_due` for what was read between two orders; `first` follows `due_until`."""
        read = dict(rows)
        for order, items in self.merged(rows, first, through):
            if order in read and any(map(is_over, items)):
                self.pin(order, read[order])
            bucket = self.find(order)
            if bucket is None:
                self.due_count += len(items)
            else:
                self._count_due(bucket, is_over)
        self.due_until = through

    def due_now(self, until_order: int) -> int:
        """How many messages are due up to an order, as far as memory knows."""
        later = self.cached_between(self.due_until + 1, until_order)
        return self.due_count + sum(bucket.left for bucket in later)

    # --- The database -------------------------------------------------------

    def begin_read(self, first_order: int, last_order: int) -> None:
        """Notes that these are being read: what changes meanwhile must stay here."""
        self._reading[range(first_order, last_order + 1)] += 1

    def end_read(self, first_order: int, last_order: int) -> None:
        orders = range(first_order, last_order + 1)
        self._reading[orders] -= 1
        if not self._reading[orders]:
            del self._reading[orders]

    def loaded(
        self, first: int, rows: Iterable[tuple[int, list[AvailableMessage]]], through: int
    ) -> None:
        """Takes in what the database holds from `first` up to the order `through`.

        `first` is what `first_unknown` was when the read began; if it has moved since, the rows
        are ignored. `through` is COMPLETE if the read reached the lane's end. What was added
        during the read is in the overlay, and newer than the rows.
        """
        if first != self.first_unknown:
            return
        found = {o: Bucket(o, items, stored=True) for o, items in rows if o not in self._gone}
        if self._head_order in found:
            found[self._head_order].start = self._head_offset
        found.update({o: b for o, b in self._overlay.items() if o <= through})
        for order in sorted(found):
            self._overlay.pop(order, None)
            self._cache(found[order])
        self.known_until = through
        if self.cached_count + sum(b.left for b in self._overlay.values()) == self.count:
            # All others are in the overlay: nothing is left to be read.
            self.known_until = COMPLETE
            for order in sorted(self._overlay):
                self._cache(self._overlay.pop(order))

    def _cache(self, bucket: Bucket) -> None:
        self._cached.append(bucket)
        self.cached_count += bucket.left

    def merged(
        self, rows: Iterable[tuple[int, list[AvailableMessage]]], first: int, through: int
    ) -> list[tuple[int, list[AvailableMessage]]]:
        """What waits from `first` to `through`: as it was read, unless memory knows better.

        Exact only for rows that were read between `begin_read` and `end_read`.
        """
        found = {}
        for order, items in rows:
            if order > self.known_until and order not in self._gone:
                found[order] = items[self._head_offset if order == self._head_order else 0 :]
        overlay = (b for order, b in self._overlay.items() if first <= order <= through)
        for bucket in (*self.cached_between(first, through), *overlay):
            found[bucket.order] = bucket.items[bucket.start :]
        return [(order, found[order]) for order in sorted(found) if found[order]]

    def pin(self, order: int, items: list[AvailableMessage] | None) -> None:
        """Takes in one bucket beyond the cached prefix, as it was read; None: there is none.

        It was read between `begin_read` and `end_read`. It stays until the next commit of the
        queue is durable, or until PINNED_MAX others are pinned.
        """
        if order <= self.known_until or order in self._gone or self.find(order):
            return
        if len(self._pinned) >= PINNED_MAX:
            self._unpin(self._pinned.pop(0))
        self._pinned.append(order)
        if items is None:
            self._gone[order] = 0
            return
        start = self._head_offset if order == self._head_order else 0
        self._overlay[order] = Bucket(order, items, start=start, stored=True)

    def _unpin(self, order: int) -> None:
        bucket = self._overlay.get(order)
        generation = bucket.generation if bucket else self._gone.get(order, 0)
        if generation or order in self.changed:
            return  # a commit writes it, and drops it
        if self._is_read(order):
            self._pinned.append(order)
        else:
            self._let_go_of(order)

    def _let_go_of(self, order: int) -> None:
        self._gone.pop(order, None)
        if self._overlay.pop(order, None) and order <= self.passed_until:
            self.passed_until = order - 1  # It may have messages that are not passed over.

    def _is_read(self, order: int) -> bool:
        return self.loading or any(order in orders for orders in self._reading)

    def written(self, generation: int) -> list[int]:
        """Notes that this commit has all of `changed`; returns what `let_go` may drop later."""
        beyond, self._pinned = self._pinned, []
        for order, bucket in self.changed.items():
            if bucket is not None:
                bucket.stored = True
                bucket.generation = generation
                if order in self._overlay:
                    beyond.append(order)
            elif order in self._gone:
                self._gone[order] = generation
                beyond.append(order)
        self.changed = {}
        return beyond

    def let_go(self, orders: Iterable[int], durable_generation: int) -> list[int] | None:
        """Drops what is durable of the overlay, and what is too much of the cache.

        Returns the orders that must stay for now; None if there is no need to come back.
        """
        stay = []
        for order in orders:
            bucket = self._overlay.get(order)
            generation = bucket.generation if bucket else self._gone.get(order)
            if generation is None or order in self.changed or generation > durable_generation:
                continue  # cached meanwhile, or to be written again: a later commit comes back
            if self._is_read(order):
                stay.append(order)  # a read that began before the commit would miss it
            else:
                self._let_go_of(order)
        return stay if self._uncrowd(durable_generation) or stay else None

    def _uncrowd(self, durable_generation: int) -> bool:
        """Drops the end of a cache that is too large; True when it has to wait."""
        while self.crowded and len(self._cached) - self._front > 1:
            last = self._cached[-1]
            if last.order <= self._removed_until:
                return False  # messages may be reinserted into it
            undurable = last.order in self.changed or last.generation > durable_generation
            if undurable or self.loading or self._reading:
                return True
            self._cached.pop()
            self.cached_count -= last.count
            self._know_until(last.order - 1)
        return False

    def evict(self, durable_generation: int) -> None:
        """Drops from the end what can be read back: all, where nothing was removed yet."""
        if self.loading or self._reading:
            return
        while len(self._cached) > self._front:
            last = self._cached[-1]
            if last.order <= self._removed_until or last.order in self.changed:
                return  # messages may be reinserted into it; or it must be written again
            if not last.stored or last.generation > durable_generation:
                return
            self._cached.pop()
            self.cached_count -= last.left
            self._know_until(last.order - 1)
            if len(self._cached) == self._front:
                self._head_order, self._head_offset = last.order, last.start
