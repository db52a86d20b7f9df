"""The available messages of one queue: what joins them, and what a claim takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter

from libs.storage.layout.buckets import (
    MAX_ORDER_N,
    BucketKind,
    bucket_number,
    last_lane_order,
    order_in_time,
    order_of,
    split_order,
)
from libs.storage.layout.keys import BUCKET, RecordType, queue_head, waiting_tail
from libs.storage.layout.primitives import Row
from libs.storage.records.queues import AvailableMessage
from libs.storage.records.states import LaneRecord
from services.broker.core.waiting.bucket import Bucket, Columns, Place
from services.broker.core.waiting.counts import Counts, counts_of
from services.broker.core.waiting.lane import READY_BUCKET_MAX, IsOver, Lane
from services.broker.core.waiting.orders import Orders
from services.broker.core.waiting.scan import (
    BulkSelector,
    Choice,
    ExpiryPolicy,
    Needs,
    NeedsBucket,
    NeedsDue,
    NeedsLane,
    NeedsRows,
    Segment,
    Selector,
    StoredBucket,
    Walk,
)
from services.broker.core.waiting.time_slots import TIMED_LAST_MS, OpenTimedBuckets

Beyond = tuple[Lane, list[int]]
"""A lane and orders of it which it may let go of once they are durable."""


class Available:
    """The lanes of one queue. Times are ms by the broker's clock."""

    def __init__(
        self, queue_id: str, orders: Orders, epoch: int, records: Iterable[LaneRecord]
    ) -> None:
        self.queue_id = queue_id
        self.epoch = epoch
        """That of the lanes: each purge begins another one."""
        self.changed = False
        """Whether a walk has removed anything since this was last set to False."""
        self.dropped_count = 0
        """How many messages `look_at_due` has dropped since this was last set to 0."""
        self._key_head = queue_head(RecordType.ACTIVE, queue_id)
        self._orders = orders
        self.by_name = {(one.priority, one.kind): Lane.restore(one, epoch) for one in records}
        self.has_timed = any(kind is BucketKind.TIMED for _, kind in self.by_name)
        """Whether there are messages that have to wait for a time, or were once."""
        self._open_ready: dict[int, Bucket] = {}  # by priority: filled until the next commit
        self._open_timed = OpenTimedBuckets(orders)
        self._walked_ms = 0  # until when timed messages may have been looked at

    @property
    def ready_count(self) -> int:
        """Available messages that wait for nothing but a claim."""
        return sum(lane.count for lane in self.by_name.values() if lane.kind == BucketKind.READY)

    @property
    def timed_count(self) -> int:
        """Available messages with a time from which on they may be claimed, due ones included."""
        return sum(lane.count for lane in self.by_name.values() if lane.kind == BucketKind.TIMED)

    def timed_lanes(self) -> list[Lane]:
        """The lanes of messages that have, or had, to wait for a time; in no order."""
        if not self.has_timed:  # most queues: asked at every commit, this must cost nothing
            return []
        return [lane for lane in self.by_name.values() if lane.kind is BucketKind.TIMED]

    def next_due_ms(self) -> int | None:
        """When the first timed message falls due, or a lower bound; None when there is none."""
        earliest = [
            lane.earliest_in_time
            for lane in self.by_name.values()
            if lane.kind == BucketKind.TIMED and lane.count
        ]
        return min((split_order(one).ms for one in earliest if one is not None), default=None)

    def records(self) -> tuple[LaneRecord, ...]:
        """Where each lane stands."""
        return tuple([lane.record() for lane in self.by_name.values()])

    def lanes(self) -> list[Lane]:
        """All lanes, in the order of delivery but for what falls due."""
        return [self.by_name[name] for name in sorted(self.by_name)]

    def lane(self, priority: int, kind: BucketKind) -> Lane | None:
        """The lane, if there is something in it."""
        return self.by_name.get((priority, kind))

    def counts(self, now_ms: int) -> Counts:
        """How many messages wait, as far as memory tells."""
        return counts_of(self.lanes(), self.due_until(now_ms), now_ms)

    # --- Messages come ------------------------------------------------------

    def add_ready(self, priority: int, items: Sequence[AvailableMessage], now_ms: int) -> int:
        """Makes messages of one priority available now, behind those that are.

        Gives the order of the bucket with the last of them.
        """
        lane = self._lane(priority, BucketKind.READY)
        order = done = 0
        while done < len(items):
            bucket = self._open_bucket(lane, now_ms)
            if bucket is None:
                part = list(items[done : done + READY_BUCKET_MAX])
                bucket = self._open_ready[priority] = Bucket(
                    self._orders.next_of(self.epoch, now_ms), part
                )
                lane.add(bucket)
            else:
                part = list(items[done : done + READY_BUCKET_MAX - bucket.count])
                lane.extend(bucket, part)
            done += len(part)
            order = bucket.order
        return order

    def add_new(self, columns: Columns, now_ms: int) -> None:
        """As `add_ready`: mostly a queue gets some messages once between two commits."""
        priority = columns.priority
        begun = self._open_ready.get(priority)
        if begun is not None and begun.count < READY_BUCKET_MAX:
            self.add_ready(priority, columns.messages(), now_ms)
            return
        lane = self._lane(priority, BucketKind.READY)
        for part in columns.parts(READY_BUCKET_MAX):
            bucket = Bucket(self._orders.next_of(self.epoch, now_ms), [], columns=part)
            lane.add(bucket)
            self._open_ready[priority] = bucket

    def _open_bucket(self, lane: Lane, now_ms: int) -> Bucket | None:
        bucket = self._open_ready.get(lane.priority)
        if bucket is None or bucket.count >= READY_BUCKET_MAX:
            return None
        if lane.find(bucket.order) is not bucket:
            return None
        timed = self.by_name.get((lane.priority, BucketKind.TIMED))
        due = timed.earliest_in_time if timed is not None else None
        # What fell due since the bucket was begun comes before what is added now.
        if due is not None and due <= order_of(self.epoch, now_ms, MAX_ORDER_N):
            return None
        return bucket

    def seen_until(self, now_ms: int) -> int:
        """A message that is visible after this must wait for its time, not only for a claim.

        Where claims have looked already (a command may run late, with the time at which it came),
        nothing is put any more.
        """
        return max(now_ms, self._walked_ms)

    def add_timed(self, priority: int, item: AvailableMessage) -> Place:
        """Makes a message available from its `visible_at_ms` on; says where it is.

        Both this time and its retention must be after `seen_until`. One whose retention ends first
        stands at that time, to be dropped then.
        """
        bucket = self._open_timed.add(self._lane(priority, BucketKind.TIMED), item)
        return Place(priority, BucketKind.TIMED, bucket.order)

    def put_back(
        self,
        priority: int,
        kind: BucketKind,
        order: int,
        items: Sequence[tuple[int, AvailableMessage]],
    ) -> None:
        """Returns messages that were taken from the bucket of this order: (place, message)."""
        if split_order(order_in_time(kind, order)).epoch == self.epoch:
            self._lane(priority, kind).put_back(order, items)
        else:  # The queue was purged meanwhile.
            self.add_ready(priority, [item for _, item in sorted(items, key=itemgetter(0))], 0)

    def _lane(self, priority: int, kind: BucketKind) -> Lane:
        lane = self.by_name.get((priority, kind))
        if lane is None:
            lane = self.by_name[priority, kind] = Lane(priority, kind, self.epoch)
            self.has_timed = self.has_timed or kind is BucketKind.TIMED
        return lane

    # --- One message, or all ------------------------------------------------

    def find(self, place: Place) -> tuple[Lane, Bucket] | None:
        """The bucket there, if there is one. May raise NeedsRows as part of Needs."""
        lane = self.by_name.get((place.priority, place.kind))
        if lane is None or self._epoch_of(place) != self.epoch:
            return None
        bucket = lane.find(place.order)
        if bucket is None:
            if not lane.has_none(place.order):
                raise Needs([NeedsBucket(self, lane, place.order)], ())
            return None
        return lane, bucket

    def _epoch_of(self, place: Place) -> int:
        return split_order(order_in_time(place.kind, place.order)).epoch

    def find_all(self, places: Iterable[Place]) -> dict[Place, tuple[Lane, Bucket] | None]:
        """As `find` for several; what must be read is told together."""
        found = {}
        slots: list[NeedsRows] = []
        for place in places:
            try:
                found[place] = self.find(place)
            except Needs as need:
                slots += need.slots
        if slots:
            raise Needs(slots, ())
        return found

    def purge(self, epoch: int) -> int:
        """Drops everything in O(lanes): the lanes begin anew in this epoch. Gives how many."""
        count = sum(lane.count for lane in self.by_name.values())
        self.epoch = epoch
        self.by_name = {}
        self._open_ready = {}
        self._open_timed.close()
        return count

    # --- Time comes ---------------------------------------------------------

    def due_until(self, now_ms: int) -> int:
        """The last order in a timed lane whose time has come."""
        time = order_of(self.epoch, min(now_ms, TIMED_LAST_MS), 0)
        return last_lane_order(BucketKind.TIMED, time)

    def has_due(self, now_ms: int) -> bool:
        """Whether `look_at_due` has something to do."""
        until = self.due_until(now_ms)
        return any(_has_due(lane, until) for lane in self.by_name.values())

    def look_at_due(self, is_over: IsOver, now_ms: int, limit: int) -> int:
        """Counts what has fallen due and drops that of which `is_over` is true.

        Looks at about `limit` messages and gives how many. May raise NeedsLane or Needs; it goes
        on where it was.
        """
        until = self.due_until(now_ms)
        self._walked_ms = max(self._walked_ms, now_ms)
        looked_at = 0
        for lane in [lane for lane in self.by_name.values() if _has_due(lane, until)]:
            if lane.head is None and not lane.complete:
                raise NeedsLane(self, lane)
            count = lane.count
            looked_at += lane.look_at_due(until, is_over, limit - looked_at)
            self.dropped_count += count - lane.count
            if looked_at >= limit:
                break
            if lane.count and lane.due_until < until:
                raise Needs([NeedsDue(self, lane, until, is_over)], ())
        return looked_at

    def offer_due(self, need: NeedsDue, rows: Sequence[StoredBucket], through: int) -> None:
        """Answers a NeedsDue."""
        lane = need.lane
        if need.first_order == lane.due_until + 1 and need.known_until == lane.known_until:
            count = lane.count
            lane.offer_due(rows, need.first_order, through, need.is_over)
            self.dropped_count += count - lane.count

    # --- Messages leave -----------------------------------------------------

    def walk(
        self,
        choose: Selector,
        over: ExpiryPolicy,
        now_ms: int,
        found: Sequence[object],
        many: BulkSelector | None = None,
    ) -> list[Segment]:
        """Offers visible messages in the order of delivery; gives those taken. May raise NeedsLane.

        Drops those that are over; `found` is what the walk has come upon so far. Where `many` is
        given, it is asked first, about whole buckets.

        Something is read from the database only for a walk that has not found anything yet, and
        only so much of a lane, however much of it cannot be had; lower priorities wait then too.
        """
        taken: list[Segment] = []
        self._walked_ms = max(self._walked_ms, now_ms)
        for priority in sorted({priority for priority, _ in self.by_name}):
            lanes = [
                lane
                for kind in (BucketKind.READY, BucketKind.TIMED)
                if (lane := self.by_name.get((priority, kind))) and lane.count
            ]
            walk = Walk(lanes, self.epoch, now_ms)
            cold = None
            for lane, bucket in walk:
                if bucket is None:
                    cold = lane
                    break
                segment = many and self._offer_many(walk, lane, bucket, many, over)
                segment = segment or self._offer(walk, lane, bucket, choose, over)
                if segment.items:
                    taken.append(segment)
            walk.settle()
            if cold is not None and not (found or taken) and (cold.head is None or cold.roomy):
                raise NeedsLane(self, cold)
            if walk.stopped or cold is not None:
                break
        return taken

    def _offer_many(
        self, walk: Walk, lane: Lane, bucket: Bucket, many: BulkSelector, over: ExpiryPolicy
    ) -> Segment | None:
        """What was taken; None when the messages must be offered one by one."""
        start, count = bucket.start, bucket.count
        end = min(count, start + many.room())
        items = bucket.items[start:end]
        if over.any_may(*bucket.worst) or not many.offer(items):
            return None
        walk.stopped = end < count
        if not many.takes or not items:
            return Segment((), lane.kind, bucket.order, ())
        segment = Segment(items, lane.kind, bucket.order, bucket.places_of(start, end))
        self._taken(lane, bucket, end, ())
        return segment

    def _offer(
        self, walk: Walk, lane: Lane, bucket: Bucket, choose: Selector, over: ExpiryPolicy
    ) -> Segment:
        items = bucket.items
        taken: list[AvailableMessage] = []
        places: list[int] = []
        kept: list[int] = []
        until = len(items)
        for index in range(bucket.start, until):
            item = items[index]
            if over.drop(item):
                continue
            choice = choose(item)
            if choice is Choice.TAKE:
                taken.append(item)
                places.append(bucket.place(index))
            elif choice is Choice.SKIP:
                kept.append(index)
            else:
                walk.stopped = True
                until = index
                break
        if until - bucket.start > len(kept):
            self._taken(lane, bucket, until, kept)
        return Segment(taken, lane.kind, bucket.order, places)

    def _taken(self, lane: Lane, bucket: Bucket, until: int, kept: Sequence[int]) -> None:
        lane.taken(bucket, until, kept)
        self.changed = True
        if lane.kind is BucketKind.TIMED:
            # What comes now is behind these, also where they are given back.
            self._open_ready.pop(lane.priority, None)

    # --- Records ------------------------------------------------------------

    def drain(self, generation: int, rows: list[Row]) -> list[Beyond]:
        """Adds the rows that changed since the last drain; what may go once they are durable."""
        beyond = []
        for lane in tuple(self.by_name.values()):
            if lane.to_write:
                self._put_rows(lane, rows)
                orders = lane.written(generation)
                if orders or lane.crowded:
                    beyond.append((lane, orders))
            if not lane.count:
                del self.by_name[lane.priority, lane.kind]
        self._open_ready.clear()
        self._open_timed.close()
        return beyond

    def _put_rows(self, lane: Lane, rows: list[Row]) -> None:
        head, first = self._key_head, bucket_number(lane.priority, lane.kind, 0)
        is_timed = lane.kind is BucketKind.TIMED
        for order, bucket in lane.changed.items():
            if is_timed:
                tail = waiting_tail(lane.priority, BucketKind.TIMED, order)
            else:
                tail = BUCKET.pack(first | order)
            if bucket is not None and bucket.start and not bucket.stored:
                bucket.trim()
            rows.append((head + tail, None if bucket is None else bucket.value()))


def _has_due(lane: Lane, until_order: int) -> bool:
    if lane.kind != BucketKind.TIMED or not lane.count or lane.due_until >= until_order:
        return False
    return lane.earliest is not None and lane.earliest <= until_order
