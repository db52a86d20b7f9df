"""The walk that a claim takes over a queue: which message is next, and what must be read first."""

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
"""Queue, the revision at which it was created, and message. The revision tells a queue from its
predecessor of the same name, whose records expire."""

StoredBucket = tuple[int, list[AvailableMessage]]
"""A bucket as it was read: its order and messages."""


class LaneOwner(Protocol):
    """What a read of lanes needs of the queue that has them."""

    queue_id: str

    @property
    def by_name(self) -> Mapping[tuple[int, BucketKind], Lane]:
        """All lanes, by priority and kind."""

    def lane(self, priority: int, kind: BucketKind) -> Lane | None:
        """The lane of this priority and kind; None where there is none."""

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
    """What is in this bucket? Only for those that change it: claims read lanes from the front."""

    def __init__(self, available: LaneOwner, lane: Lane, order: int) -> None:
        super().__init__(available, lane, order, order)

    def offer(self, rows: Sequence[StoredBucket], through: int) -> None:
        """See NeedsRows."""
        self.lane.pin(self.first_order, rows[0][1] if rows else None)


class NeedsDue(NeedsRows):
    """What has fallen due beyond the part of a lane that is in memory?"""

    in_parts = True

    def __init__(self, available: LaneOwner, lane: Lane, last_order: int, is_over: IsOver) -> None:
        super().__init__(available, lane, lane.due_until + 1, last_order)
        self.is_over = is_over

    def offer(self, rows: Sequence[StoredBucket], through: int) -> None:
        """See NeedsRows."""
        self.available.offer_due(self, rows, through)


class Choice(Enum):
    """What a claim does with the message that it looks at."""

    TAKE = 1
    SKIP = 2  # it cannot be had now: leave it where it is
    STOP = 3  # enough


Selector = Callable[[AvailableMessage], Choice]

Origin = tuple[BucketKind, int, int]
"""Where a message was taken from: kind, order and the place within the bucket."""


class Segment(NamedTuple):
    """Messages that were taken from one bucket, with their places in it."""

    items: Sequence[AvailableMessage]
    kind: BucketKind
    order: int
    places: Sequence[int]


class ExpiryPolicy(Protocol):
    """Which messages must leave without being handed out."""

    def drop(self, item: AvailableMessage) -> bool:
        """Whether this one must; it is dropped then."""

    def any_may(self, attempts: int, deadline_ms: int) -> bool:
        """Whether one may that has these attempts at most, or this deadline or a later one."""


class BulkSelector(ABC):
    """Chooses among many messages at once, as long as nothing speaks against any of them.

    A walk asks it first; where it cannot say, the walk asks a Chooser about each message.
    """

    takes = True
    """Whether what it says yes to is taken; otherwise left where it is."""

    @abstractmethod
    def room(self) -> int:
        """How many messages it may be offered; 0: enough."""

    @abstractmethod
    def offer(self, items: Sequence[AvailableMessage]) -> bool:
        """Says yes to all of these, or (False) to none."""


class Walk:
    """Goes over the buckets of one priority in the order in which they came or fell due.

    Gives (lane, bucket), or (lane, None) where the lane must be read from the database first.
    """

    def __init__(self, lanes: list[Lane], epoch: int, now_ms: int) -> None:
        self.now_ms = now_ms
        self.stopped = False
        self._due_until = order_of(epoch, now_ms, MAX_ORDER_N)
        self._lanes = lanes
        self._visited = [0] * len(lanes)

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
        if bucket is None and lane.complete:
            return None
        order = order_in_time(lane.kind, bucket.order if bucket else lane.first_unknown)
        if lane.kind == BucketKind.TIMED and order > self._due_until:
            return None
        return order

    def settle(self) -> None:
        """Lets the lanes drop what the walk has emptied."""
        for lane, visited in zip(self._lanes, self._visited, strict=True):
            if visited:
                lane.settle(visited)
        self._visited = [0] * len(self._lanes)
