"""The available messages of one queue: how they join it, what a claim takes, and what expires."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

from libs.storage.layout.buckets import (
    MAX_ORDER_MS,
    MAX_ORDER_N,
    BucketKind,
    bucket_number,
    lane_order,
    last_lane_order,
    number_of,
    order_in_time,
    order_of,
    split_order,
)
from libs.storage.layout.keys import BUCKET, RecordType, queue_head, waiting_tail
from libs.storage.layout.primitives import RowChange
from libs.storage.records.delayed_records import DelayedMessage
from libs.storage.records.queues import AvailableMessage
from libs.storage.records.states import LaneRecord, PurgesRecord
from services.broker.core.settings import DEFAULT_PRIORITY
from services.broker.core.waiting.bucket import Bucket, Columns, Place
from services.broker.core.waiting.delayed_journal import DelayedJournal
from services.broker.core.waiting.lane import READY_BUCKET_MAX, Lane
from services.broker.core.waiting.orders import Orders, in_epoch
from services.broker.core.waiting.scan import (
    ExpiryPolicy,
    Needs,
    NeedsBeyond,
    NeedsBucket,
    NeedsDue,
    NeedsLane,
    NeedsRows,
    Segment,
    Selector,
    StoredBucket,
    Walk,
    choose_wanted,
)

TIMED_BUCKET_MAX = 500
"""Messages in a timed bucket at most: a claim that leaves some behind writes them again."""

TIMED_LAST_MS = MAX_ORDER_MS - (1 << 20)
"""The latest time for which there are buckets (2248); what is due later is due then."""

Beyond = tuple[Lane, list[int]]
"""A lane, and orders of it that it may let go of once they are durable."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What waits in a queue at one moment.

    `by_priority` has (priority, available, delayed), ascending; `oldest_claimable_ms` is how long
    the oldest claimable message has been claimable, None if there is none.
    """

    available: int
    delayed: int
    by_priority: tuple[tuple[int, int, int], ...]
    oldest_claimable_ms: int | None


def counts_of(lanes: Iterable[Lane], due_until: int, now_ms: int) -> Counts:
    """The counts of these lanes; timed messages up to the order `due_until` are available."""
    by_priority: dict[int, tuple[int, int]] = {}
    oldest = []
    for lane in lanes:
        if not lane.count:
            continue
        available, delayed = by_priority.get(lane.priority, (0, 0))
        claimable = lane.count if lane.kind == BucketKind.READY else lane.due_now(due_until)
        if claimable and lane.earliest_in_time is not None:
            oldest.append(split_order(lane.earliest_in_time).ms)
        by_priority[lane.priority] = (available + claimable, delayed + lane.count - claimable)
    return Counts(
        available=sum(available for available, _ in by_priority.values()),
        delayed=sum(delayed for _, delayed in by_priority.values()),
        by_priority=tuple((name, *counts) for name, counts in sorted(by_priority.items())),
        oldest_claimable_ms=max(0, now_ms - min(oldest)) if oldest else None,
    )


class Available:
    """The lanes of one queue. Times are ms by the broker's clock."""

    def __init__(
        self,
        queue_id: str,
        orders: Orders,
        purges: PurgesRecord,
        lanes: Iterable[LaneRecord],
        touch: Callable[[], None],
        forget: Callable[[int], None],
    ) -> None:
        """Restore stored lanes; `touch` is called whenever the state record changes.

        `forget` is called with messages that leave for ever, and may have failed before.
        """
        self._forget = forget
        self.queue_id = queue_id
        self.epoch = purges.lane_epoch
        """In the orders of the lanes: each purge begins another one."""
        self.garbage_epochs = purges.garbage_lane_epochs
        """The epochs of former lanes whose rows are still to be removed."""
        self.expired_count = 0
        """Messages that left past their retention since the start, for metrics."""
        self.entered_count = 0
        """Messages that came in since the start, and those put back."""
        self.delayed = DelayedJournal(in_epoch(self.epoch, orders.last))
        self._key_head = queue_head(RecordType.ACTIVE, queue_id)
        self._orders = orders
        self._touch = touch
        self.by_name = {(one.priority, one.kind): Lane.restore(one, self.epoch) for one in lanes}
        self.has_timed = any(kind is BucketKind.TIMED for _, kind in self.by_name)
        """Whether messages have to wait for a time, or ever had to."""
        self._open_ready: dict[int, Bucket] = {}  # by priority: filled until the next commit
        self._open_timed = OpenTimedBuckets(orders)
        self._walked_ms = 0  # until when timed messages may have been looked at

    @property
    def ready_count(self) -> int:
        """Messages that wait for nothing but a claim."""
        return sum(lane.count for lane in self.by_name.values() if lane.kind == BucketKind.READY)

    @property
    def timed_count(self) -> int:
        """Messages with a time from which on they may be claimed, due ones included."""
        return sum(lane.count for lane in self.by_name.values() if lane.kind == BucketKind.TIMED)

    def timed_lanes(self) -> list[Lane]:
        """The lanes of messages that have, or had, to wait for a time; in no order."""
        if not self.has_timed:  # most queues: asked at every commit, this must cost nothing
            return []
        return [lane for lane in self.by_name.values() if lane.kind is BucketKind.TIMED]

    def next_due_ms(self) -> int | None:
        """When the first timed message falls due, or a lower bound; None when there is none."""
        earliest = [lane.earliest_in_time for lane in self.timed_lanes() if lane.count]
        return min((split_order(one).ms for one in earliest if one is not None), default=None)

    def records(self) -> tuple[LaneRecord, ...]:
        return tuple([lane.record() for lane in self.by_name.values()])

    def lanes(self) -> list[Lane]:
        """All lanes, in the order of delivery except for what falls due."""
        return [self.by_name[name] for name in sorted(self.by_name)]

    def lane(self, priority: int, kind: BucketKind) -> Lane | None:
        return self.by_name.get((priority, kind))

    def counts(self, now_ms: int) -> Counts:
        """How many messages wait, by priority; in O(lanes), as far as memory knows."""
        return counts_of(self.lanes(), self.due_until(now_ms), now_ms)

    # --- Messages join ------------------------------------------------------

    def seen_until(self, now_ms: int) -> int:
        """A message that is visible after this must wait for its time, not only for a claim.

        Nothing is added at a time that claims have already passed: a command may run late, with
        the time at which it came.
        """
        return max(now_ms, self._walked_ms)

    def is_over(self, item: AvailableMessage, now_ms: int) -> bool:
        """Whether a message is past its retention, by the latest time that was looked at."""
        return 0 < item.retention_deadline_ms <= self.seen_until(now_ms)

    def assign(
        self,
        message_ids: Sequence[int],
        priorities: Sequence[int],
        deadlines_ms: Sequence[int],
        visible_at_ms: Sequence[int],
        now_ms: int,
    ) -> None:
        """Adds messages that come into the queue, as columns; an empty one has all defaults."""
        self._touch()
        self.entered_count += len(message_ids)
        seen_ms = self.seen_until(now_ms)
        if not (priorities or visible_at_ms or (deadlines_ms and min(deadlines_ms) <= seen_ms)):
            self._add_columns(Columns(message_ids, DEFAULT_PRIORITY, deadlines_ms), now_ms)
            return
        count = len(message_ids)
        ready: dict[int, list[AvailableMessage]] = {}
        rows = zip(
            message_ids,
            priorities or (DEFAULT_PRIORITY,) * count,
            deadlines_ms or (0,) * count,
            visible_at_ms or (0,) * count,
            strict=True,
        )
        for message_id, priority, deadline_ms, visible_ms in rows:
            if 0 < deadline_ms <= seen_ms:
                self.expired_count += 1
                continue
            item = AvailableMessage(message_id, priority, visible_ms, deadline_ms, 0)
            if visible_ms > seen_ms:
                self._journal(item, self._add_timed(item))
            else:
                ready.setdefault(priority, []).append(item)
        for priority, items in ready.items():
            self._add_ready(priority, items, now_ms)

    def admit(self, item: AvailableMessage, now_ms: int) -> Place | None:
        """Like `enqueue`; if the message is delayed, watchers of the queue see it arrive."""
        place = self.enqueue(item, now_ms)
        if place is not None and place.kind is BucketKind.TIMED:
            self._journal(item, place)
        return place

    def enqueue(self, item: AvailableMessage, now_ms: int) -> Place | None:
        """Makes a message available from its `visible_at_ms` on; returns where it is.

        Drops one whose retention is over (None).
        """
        if self.is_over(item, now_ms):
            self.note_over(item)
            return None
        self._touch()
        self.entered_count += 1
        if item.visible_at_ms > self.seen_until(now_ms):
            return self._add_timed(item)
        item = item._replace(visible_at_ms=0)
        order = self._add_ready(item.priority, [item], now_ms)
        return Place(item.priority, BucketKind.READY, order)

    def reinsert(
        self,
        priority: int,
        kind: BucketKind,
        order: int,
        items: Sequence[tuple[int, AvailableMessage]],
    ) -> None:
        """Returns messages that were taken from the bucket of this order: (place, message)."""
        self._touch()
        is_here = split_order(order_in_time(kind, order)).epoch == self.epoch
        lane = self._lane(priority, kind) if is_here else None
        if lane is not None and (lane.find(order) is not None or lane.has_none(order)):
            lane.reinsert(order, items)
        else:  # The queue was purged meanwhile, or the bucket is not in memory any more.
            self._add_ready(priority, [item for _, item in sorted(items, key=itemgetter(0))], 0)

    def _journal(self, item: AvailableMessage, place: Place) -> None:
        delayed_message = DelayedMessage(
            item.message_id,
            place.priority,
            item.visible_at_ms,
            item.retention_deadline_ms,
            order_in_time(place.kind, place.order),
            number_of(place.order),
        )
        self.delayed.add(delayed_message)

    def _add_ready(self, priority: int, items: Sequence[AvailableMessage], now_ms: int) -> int:
        """Adds messages of one priority behind all others; returns the last one's bucket."""
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

    def _add_columns(self, columns: Columns, now_ms: int) -> None:
        """Like `_add_ready`, without an object for each message unless a bucket is already open."""
        priority = columns.priority
        begun = self._open_ready.get(priority)
        if begun is not None and begun.count < READY_BUCKET_MAX:
            self._add_ready(priority, columns.messages(), now_ms)
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

    def _add_timed(self, item: AvailableMessage) -> Place:
        """Adds a message at its `visible_at_ms`, which must be after `seen_until`.

        So must be the end of its retention; if that is earlier, the message is dropped then.
        """
        lane = self._lane(item.priority, BucketKind.TIMED)
        return Place(item.priority, BucketKind.TIMED, self._open_timed.add(lane, item).order)

    def _lane(self, priority: int, kind: BucketKind) -> Lane:
        lane = self.by_name.get((priority, kind))
        if lane is None:
            lane = self.by_name[priority, kind] = Lane(priority, kind, self.epoch)
            self.has_timed = self.has_timed or kind is BucketKind.TIMED
        return lane

    # --- One message, or all ------------------------------------------------

    def find(self, place: Place, message_id: int) -> AvailableMessage | None:
        """The message, if it waits in this bucket. May raise Needs."""
        found = self._find_in(place, message_id)
        return found[1].items[found[2]] if found else None

    def cancel(self, place: Place, message_id: int) -> AvailableMessage | None:
        """Removes the message for ever, if it waits in this bucket. May raise Needs."""
        item = self._take(place, message_id)
        if item is not None:
            self._forget(message_id)
        return item

    def _take(self, place: Place, message_id: int) -> AvailableMessage | None:
        found = self._find_in(place, message_id)
        if found is None:
            return None
        lane, bucket, index = found
        item = bucket.items[index]
        lane.remove(bucket, (index,))
        self._touch()
        return item

    def reschedule(
        self, place: Place, message_id: int, visible_at_ms: int, now_ms: int
    ) -> Place | None:
        """Moves a message that waits in this bucket to another time; returns where it is then.

        None: it is not in this bucket, or past its retention. May raise Needs.
        """
        item = self._take(place, message_id)
        if item is None:
            return None
        place_now = self.admit(item._replace(visible_at_ms=visible_at_ms), now_ms)
        self.entered_count -= place_now is not None  # It was here before.
        return place_now

    def _find_in(self, place: Place, message_id: int) -> tuple[Lane, Bucket, int] | None:
        found = self.find_bucket(place)
        index = found[1].index_of(message_id) if found else None
        return (*found, index) if found and index is not None else None

    def find_bucket(self, place: Place) -> tuple[Lane, Bucket] | None:
        """The bucket at this place, with its lane. May raise Needs."""
        lane = self.by_name.get((place.priority, place.kind))
        if lane is None or split_order(order_in_time(place.kind, place.order)).epoch != self.epoch:
            return None
        bucket = lane.find(place.order)
        if bucket is None:
            if not lane.has_none(place.order):
                raise Needs([NeedsBucket(self, lane, place.order)], ())
            return None
        return lane, bucket

    def find_buckets(self, places: Iterable[Place]) -> dict[Place, tuple[Lane, Bucket] | None]:
        """Like `find_bucket` for several; raises one Needs for all that must be read."""
        found = {}
        slots: list[NeedsRows] = []
        for place in places:
            try:
                found[place] = self.find_bucket(place)
            except Needs as need:
                slots += need.slots
        if slots:
            raise Needs(slots, ())
        return found

    def purge(self, epoch: int) -> int:
        """Drops everything in O(lanes), and begins a new epoch; returns how many messages.

        The rows of the former epoch are left to the sweeper.
        """
        count = sum(lane.count for lane in self.by_name.values())
        self.garbage_epochs = (*self.garbage_epochs, self.epoch)
        self.epoch = epoch
        self.delayed = DelayedJournal()
        self.delayed.begin(epoch)
        self.by_name = {}
        self._open_ready = {}
        self._open_timed.close()
        self._touch()
        return count

    def note_swept(self, epoch: int) -> None:
        """Notes that the rows of former lanes are gone."""
        self.garbage_epochs = tuple(one for one in self.garbage_epochs if one != epoch)
        self._touch()

    # --- Messages fall due --------------------------------------------------

    def due_until(self, now_ms: int) -> int:
        """The last order in a timed lane whose time has come."""
        time = order_of(self.epoch, min(now_ms, TIMED_LAST_MS), 0)
        return last_lane_order(BucketKind.TIMED, time)

    def has_due(self, now_ms: int) -> bool:
        """Whether `drop_expired` has something to do."""
        until = self.due_until(now_ms)
        return any(_has_due(lane, until) for lane in self.timed_lanes())

    def drop_expired(self, now_ms: int, limit: int) -> int:
        """Counts what has fallen due, and drops of it what is past its retention.

        Looks at about `limit` messages and returns how many. May raise NeedsLane or Needs; it goes
        on where it was.
        """

        def is_over(item: AvailableMessage) -> bool:
            over = 0 < item.retention_deadline_ms <= now_ms
            if over and item.attempts:
                self._forget(item.message_id)  # It is removed at once.
            return over

        until = self.due_until(now_ms)
        self._walked_ms = max(self._walked_ms, now_ms)
        looked_at = 0
        for lane in [lane for lane in self.timed_lanes() if _has_due(lane, until)]:
            if lane.head is None and not lane.complete:
                raise NeedsLane(self, lane)
            count = lane.count
            looked_at += lane.look_at_due(until, is_over, limit - looked_at)
            self._note_expired(count - lane.count)
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
            self._note_expired(count - lane.count)

    def _note_expired(self, count: int) -> None:
        if count:
            self.expired_count += count
            self._touch()

    # --- Messages leave -----------------------------------------------------

    def walk(
        self, selector: Selector, expiry: ExpiryPolicy, now_ms: int, capacity: int
    ) -> list[Segment]:
        """Takes visible messages, at most `capacity`, in the order of delivery.

        May raise NeedsLane or Needs, but only if the selector has found nothing yet. Lower
        priorities wait for messages of a higher one, unless all of that are passed over.
        """
        taken: list[Segment] = []
        self._walked_ms = max(self._walked_ms, now_ms)
        for priority in sorted({priority for priority, _ in self.by_name}):
            lanes = [
                lane
                for kind in (BucketKind.READY, BucketKind.TIMED)
                if (lane := self.by_name.get((priority, kind))) and lane.count
            ]
            walk = Walk(lanes, self.epoch, now_ms, capacity)
            cold = None
            passed: list[Lane] = []
            for lane, bucket in walk:
                if bucket is None:
                    if taken or not _goes_beyond(selector, lane):
                        cold = lane
                        break
                    passed.append(lane)
                    walk.leave(lane)
                    continue
                segment = walk.take(lane, bucket, selector, expiry)
                if segment.items:
                    taken.append(segment)
            walk.finish()
            capacity = walk.capacity
            if walk.has_removed:
                self._touch()
                if walk.has_removed_timed:
                    # What comes now is behind these, even if they are reinserted.
                    self._open_ready.pop(priority, None)
            has_found = bool(taken) or selector.has_found
            if cold is not None and not has_found and (cold.head is None or cold.roomy):
                raise NeedsLane(self, cold)
            for lane in passed:
                if has_found or walk.stopped:
                    break
                beyond, walk.stopped = self._take_beyond(lane, selector, expiry, now_ms, capacity)
                taken += beyond
                has_found = bool(taken) or selector.has_found
            if walk.stopped or cold is not None or (passed and has_found):
                break
        return taken

    def _take_beyond(
        self, lane: Lane, selector: Selector, expiry: ExpiryPolicy, now_ms: int, capacity: int
    ) -> tuple[list[Segment], bool]:
        """Like a walk over one lane, behind its cached prefix; also returns whether to stop."""
        is_timed = lane.kind is BucketKind.TIMED
        last = min(lane.tail, self.due_until(now_ms)) if is_timed else lane.tail
        passing = selector.passing
        assert passing is not None, "see _goes_beyond"
        lane.look_again(passing.holds)
        taken: list[Segment] = []
        has_wanted = has_stopped = False
        for bucket in lane.beyond(last):
            chosen = choose_wanted(bucket, selector, passing, expiry, capacity)
            if chosen.taken:
                items = [bucket.items[index] for index in chosen.taken]
                places = [bucket.place(index) for index in chosen.taken]
                taken.append(Segment(items, lane.kind, bucket.order, places))
                capacity -= len(items)
            if gone := {*chosen.taken, *chosen.dropped}:
                lane.remove(bucket, gone)
                self._touch()
            has_wanted, has_stopped = has_wanted or chosen.has_wanted, chosen.has_stopped
            if has_stopped:
                break
        if not has_wanted and lane.examined_until < last:
            if not passing.reads_on():
                return taken, True
            raise Needs([NeedsBeyond(self, lane, last, passing)], ())
        return taken, has_stopped

    def remove_expired(self, lane: Lane, bucket: Bucket, indexes: set[int]) -> None:
        """Removes messages past their retention from a bucket that `find_bucket` returned."""
        for index in indexes:
            self.note_over(bucket.items[index])
        lane.remove(bucket, indexes)
        self._touch()

    def note_over(self, item: AvailableMessage) -> None:
        """Notes that a message leaves past its retention."""
        self.expired_count += 1
        if item.attempts:
            self._forget(item.message_id)

    # --- Records ------------------------------------------------------------

    def drain(self, now_ms: int, generation: int, rows: list[RowChange]) -> list[Beyond]:
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
        if self.has_timed and self.delayed.has_new:
            next_order = partial(self._orders.next_of, self.epoch, now_ms)
            rows.extend(self.delayed.drain(self.queue_id, next_order))
        return beyond

    def _put_rows(self, lane: Lane, rows: list[RowChange]) -> None:
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


def _goes_beyond(selector: Selector, lane: Lane) -> bool:
    """Whether to look behind the cached prefix of a lane, all of which was passed over."""
    if selector.passing is None or selector.has_found:
        return False
    return lane.head is not None and not lane.roomy


def leaves_at(item: AvailableMessage) -> int:
    """When a delayed message leaves its lane: to be claimed, or past its retention."""
    return min(item.visible_at_ms, item.retention_deadline_ms or item.visible_at_ms, TIMED_LAST_MS)


class OpenTimedBuckets:
    """The timed buckets of one queue that the next commit writes for the first time.

    Delayed messages go into buckets of their time that only one commit writes: what another one
    adds for the same time goes into buckets with higher numbers. So no bucket has to be read to add
    a message, however much waits in the database, and none has more than TIMED_BUCKET_MAX messages,
    however many are due together.
    """

    __slots__ = ("_by_time", "_number", "_orders")

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._by_time: dict[tuple[int, int], Bucket] = {}  # by priority and order
        self._number = 0  # the highest one used since the last commit

    def add(self, lane: Lane, item: AvailableMessage) -> Bucket:
        """Adds a message behind all others of its time; returns the bucket."""
        time = order_of(lane.epoch, leaves_at(item), 0)
        bucket = self._by_time.get((lane.priority, time))
        if bucket is None or lane.find(bucket.order) is not bucket:
            return self._begin(lane, time, 0, item)
        if bucket.count >= TIMED_BUCKET_MAX:
            return self._begin(lane, time, number_of(bucket.order), item)
        lane.extend(bucket, [item])
        return bucket

    def _begin(self, lane: Lane, time: int, after: int, item: AvailableMessage) -> Bucket:
        """Begins a bucket whose number is above `after` and was in no commit before."""
        if self._number <= after:
            self._number = number_of(self._orders.next(0))
        bucket = Bucket(lane_order(BucketKind.TIMED, time, self._number), [item])
        lane.add(bucket)
        self._by_time[lane.priority, time] = bucket
        return bucket

    def close(self) -> None:
        """Notes that a commit has them: later messages go into others."""
        if self._number:
            self._by_time.clear()
            self._number = 0


def _has_due(lane: Lane, until_order: int) -> bool:
    if not lane.count or lane.due_until >= until_order:
        return False
    return lane.earliest is not None and lane.earliest <= until_order
