"""What of a lane is in memory, and how that goes together with what is read from the database.

    cached (from the head, without a gap)         not in memory           overlay
    [bucket][bucket][bucket] ... known_until | . . . . . . . . . . | [bucket] [bucket]
     ^ head, `start` messages of it taken                             not durable yet, or open

The overlay keeps what was added or changed beyond the cached prefix until the commit that writes
it is durable: before that the database could not give it back. For the same time it is remembered
which buckets were removed out of turn: a read that began before must not bring them back.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from libs.storage.layout.buckets import MAX_LANE_ORDER
from libs.storage.records.queues import AvailableMessage
from services.broker.core.waiting.bucket import Bucket

CACHED_MAX = 20_000
"""Messages of a lane in memory at most (about 4 MB); what is beyond is read back when it is due."""

GUESTS_MAX = 64
"""Buckets beyond the cached prefix that were read to be changed and were not, at most."""

MESSAGE_BYTES = 100
"""About what a message of a lane takes in memory."""

BUCKET_BYTES = 400
"""The same of a bucket without messages."""

COMPLETE = MAX_LANE_ORDER
"""`known_until` of a lane that is in memory whole."""

BY_ORDER = attrgetter("order")


class LaneMemory:
    """See the module's text. All orders are lane orders, and contain the epoch of the lanes."""

    __slots__ = (
        "_cached",
        "_cached_count",
        "_front",
        "_gone",
        "_head_offset",
        "_head_order",
        "_overlay",
        "_pinned",
        "_reading",
        "_taken_until",
        "changed",
        "count",
        "known_until",
        "loading",
        "tail",
    )

    def __init__(self) -> None:
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
        # Orders without a bucket, whatever a read says, and the commit that deleted it.
        self._gone: dict[int, int] = {}
        # Orders that were read to be changed: they may be let go of like what is durable.
        self._pinned: list[int] = []
        self._reading: Counter[range] = Counter()  # orders being read for something else

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
    def cached_count(self) -> int:
        """Messages in memory, but for those that are not durable yet."""
        return self._cached_count

    @property
    def held_bytes(self) -> int:
        """About what they take."""
        buckets = len(self._cached) - self._front
        return MESSAGE_BYTES * self._cached_count + BUCKET_BYTES * buckets

    @property
    def roomy(self) -> bool:
        """Whether more of it may be read in though nothing in memory was taken."""
        return 2 * self._cached_count <= CACHED_MAX

    @property
    def to_write(self) -> bool:
        """Whether the next commit has something to do here."""
        return bool(self.changed or self._pinned or self.crowded)

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

    # --- What is where ------------------------------------------------------

    def cached_from(self, position: int) -> Bucket | None:
        """The bucket `position` places behind the head, if it is in memory."""
        index = self._front + position
        return self._cached[index] if index < len(self._cached) else None

    def cached_between(self, first_order: int, last_order: int) -> list[Bucket]:
        """The buckets of the cached prefix between two orders, ascending."""
        first = bisect_left(self._cached, first_order, lo=self._front, key=BY_ORDER)
        return self._cached[first : bisect_right(self._cached, last_order, lo=first, key=BY_ORDER)]

    def in_memory(self) -> list[Bucket]:
        """Every bucket that is in memory."""
        return [*self._cached[self._front :], *self._overlay.values()]

    def find(self, order: int) -> Bucket | None:
        """The bucket of this order, if it is in memory."""
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
        """Whether memory tells for certain that there is no bucket of this order."""
        if order in self._gone:
            return True
        known = order <= self.known_until or order > self.tail
        return known and self.find(order) is None

    # --- The database -------------------------------------------------------

    def begin_read(self, first_order: int, last_order: int) -> None:
        """Notes that these are being read: what changes meanwhile must stay here."""
        self._reading[range(first_order, last_order + 1)] += 1

    def end_read(self, first_order: int, last_order: int) -> None:
        """Ends what `begin_read` began."""
        orders = range(first_order, last_order + 1)
        self._reading[orders] -= 1
        if not self._reading[orders]:
            del self._reading[orders]

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
        found = {o: Bucket(o, items, stored=True) for o, items in rows if o not in self._gone}
        if self._head_order in found:
            found[self._head_order].start = self._head_offset
            self._head_offset = 0
        found.update({o: b for o, b in self._overlay.items() if o <= through})
        for order in sorted(found):
            self._overlay.pop(order, None)
            self._cache(found[order])
        self.known_until = through
        if self._cached_count + sum(b.left for b in self._overlay.values()) == self.count:
            # All the others are here: nothing is left to be read.
            self.known_until = COMPLETE
            for order in sorted(self._overlay):
                self._cache(self._overlay.pop(order))

    def _cache(self, bucket: Bucket) -> None:
        self._cached.append(bucket)
        self._cached_count += bucket.left

    def merged(
        self, rows: Iterable[tuple[int, list[AvailableMessage]]], first: int, through: int
    ) -> list[tuple[int, list[AvailableMessage]]]:
        """What waits from `first` to `through`: as it was read, where memory knows no better.

        The rows must have been read between `begin_read` and `end_read` to be exact.
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
        queue is durable, or until there are too many.
        """
        if order <= self.known_until or order in self._gone or self.find(order):
            return
        if len(self._pinned) >= GUESTS_MAX:
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
            return  # a commit writes it, and lets go of it
        if self._is_read(order):
            self._pinned.append(order)
        else:
            self._overlay.pop(order, None)
            self._gone.pop(order, None)

    def _is_read(self, order: int) -> bool:
        return self.loading or any(order in orders for orders in self._reading)

    def written(self, generation: int) -> list[int]:
        """Notes that all of `changed` goes into this commit; gives what it may let go of later."""
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
        """Drops of the overlay what is durable, and of the cache what is too much.

        Gives the orders that must stay for now; None when there is no need to come back.
        """
        stay = []
        for order in orders:
            bucket = self._overlay.get(order)
            generation = bucket.generation if bucket else self._gone.get(order)
            if generation is None or order in self.changed or generation > durable_generation:
                continue  # read in meanwhile, or to be written again: a later commit comes back
            if self._is_read(order):
                stay.append(order)  # a read that began before the commit would miss it
            else:
                self._overlay.pop(order, None)
                self._gone.pop(order, None)
        return stay if self._uncrowd(durable_generation) or stay else None

    def _uncrowd(self, durable_generation: int) -> bool:
        """Drops the end of the cache if there is too much of it; True when it has to wait."""
        while self.crowded and len(self._cached) - self._front > 1:
            last = self._cached[-1]
            if last.order <= self._taken_until:
                return False  # messages may be put back into it
            undurable = last.order in self.changed or last.generation > durable_generation
            if undurable or self.loading or self._reading:
                return True
            self._cached.pop()
            self._cached_count -= last.count
            self.known_until = last.order - 1
        return False

    def evict(self, durable_generation: int) -> None:
        """Drops what can be read back, from the end: all, where nothing was taken yet."""
        if self.loading or self._reading:
            return
        while len(self._cached) > self._front:
            last = self._cached[-1]
            if last.order <= self._taken_until or last.order in self.changed:
                return  # messages may be put back into it; or it must be written again
            if not last.stored or last.generation > durable_generation:
                return
            self._cached.pop()
            self._cached_count -= last.left
            self.known_until = last.order - 1
            if len(self._cached) == self._front:
                self._head_order, self._head_offset = last.order, last.start
