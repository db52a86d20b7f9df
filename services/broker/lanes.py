"""A lane: the available messages of one queue that share a priority and a kind, in order.

A lane is a row of buckets, each one record in the database. Messages leave at the front; ready
messages join at the end, timed ones where their time puts them. Only a prefix of the lane is held
in memory, so that a lane of ten million costs what a lane of ten thousand does:

    cached (from the head, without a gap)         not in memory           overlay
    [bucket][bucket][bucket] ... known_until | . . . . . . . . . . | [bucket] [bucket]
     ^ head, `start` messages of it taken                             not durable yet, or open

The overlay keeps what was added beyond the cached prefix until the commit that writes it is
durable: before that the database could not give it back.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from operator import attrgetter

from libs.storage.buckets import MAX_ORDER, BucketKind
from libs.storage.queues import AvailableMessage
from libs.storage.states import LaneRecord
from services.broker.waiting_buckets import Bucket

READY_BUCKET_MAX = 1000
"""Messages in a bucket at most: a bucket is read whole, so this bounds what one claim must load."""

TIMED_BUCKET_MAX = 500
"""Messages that share a millisecond and a bucket at most: joining one rewrites it."""

CACHED_MAX = 20_000
"""Messages of a lane in memory at most (about 4 MB); what is beyond is read back when it is due."""

SLOTS_MAX = 20_000
"""Milliseconds of a lane remembered whose buckets are known though not cached, and the messages
remembered with them; no call names more of either."""

COMPLETE = MAX_ORDER
"""`known_until` of a lane that is in memory whole."""

_BY_ORDER = attrgetter("order")


class Lane:
    """See the module's text. All orders contain the queue's epoch."""

    __slots__ = (
        "_cached",
        "_cached_count",
        "_front",
        "_head_offset",
        "_head_order",
        "_overlay",
        "_reading",
        "_slots",
        "_slots_weight",
        "_taken_until",
        "changed",
        "count",
        "kind",
        "known_until",
        "loading",
        "priority",
        "tail",
    )

    def __init__(self, priority: int, kind: BucketKind) -> None:
        self.priority = priority
        self.kind = kind
        self.count = 0
        self.tail = 0  # the highest order ever used in this lane
        self.known_until = COMPLETE
        self.loading = False
        # To write, or (None) to delete, in the next commit.
        self.changed: dict[int, Bucket | None] = {}
        self._cached: list[Bucket] = []
        self._front = 0  # index of the head in _cached: cheaper than shifting the list each time
        self._cached_count = 0
        self._overlay: dict[int, Bucket] = {}
        self._head_order = 0  # where the head is at least, while nothing is cached
        self._head_offset = 0  # messages of that bucket which are taken
        self._taken_until = 0  # the last order from which messages were taken
        # By a key of the caller's: the last of some buckets beyond the cache, as far as known.
        self._slots: dict[int, Bucket | None] = {}
        self._slots_weight = 0
        self._reading: list[range] = []  # orders that are being read to be remembered

    @classmethod
    def restore(cls, record: LaneRecord) -> Lane:
        """The lane as its queue's state record tells it; buckets are read when they are needed."""
        lane = cls(record.priority, BucketKind(record.kind))
        lane.count = record.waiting_count
        lane.tail = record.tail_order
        lane._head_order = record.head_order
        lane._head_offset = record.head_offset
        lane._taken_until = record.head_order
        lane.known_until = record.head_order - 1 if record.waiting_count else COMPLETE
        return lane

    def record(self) -> LaneRecord:
        """The lane's part of the queue's state record."""
        head = self.head
        order, offset = (head.order, head.start) if head else (self._head_order, self._head_offset)
        if head is None and not self.complete and order < self.first_unknown:
            order, offset = self.first_unknown, 0
        return LaneRecord(
            priority=self.priority,
            kind=self.kind,
            head_order=order,
            head_offset=offset,
            tail_order=self.tail,
            waiting_count=self.count,
        )

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
        return self._cached_count > CACHED_MAX

    @property
    def roomy(self) -> bool:
        """Whether more of it may be read in though nothing in memory was taken."""
        return 2 * self._cached_count <= CACHED_MAX

    @property
    def first_unknown(self) -> int:
        """The lowest order that may hold a bucket not in memory."""
        return self.known_until + 1

    @property
    def earliest(self) -> int | None:
        """The order of the head, or a lower bound while it is not in memory; None when empty."""
        head = self.head
        if head is not None:
            return head.order
        return None if self.complete else self.first_unknown

    def cached_from(self, position: int) -> Bucket | None:
        """The bucket `position` places behind the head, if it is in memory."""
        index = self._front + position
        return self._cached[index] if index < len(self._cached) else None

    # --- Messages join ------------------------------------------------------

    def add(self, bucket: Bucket) -> None:
        """Adds a bucket whose order no bucket of the lane has."""
        self.count += len(bucket.items)
        self.changed[bucket.order] = bucket
        self._place(bucket)
        self.tail = max(self.tail, bucket.order)

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
            self._cached_count += len(bucket.items) - bucket.start
            if order > last:
                self._cached.append(bucket)
            else:
                if head is not None and order < head.order:
                    self._trim_head(head)
                insort(self._cached, bucket, lo=self._front, key=_BY_ORDER)

    def _ends_before(self, order: int, last: int) -> bool:
        full = self.complete and self._cached_count >= CACHED_MAX
        return full and order > last and order > self._taken_until

    def extend(self, bucket: Bucket, items: Iterable[AvailableMessage]) -> None:
        """Adds messages at the end of a bucket that is in memory, and writes it again."""
        before = len(bucket.items)
        bucket.append(items)
        added = len(bucket.items) - before
        self.count += added
        self.changed[bucket.order] = bucket
        if bucket.order <= self.known_until:
            self._cached_count += added
        else:
            self._overlay[bucket.order] = bucket

    # --- What is where ------------------------------------------------------

    def find(self, order: int) -> Bucket | None:
        """The bucket of this order, if it is in memory."""
        if order in self._overlay:
            return self._overlay[order]
        index = bisect_left(self._cached, order, lo=self._front, key=_BY_ORDER)
        if index < len(self._cached) and self._cached[index].order == order:
            return self._cached[index]
        return None

    def last_between(self, first_order: int, last_order: int) -> Bucket | None:
        """The bucket in memory with the highest order between the two, which are near."""
        if self._overlay:
            for order in range(last_order, max(first_order, self.first_unknown) - 1, -1):
                if order in self._overlay:
                    return self._overlay[order]
        index = bisect_right(self._cached, last_order, lo=self._front, key=_BY_ORDER) - 1
        if index >= self._front and self._cached[index].order >= first_order:
            return self._cached[index]
        return None

    def knows(self, first_order: int, last_order: int) -> bool:
        """Whether memory tells for certain which buckets there are between two orders."""
        return (
            last_order <= self.known_until or first_order > self.tail or first_order in self._slots
        )

    def last_known(self, first_order: int, last_order: int) -> Bucket | None:
        """The last bucket between two orders of which `knows` is true."""
        in_memory = self.last_between(first_order, last_order)
        slot = self._slots.get(first_order)
        if slot is None or (in_memory is not None and in_memory.order >= slot.order):
            return in_memory
        return slot

    def remember(self, first_order: int, bucket: Bucket | None) -> None:
        """Notes the last bucket from `first_order` on, where the next one may be in doubt."""
        if first_order not in self._slots and bucket is not None:
            self._slots_weight += len(bucket.items)
        self._slots[first_order] = bucket
        self._slots_weight += 1

    def begin_read(self, first_order: int, last_order: int) -> None:
        """Notes that what `remember` wants is being read: what changes meanwhile must stay here."""
        self._reading.append(range(first_order, last_order + 1))

    def end_read(self, first_order: int, last_order: int) -> None:
        """Ends what `begin_read` began."""
        self._reading.remove(range(first_order, last_order + 1))

    def remembers(self, first_order: int) -> bool:
        """Whether `remember` was told of it."""
        return first_order in self._slots

    def forget_slots(self) -> None:
        """Forgets what was remembered, if it has become much."""
        if self._slots_weight > SLOTS_MAX:
            needed = [orders.start for orders in self._reading if orders.start in self._slots]
            self._slots = {first: self._slots[first] for first in needed}
            self._slots_weight = 0

    # --- Messages leave -----------------------------------------------------

    def taken(self, bucket: Bucket, until: int, kept: Sequence[int]) -> None:
        """Removes the messages of a cached bucket before index `until`, but for those `kept`."""
        removed = until - bucket.start - len(kept)
        self.count -= removed
        self._cached_count -= removed
        self._taken_until = max(self._taken_until, bucket.order)
        if not self.count:
            self.known_until = COMPLETE  # whatever was not read in cannot hold anything
            self._slots = {}
        if kept:
            bucket.keep(until, kept)
            self.changed[bucket.order] = bucket
        else:
            bucket.start = until

    def settle(self, visited: int) -> None:
        """After messages of the first `visited` buckets were taken: drops the empty ones.

        Only the head may keep an offset, since the state record has room for one; a bucket behind
        it from which messages were taken is written again.
        """
        cached, front = self._cached, self._front
        end = min(front + visited, len(cached))
        left = []
        for bucket in cached[front:end]:
            if bucket.start < len(bucket.items):
                left.append(bucket)
            else:
                self._drop(bucket)
        for bucket in left[1:]:
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
        self.count += len(items)
        self._cached_count += len(items)
        self.changed[order] = bucket

    def _trim_head(self, bucket: Bucket) -> None:
        if bucket.start:
            bucket.trim()
            self.changed[bucket.order] = bucket

    # --- The database -------------------------------------------------------

    def loaded(
        self, first: int, rows: Iterable[tuple[int, list[AvailableMessage]]], through: int
    ) -> None:
        """Takes in what the database holds from `first` up to the order `through`.

        `first` is what `first_unknown` was when the read began; if it has moved, the rows say
        nothing. COMPLETE as `through` says that the read went to the lane's end. What was added
        while the read ran is in the overlay, and newer than the rows.
        """
        self.loading = False
        if first != self.first_unknown:
            return
        found = {order: Bucket(order, items, stored=True) for order, items in rows}
        if self._head_order in found:
            found[self._head_order].start = self._head_offset
            self._head_offset = 0
        found.update({o: b for o, b in self._overlay.items() if o <= through})
        for order in sorted(found):
            self._overlay.pop(order, None)
            self._cache(found[order])
        self.known_until = through
        if self._cached_count + sum(len(b.items) for b in self._overlay.values()) == self.count:
            # All the others are here: nothing is left to be read.
            self.known_until = COMPLETE
            for order in sorted(self._overlay):
                self._cache(self._overlay.pop(order))
        # Buckets that are cached now would grow apart from those remembered.
        known = self.known_until
        self._slots = {order: slot for order, slot in self._slots.items() if order > known}

    def _cache(self, bucket: Bucket) -> None:
        self._cached.append(bucket)
        self._cached_count += len(bucket.items) - bucket.start

    def written(self, generation: int) -> list[int]:
        """Notes that all of `changed` goes into this commit; gives the orders of the overlay."""
        beyond = []
        for order, bucket in self.changed.items():
            if bucket is not None:
                bucket.stored = True
                bucket.generation = generation
                if order in self._overlay:
                    beyond.append(order)
        self.changed = {}
        return beyond

    def let_go(self, orders: Iterable[int], durable_generation: int) -> list[int] | None:
        """Drops of the overlay what is durable, and of the cache what is too much.

        Gives the orders that must stay for now; None when there is no need to come back.
        """
        stay = []
        for order in orders:
            bucket = self._overlay.get(order)
            if bucket is None or order in self.changed or bucket.generation > durable_generation:
                continue  # read in meanwhile, or to be written again: a later commit comes back
            if self.loading or any(order in orders for orders in self._reading):
                stay.append(order)  # a read that began before the commit would miss it
            else:
                del self._overlay[order]
        return stay if self._uncrowd(durable_generation) or stay else None

    def _uncrowd(self, durable_generation: int) -> bool:
        """Drops the end of the cache if there is too much of it; True when it has to wait."""
        while self.crowded and len(self._cached) - self._front > 1:
            last = self._cached[-1]
            if last.order <= self._taken_until:
                return False  # messages may be put back into it
            undurable = last.order in self.changed or last.generation > durable_generation
            if undurable or self.loading:
                return True
            self._cached.pop()
            self._cached_count -= len(last.items)
            self.known_until = last.order - 1
        return False
