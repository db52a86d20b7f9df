"""The walk of a claim over a queue: which message is next, and what must be read first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from libs.storage.layout.buckets import MAX_ORDER, MAX_ORDER_N, BucketKind, order_in_time, order_of
from libs.storage.records.queues import AvailableMessage
from services.broker.core.waiting.bucket import Bucket
from services.broker.core.waiting.lane import IsOver, Lane

AttemptsKey = tuple[str, int, int]
"""Queue, the revision at which it was created, and message. The revision distinguishes a queue from
its predecessor of the same name, whose records expire."""

StoredBucket = tuple[int, list[AvailableMessage]]
"""A bucket as it was read: its order and messages."""


class LaneOwner(Protocol):
    """What a read of lanes needs of the queue that has them."""

    queue_id: str

    @property
    def by_name(self) -> Mapping[tuple[int, BucketKind], Lane]:
        """All lanes, by priority and kind."""

    def offer_due(self, need: NeedsDue, rows: Sequence[StoredBucket], through: int) -> None:
        """Answers a NeedsDue."""


class NeedsLane(Exception):
    """A lane goes on in the database: read from its `first_unknown` on, then run it again."""

    def __init__(self, available: LaneOwner, lane: Lane) -> None:
        super().__init__(f"{available.queue_id}: {lane.priority}/{lane.kind.name}")
        self.available = available
        self.lane = lane


class NeedsRows(ABC):
    """The database may hold buckets between two orders: read them, then run the command again."""

    in_parts = False
    """Whether the first of them are enough."""

    def __init__(self, available: LaneOwner, lane: Lane, first_order: int, last_order: int) -> None:
        self.available = available
        self.lane = lane
        self.first_order = first_order
        self.last_order = last_order
        self.known_until = lane.known_until

    @abstractmethod
    def offer(self, rows: Sequence[StoredBucket], through: int) -> None:
        """Answers with the buckets in the database up to the order `through`, ascending."""


class Needs(Exception):
    """A command needs records that are not in memory: read them all, then run it again."""

    def __init__(self, slots: Sequence[NeedsRows], attempts: Sequence[AttemptsKey]) -> None:
        super().__init__(f"{len(slots)} runs of buckets, {len(attempts)} attempts records")
        self.slots = slots
        self.attempts = attempts


class NeedsBucket(NeedsRows):
    """One bucket, for a command that changes it: claims read lanes from the front."""

    def __init__(self, available: LaneOwner, lane: Lane, order: int) -> None:
        super().__init__(available, lane, order, order)

    def offer(self, rows: Sequence[StoredBucket], through: int) -> None:
        self.lane.pin(self.first_order, rows[0][1] if rows else None)


class NeedsDue(NeedsRows):
    """The buckets that fell due beyond the part of a lane that is in memory."""

    in_parts = True

    def __init__(self, available: LaneOwner, lane: Lane, last_order: int, is_over: IsOver) -> None:
        super().__init__(available, lane, lane.due_until + 1, last_order)
        self.is_over = is_over

    def offer(self, rows: Sequence[StoredBucket], through: int) -> None:
        self.available.offer_due(self, rows, through)


class Passing(NamedTuple):
    """Which messages walks pass over, however many there are, and why.

    A walk goes no further than what is not passed over.
    """

    cause: Callable[[AvailableMessage], int | None]
    """Why a message is passed over; None: it is not."""
    holds: Callable[[int], bool]
    """Whether messages are still passed over for this cause."""
    reads_on: Callable[[], bool]
    """Whether to read more behind what was passed over; otherwise a later walk goes on there."""

    def wants(self, item: AvailableMessage) -> bool:
        """Whether a message is not passed over."""
        return self.cause(item) is None


class NeedsBeyond(NeedsRows):
    """The buckets beyond what is in memory of a lane, all of which a walk has passed over."""

    in_parts = True

    def __init__(self, available: LaneOwner, lane: Lane, last_order: int, passing: Passing) -> None:
        super().__init__(available, lane, lane.examined_until + 1, last_order)
        self.passing = passing

    def offer(self, rows: Sequence[StoredBucket], through: int) -> None:
        if self.lane.examined_until + 1 == self.first_order:
            self.lane.offer_beyond(rows, self.first_order, through, self.passing.cause)


class Choice(Enum):
    """What a claim does with the message that it looks at."""

    TAKE = 1
    SKIP = 2  # it cannot be had now: leave it where it is
    STOP = 3  # enough


class Selector(ABC):
    """Decides which of the next messages a walk takes.

    A walk offers the messages of a bucket together; if the selector refuses, it asks about each.
    """

    passing: Passing | None = None
    """None: it need not find what lies behind more messages that it skips than memory holds."""

    takes = True
    """Whether the messages that it accepts are taken; otherwise they are left where they are."""

    def capacity(self) -> int:
        """How many messages it may be offered together; 0: enough."""
        return 0

    def offer(self, items: Sequence[AvailableMessage]) -> bool:
        """Accepts all of these, or (False) none."""
        return False

    @abstractmethod
    def choose(self, item: AvailableMessage) -> Choice:
        """Decides about one message."""

    @property
    def has_found(self) -> bool:
        """Whether it knows enough to go on without a read of the database."""
        return False


Origin = tuple[BucketKind, int, int]
"""Where a message was taken from: kind, order and the place within the bucket."""


class Segment(NamedTuple):
    """Messages that were taken from one bucket, with their places in it."""

    items: Sequence[AvailableMessage]
    kind: BucketKind
    order: int
    places: Sequence[int]


class ExpiryPolicy:
    """Which messages leave a queue without being delivered."""

    def __init__(
        self,
        now_ms: int,
        max_attempts: int,
        over: Callable[[AvailableMessage], None],
        exhausted: Callable[[AvailableMessage], None],
    ) -> None:
        """`over` is called with each message past its retention, `exhausted` without attempts."""
        self._over = over
        self._now_ms = now_ms
        self._max_attempts = max_attempts
        self._exhausted = exhausted

    def drop(self, item: AvailableMessage) -> bool:
        """Whether this message must leave; it has to be removed then."""
        if 0 < item.retention_deadline_ms <= self._now_ms:
            self._over(item)
            return True
        if item.attempts >= self._max_attempts:
            self._exhausted(item)
            return True
        return False

    def may_drop(self, attempts: int, deadline_ms: int) -> bool:
        """Whether it could drop a message of at most these attempts, and no earlier deadline."""
        return attempts >= self._max_attempts or 0 < deadline_ms <= self._now_ms


class Chosen(NamedTuple):
    """What a walk does with the messages of a bucket: indexes."""

    taken: list[int]
    dropped: list[int]
    """Those that must leave undelivered."""
    has_wanted: bool
    """Whether there is one that the walk may not pass over."""
    has_stopped: bool


def choose_wanted(
    bucket: Bucket, selector: Selector, passing: Passing, expiry: ExpiryPolicy, capacity: int
) -> Chosen:
    """Offers the selector what it does not pass over of a bucket."""
    taken: list[int] = []
    dropped: list[int] = []
    has_wanted = False
    for index in range(bucket.start, bucket.count):
        item = bucket.items[index]
        if expiry.drop(item):
            dropped.append(index)
        elif passing.wants(item):
            has_wanted = True
            choice = selector.choose(item) if len(taken) < capacity else Choice.STOP
            if choice is Choice.STOP:
                return Chosen(taken, dropped, has_wanted, has_stopped=True)
            if choice is Choice.TAKE:
                taken.append(index)
    return Chosen(taken, dropped, has_wanted, has_stopped=False)


class Walk:
    """Goes over the buckets of one priority in the order in which they came or fell due.

    Yields (lane, bucket), or (lane, None) where the lane must be read from the database first.
    """

    def __init__(self, lanes: list[Lane], epoch: int, now_ms: int, capacity: int) -> None:
        """Take at most `capacity` messages."""
        self.capacity = capacity
        self.stopped = False
        self.has_removed = False
        self.has_removed_timed = False
        self._due_until = order_of(epoch, now_ms, MAX_ORDER_N)
        self._lanes = lanes
        self._visited = [0] * len(lanes)
        self._left = set[Lane]()

    def leave(self, lane: Lane) -> None:
        """Goes on without what is not in memory of this lane."""
        self._left.add(lane)

    def __iter__(self) -> Iterator[tuple[Lane, Bucket | None]]:
        while not self.stopped:
            best = -1
            best_order = MAX_ORDER + 1
            for index, lane in enumerate(self._lanes):
                order = self._next_order(index, lane)
                if order is not None and order < best_order:
                    best, best_order = index, order
            if best < 0:
                return
            bucket = self._lanes[best].cached_from(self._visited[best])
            self._visited[best] += bucket is not None
            yield self._lanes[best], bucket

    def _next_order(self, index: int, lane: Lane) -> int | None:
        bucket = lane.cached_from(self._visited[index])
        if bucket is None and (lane.complete or lane in self._left):
            return None
        order = order_in_time(lane.kind, bucket.order if bucket else lane.first_unknown)
        if lane.kind == BucketKind.TIMED and order > self._due_until:
            return None
        return order

    def take(self, lane: Lane, bucket: Bucket, selector: Selector, expiry: ExpiryPolicy) -> Segment:
        """Takes what the selector wants of a bucket; drops what must leave undelivered."""
        start, count = bucket.start, bucket.count
        end = min(count, start + min(selector.capacity(), self.capacity))
        items = bucket.items[start:end]
        if expiry.may_drop(*bucket.worst) or not selector.offer(items):
            return self._take_each(lane, bucket, selector, expiry)
        self.stopped = end < count
        if not selector.takes or not items:
            return Segment((), lane.kind, bucket.order, ())
        segment = Segment(items, lane.kind, bucket.order, bucket.places_of(start, end))
        self.capacity -= len(items)
        self._remove(lane, bucket, end, ())
        return segment

    def _take_each(
        self, lane: Lane, bucket: Bucket, selector: Selector, expiry: ExpiryPolicy
    ) -> Segment:
        items = bucket.items
        taken: list[AvailableMessage] = []
        places: list[int] = []
        kept: list[int] = []
        until = len(items)
        for index in range(bucket.start, until):
            item = items[index]
            if expiry.drop(item):
                continue
            choice = selector.choose(item) if len(taken) < self.capacity else Choice.STOP
            if choice is Choice.TAKE:
                taken.append(item)
                places.append(bucket.place(index))
            elif choice is Choice.SKIP:
                kept.append(index)
            else:
                self.stopped = True
                until = index
                break
        self.capacity -= len(taken)
        if until - bucket.start > len(kept):
            self._remove(lane, bucket, until, kept)
        return Segment(taken, lane.kind, bucket.order, places)

    def _remove(self, lane: Lane, bucket: Bucket, until: int, kept: Sequence[int]) -> None:
        lane.remove_before(bucket, until, kept)
        self.has_removed = True
        self.has_removed_timed = self.has_removed_timed or lane.kind is BucketKind.TIMED

    def finish(self) -> None:
        """Has the lanes drop the buckets that the walk has emptied."""
        for lane, visited in zip(self._lanes, self._visited, strict=True):
            if visited:
                lane.drop_emptied(visited)
