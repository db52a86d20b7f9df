"""The available messages of one queue: what joins them, and what a claim takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from libs.storage.buckets import (
    MAX_ORDER_MS,
    BucketKind,
    bucket_number,
    order_of,
    split_order,
)
from libs.storage.keys import active_key
from libs.storage.queues import AvailableMessage, encode_active
from libs.storage.states import LaneRecord
from services.broker.lanes import READY_BUCKET_MAX, TIMED_BUCKET_MAX, Lane
from services.broker.leases import Row
from services.broker.waiting_buckets import Bucket
from services.broker.walks import (
    LAST_N,
    MILLISECOND,
    Choice,
    Chooser,
    NeedsLane,
    NeedsSlot,
    Taken,
    Walk,
)

TIMED_LAST_MS = MAX_ORDER_MS - (1 << 20)
"""The latest time for which there are buckets (2248); what is due later is due then."""

Beyond = tuple[Lane, list[int]]
"""A lane and orders of it which it may let go of once they are durable."""


class Orders:
    """The hybrid clock of one queue, from which buckets get their orders."""

    __slots__ = ("epoch", "last")

    def __init__(self, epoch: int, last: int) -> None:
        self.epoch = epoch
        self.last = last

    def next(self, now_ms: int) -> int:
        """An order above every other: the time, or where several fall together, a little more."""
        self.last = max(self.last + 1, order_of(self.epoch, now_ms, 0))
        return self.last


class Available:
    """The lanes of one queue. Times are ms by the broker's clock."""

    def __init__(self, queue_id: str, orders: Orders, records: Iterable[LaneRecord]) -> None:
        self.queue_id = queue_id
        self.epoch = orders.epoch
        self.changed = False
        """Whether a walk has removed anything since this was last set to False."""
        self._orders = orders
        self._lanes = {(one.priority, one.kind): Lane.restore(one) for one in records}
        self._open_ready: dict[int, Bucket] = {}  # by priority: filled until the next commit
        self._walked_ms = 0  # until when timed messages may have been looked at

    @property
    def ready_count(self) -> int:
        """Available messages that wait for nothing but a claim."""
        return sum(lane.count for lane in self._lanes.values() if lane.kind == BucketKind.READY)

    @property
    def timed_count(self) -> int:
        """Available messages with a time from which on they may be claimed, due ones included."""
        return sum(lane.count for lane in self._lanes.values() if lane.kind == BucketKind.TIMED)

    def next_due_ms(self) -> int | None:
        """When the first timed message falls due, or a lower bound; None when there is none."""
        earliest = [
            lane.earliest
            for lane in self._lanes.values()
            if lane.kind == BucketKind.TIMED and lane.count
        ]
        return min((order_ms(order) for order in earliest if order is not None), default=None)

    def records(self) -> tuple[LaneRecord, ...]:
        """Where each lane stands."""
        return tuple(lane.record() for lane in self._lanes.values())

    # --- Messages come ------------------------------------------------------

    def add_ready(self, priority: int, items: Sequence[AvailableMessage], now_ms: int) -> None:
        """Makes messages of one priority available now, behind those that are."""
        lane = self._lane(priority, BucketKind.READY)
        done = 0
        while done < len(items):
            bucket = self._open_bucket(lane, now_ms)
            if bucket is None:
                part = list(items[done : done + READY_BUCKET_MAX])
                bucket = self._open_ready[priority] = Bucket(self._orders.next(now_ms), part)
                lane.add(bucket)
            else:
                part = list(items[done : done + READY_BUCKET_MAX - len(bucket.items)])
                lane.extend(bucket, part)
            done += len(part)

    def _open_bucket(self, lane: Lane, now_ms: int) -> Bucket | None:
        bucket = self._open_ready.get(lane.priority)
        if bucket is None or len(bucket.items) >= READY_BUCKET_MAX:
            return None
        if lane.find(bucket.order) is not bucket:
            return None
        timed = self._lanes.get((lane.priority, BucketKind.TIMED))
        due = timed.earliest if timed is not None else None
        # What fell due since the bucket was begun comes before what is added now.
        if due is not None and due <= order_of(self.epoch, now_ms, LAST_N):
            return None
        return bucket

    def seen_until(self, now_ms: int) -> int:
        """A message that is visible after this must wait for its time, not only for a claim.

        Where claims have looked already (a command may run late, with the time at which it came),
        nothing is put any more.
        """
        return max(now_ms, self._walked_ms)

    def needs_slot(self, priority: int, visible_at_ms: int) -> NeedsSlot | None:
        """What must be read before `add_timed`, if anything."""
        lane = self._lane(priority, BucketKind.TIMED)
        first, last = self._slot(lane, visible_at_ms)
        if lane.knows(first, first + LAST_N):
            if not _is_full(last) or lane.knows(first + MILLISECOND, first + MILLISECOND + LAST_N):
                return None
            first += MILLISECOND
        return NeedsSlot(self, lane, first)

    def offer_slot(
        self, need: NeedsSlot, rows: Sequence[tuple[int, list[AvailableMessage]]]
    ) -> None:
        """Answers a NeedsSlot with the buckets of that millisecond in the database, ascending."""
        lane = need.lane
        # Another command may have asked for the same one, and changed it since; or the lane was
        # read meanwhile, and knows better.
        if lane.known_until != need.known_until or lane.remembers(need.first_order):
            return
        bucket = Bucket(*rows[-1], stored=True) if rows else None
        in_memory = lane.last_between(need.first_order, need.last_order)
        if bucket is None or (in_memory is not None and in_memory.order >= bucket.order):
            bucket = in_memory  # the read began before this was written
        lane.remember(need.first_order, bucket)

    def add_timed(self, priority: int, item: AvailableMessage) -> None:
        """Makes a message available from its `visible_at_ms` on. See `needs_slot`, `seen_until`."""
        lane = self._lane(priority, BucketKind.TIMED)
        first, bucket = self._slot(lane, item.visible_at_ms)
        full = bucket is not None and len(bucket.items) >= TIMED_BUCKET_MAX
        if bucket is not None and (not full or bucket.order & LAST_N == LAST_N):
            lane.extend(bucket, [item])
        else:
            bucket = Bucket(bucket.order + 1 if bucket else first, [item])
            lane.add(bucket)
        if first + LAST_N > lane.known_until:
            lane.remember(first, bucket)

    def _slot(self, lane: Lane, visible_at_ms: int) -> tuple[int, Bucket | None]:
        """The first order of the millisecond to which a message is added, and its last bucket.

        A millisecond whose buckets are all full passes on to the next one, if that is known.
        """
        first = order_of(self.epoch, min(visible_at_ms, TIMED_LAST_MS), 0)
        while True:
            bucket = lane.last_known(first, first + LAST_N)
            if not _is_full(bucket):
                return first, bucket
            after = first + MILLISECOND
            if not lane.knows(after, after + LAST_N):
                return first, bucket
            first = after

    def put_back(
        self,
        priority: int,
        kind: BucketKind,
        order: int,
        items: Sequence[tuple[int, AvailableMessage]],
    ) -> None:
        """Returns messages that were taken from the bucket of this order: (place, message)."""
        self._lane(priority, kind).put_back(order, items)

    def _lane(self, priority: int, kind: BucketKind) -> Lane:
        lane = self._lanes.get((priority, kind))
        if lane is None:
            lane = self._lanes[priority, kind] = Lane(priority, kind)
        return lane

    # --- Messages leave -----------------------------------------------------

    def walk(
        self,
        choose: Chooser,
        is_over: Callable[[AvailableMessage], bool],
        now_ms: int,
        found: Sequence[object],
    ) -> list[Taken]:
        """Offers visible messages in the order of delivery; gives those taken. May raise NeedsLane.

        Drops those of which `is_over` is true; `found` is what the walk has come upon so far.

        Something is read from the database only for a walk that has not found anything yet, and
        only so much of a lane, however much of it cannot be had; lower priorities wait then too.
        """
        taken: list[Taken] = []
        self._walked_ms = max(self._walked_ms, now_ms)
        for priority in sorted({priority for priority, _ in self._lanes}):
            lanes = [
                lane
                for kind in (BucketKind.READY, BucketKind.TIMED)
                if (lane := self._lanes.get((priority, kind))) and lane.count
            ]
            walk = Walk(lanes, self.epoch, now_ms)
            cold = None
            for lane, bucket in walk:
                if bucket is None:
                    cold = lane
                    break
                taken += self._offer(walk, lane, bucket, choose, is_over)
            walk.settle()
            if cold is not None and not (found or taken) and (cold.head is None or cold.roomy):
                raise NeedsLane(self, cold)
            if walk.stopped or cold is not None:
                break
        return taken

    def _offer(
        self,
        walk: Walk,
        lane: Lane,
        bucket: Bucket,
        choose: Chooser,
        is_over: Callable[[AvailableMessage], bool],
    ) -> list[Taken]:
        items, kind, order = bucket.items, lane.kind, bucket.order
        taken: list[Taken] = []
        kept: list[int] = []
        until = len(items)
        for index in range(bucket.start, until):
            item = items[index]
            if is_over(item):
                continue
            choice = choose(item)
            if choice is Choice.TAKE:
                taken.append((item, (kind, order, bucket.place(index))))
            elif choice is Choice.SKIP:
                kept.append(index)
            else:
                walk.stopped = True
                until = index
                break
        if until - bucket.start > len(kept):
            lane.taken(bucket, until, kept)
            self.changed = True
            if kind is BucketKind.TIMED:
                # What comes now is behind these, also where they are given back.
                self._open_ready.pop(lane.priority, None)
        return taken

    # --- Records ------------------------------------------------------------

    def drain(self, generation: int) -> tuple[list[Row], list[Beyond]]:
        """Rows that changed since the last drain, and what may go once they are durable."""
        rows: list[Row] = []
        beyond = []
        for lane in list(self._lanes.values()):
            if lane.changed or lane.crowded:
                rows.extend(self._lane_rows(lane))
                orders = lane.written(generation)
                if orders or lane.crowded:
                    beyond.append((lane, orders))
            lane.forget_slots()
            if not lane.count:
                del self._lanes[lane.priority, lane.kind]
        self._open_ready.clear()
        return rows, beyond

    def _lane_rows(self, lane: Lane) -> Iterator[Row]:
        for order, bucket in lane.changed.items():
            key = active_key(self.queue_id, bucket_number(lane.priority, lane.kind, order))
            if bucket is None:
                yield key, None
                continue
            if bucket.start and not bucket.stored:
                bucket.trim()
            yield key, encode_active(bucket.items, ())


def _is_full(bucket: Bucket | None) -> bool:
    """Whether this is the last bucket that its millisecond has, and full."""
    if bucket is None or bucket.order & LAST_N != LAST_N:
        return False
    return len(bucket.items) >= TIMED_BUCKET_MAX


def order_ms(order: int) -> int:
    """The milliseconds in an order."""
    return split_order(order).ms
