"""The records of one queue: its lists, what waits in them, and how that changes one by one.

Pure, as all of the queue machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

from libs.storage.layout.buckets import BucketKind, number_of, order_in_time
from libs.storage.layout.keys import done_key, failed_key, queue_state_key
from libs.storage.layout.own_keys import archived_key
from libs.storage.layout.primitives import Row
from libs.storage.records.archived_records import ArchivedMessage, encode_archived
from libs.storage.records.delayed_records import DelayedMessage
from libs.storage.records.queues import (
    AvailableMessage,
    FailedMessage,
    encode_done,
    encode_failed,
)
from libs.storage.records.states import (
    ArchivedRecord,
    PurgesRecord,
    QueueStateRecord,
    encode_queue_state,
    encode_usual_state,
)
from services.broker.core.leases.lease_bucket import Lease
from services.broker.core.leases.leases import InFlight
from services.broker.core.lists.delayed_journal import DelayedJournal
from services.broker.core.lists.finished_lists import FinishedList
from services.broker.core.settings import QueueSettings
from services.broker.core.waiting.available import Available, Beyond
from services.broker.core.waiting.bucket import Columns, Place
from services.broker.core.waiting.counts import Counts
from services.broker.core.waiting.orders import Orders, free_epoch, in_epoch

NEVER: Final = 1 << 63
"""A revision that is not reached."""


class QueueEntries(ABC):
    """What a queue holds. Orders contain its epoch; times are ms by the broker's clock."""

    def __init__(
        self,
        queue_id: str,
        settings: QueueSettings,
        state: QueueStateRecord,
    ) -> None:
        self.queue_id = queue_id
        self.settings = settings
        self.epoch = state.epoch
        self.garbage_epochs = state.garbage_epochs
        self.created_revision = state.created_revision
        self.routing_revision = settings.revision
        # Live routing judges for it from here on; ranges of before are left to replays.
        self.live_revision = NEVER if settings.quarantine else state.created_revision
        self.expired_count = 0  # since the start, for metrics; so are the next two
        self.nacked_count = 0
        self.ended_leases_count = 0
        self.in_flight = InFlight(queue_id)
        purges = state.purges or PurgesRecord(state.epoch)
        self.garbage_lane_epochs = purges.garbage_lane_epochs
        # DoneMessages, as bare tuples: every ack makes one.
        self.done: FinishedList[tuple[Any, ...]] = FinishedList(
            partial(done_key, queue_id),
            encode_done,
            state.done_count,
            state.oldest_done_order,
            purges.garbage_done,
        )
        self.failed: FinishedList[FailedMessage] = FinishedList(
            partial(failed_key, queue_id),
            encode_failed,
            state.failed_count,
            state.oldest_failed_order,
            purges.garbage_failed,
        )
        archived = state.archived or ArchivedRecord()
        self.archived: FinishedList[ArchivedMessage] = FinishedList(
            partial(archived_key, queue_id),
            encode_archived,
            archived.messages_count,
            archived.oldest_order,
            archived.garbage,
        )
        self.delayed = DelayedJournal(in_epoch(purges.lane_epoch, state.last_order))
        self._state_key = queue_state_key(queue_id)
        # The numbers of the last state record, as long as nothing but ready messages has come.
        self._numbers: tuple[int, ...] | None = None
        self._orders = Orders(state.epoch, state.last_order)
        self._available = Available(queue_id, self._orders, purges.lane_epoch, state.lanes)

    # --- What others may see ------------------------------------------------

    @property
    def ready_count(self) -> int:
        """Available messages that wait for nothing but a claim."""
        return self._available.ready_count

    @property
    def timed_count(self) -> int:
        """Available messages with a time from which on they may be claimed, due ones included."""
        return self._available.timed_count

    @property
    def in_flight_count(self) -> int:
        """Messages in flight."""
        return self.in_flight.count

    @property
    def done_count(self) -> int:
        """Acked messages, in the done list."""
        return self.done.count

    @property
    def failed_count(self) -> int:
        """Dead letters."""
        return self.failed.count

    @property
    def archived_count(self) -> int:
        """Dead letters whose content was moved into the archive."""
        return self.archived.count

    def counts(self, now_ms: int) -> Counts:
        """How many messages wait, by priority; in O(lanes), as far as memory tells."""
        return self._available.counts(now_ms)

    @property
    def has_room(self) -> bool:
        """Whether another message may go in flight."""
        return self.room > 0

    @property
    def room(self) -> int:
        """How many messages more may go in flight."""
        return max(0, self.settings.max_in_flight - self.in_flight.count)

    def next_due_ms(self) -> int | None:
        """When the first timed message falls due, or a lower bound; None when there is none."""
        return self._available.next_due_ms()

    @property
    def available(self) -> Available:
        """What waits, for those who read it; commands are below."""
        return self._available

    @property
    def lane_epoch(self) -> int:
        """The epoch in the orders of available messages."""
        return self._available.epoch

    @property
    def last_order(self) -> int:
        """The highest order that a bucket got from the clock."""
        return self._orders.last

    @abstractmethod
    def touch(self) -> None:
        """Notes that the queue's state changed."""

    @abstractmethod
    def _came(self) -> None:
        """As `touch`, where nothing but ready messages has come."""

    # --- Messages come ------------------------------------------------------

    def add_ready(self, priority: int, items: Sequence[AvailableMessage], now_ms: int) -> None:
        """Makes messages of one priority available now, behind those that are."""
        self._available.add_ready(priority, items, now_ms)
        self._came()

    def add_new(self, columns: Columns, now_ms: int) -> None:
        """As `add_ready`, of messages that come into the queue and have no delay."""
        self._available.add_new(columns, now_ms)
        self._came()

    def add_timed(self, priority: int, item: AvailableMessage) -> None:
        """Makes a message available from its `visible_at_ms` on. See `seen_until`."""
        self._available.add_timed(priority, item)
        self.touch()

    def add_delayed(self, priority: int, item: AvailableMessage) -> None:
        """As `add_timed`, for a message that comes into the queue: who watches it is told."""
        self._journal_delayed(item, self._available.add_timed(priority, item))
        self.touch()

    def _journal_delayed(self, item: AvailableMessage, place: Place) -> None:
        delayed_message = DelayedMessage(
            item.message_id,
            place.priority,
            item.visible_at_ms,
            item.retention_deadline_ms,
            order_in_time(place.kind, place.order),
            number_of(place.order),
        )
        self.delayed.add(delayed_message)

    def seen_until(self, now_ms: int) -> int:
        """A message that is visible after this must wait for its time, not only for a claim."""
        return self._available.seen_until(now_ms)

    def enter(self, item: AvailableMessage, now_ms: int) -> Place | None:
        """Makes a message available from its `visible_at_ms` on, and says where it is.

        Drops one whose retention is over (None).
        """
        if self.is_over(item, now_ms):
            self.expired_count += 1
            return None
        self.touch()
        if item.visible_at_ms > self.seen_until(now_ms):
            return self._available.add_timed(item.priority, item)
        item = item._replace(visible_at_ms=0)
        order = self._available.add_ready(item.priority, [item], now_ms)
        return Place(item.priority, BucketKind.READY, order)

    def come(self, item: AvailableMessage, now_ms: int) -> Place | None:
        """As `enter`, and if the message is delayed, who watches the queue is told."""
        place = self.enter(item, now_ms)
        if place is not None and place.kind is BucketKind.TIMED:
            self._journal_delayed(item, place)
        return place

    def is_over(self, item: AvailableMessage, now_ms: int) -> bool:
        """Whether a message is past its retention, by the latest time that was looked at."""
        return 0 < item.retention_deadline_ms <= self.seen_until(now_ms)

    # --- Single messages, and all -------------------------------------------

    def find(self, place: Place, message_id: int) -> AvailableMessage | None:
        """A message that waits in this bucket, if it does. May raise Needs."""
        found = self._available.find(place)
        index = found[1].index_of(message_id) if found else None
        return found[1].items[index] if found and index is not None else None

    def cancel(self, place: Place, message_id: int) -> AvailableMessage | None:
        """Takes a message that waits in this bucket out, if it does. May raise Needs."""
        found = self._available.find(place)
        index = found[1].index_of(message_id) if found else None
        if found is None or index is None:
            return None
        lane, bucket = found
        item = bucket.items[index]
        lane.remove(bucket, (index,))
        self.touch()
        return item

    def reschedule(
        self, place: Place, message_id: int, visible_at_ms: int, now_ms: int
    ) -> Place | None:
        """Moves a message that waits in this bucket to another time; says where it is then.

        None: it is not there, or past its retention. May raise Needs.
        """
        item = self.find(place, message_id)
        if item is None:
            return None
        item = item._replace(visible_at_ms=visible_at_ms)
        self.cancel(place, message_id)
        return self.come(item, now_ms)

    def find_in_flight(self, message_id: int) -> Sequence[Lease]:
        """The leases on the entries of a message, however many others there are."""
        return self.in_flight.of_message(message_id)

    @property
    def can_purge_available(self) -> bool:
        """Whether an epoch is free for the lanes: the sweeping of earlier purges may lag."""
        return self._free_epoch() is not None

    def _free_epoch(self) -> int | None:
        taken = {self.epoch, self._available.epoch}
        taken.update(self.garbage_epochs, self.garbage_lane_epochs)
        return free_epoch(self._available.epoch, taken)

    def purge_available(self) -> int:
        """Drops all available and delayed messages in O(lanes), and gives how many they were.

        See `can_purge_available`. Their rows are left to the sweeper.
        """
        epoch = self._free_epoch()
        assert epoch is not None, "see can_purge_available"
        self.garbage_lane_epochs = (*self.garbage_lane_epochs, self._available.epoch)
        self.delayed = DelayedJournal()
        self.delayed.begin(epoch)
        self.touch()
        return self._available.purge(epoch)

    def purge_finished(self, finished: FinishedList[Any]) -> int:
        """Drops all messages of the done or the failed list, and gives how many they were."""
        self.touch()
        return finished.purge(self._orders.last)

    def take_failed(self, order: int, count: int, *, emptied: bool) -> None:
        """Notes that dead letters are taken out of a row of the failed list."""
        self.take_finished(self.failed, order, count, emptied=emptied)

    def take_finished(
        self, finished: FinishedList[Any], order: int, count: int, *, emptied: bool
    ) -> None:
        """Notes that messages are taken out of a row of the done, failed or archived list."""
        finished.take(order, count, emptied=emptied)
        self.touch()

    def lanes_swept(self, epoch: int) -> None:
        """Notes that the rows of former lanes are gone."""
        self.garbage_lane_epochs = tuple(e for e in self.garbage_lane_epochs if e != epoch)
        self.touch()

    def finished_swept(self, finished: FinishedList[Any], last_order: int) -> None:
        """Notes that the garbage of the done or the failed list is gone up to an order."""
        finished.swept(last_order)
        self.touch()

    # --- Time comes ---------------------------------------------------------

    def has_due(self, now_ms: int) -> bool:
        """Whether `drop_expired` has something to look at."""
        return self._available.has_due(now_ms)

    def drop_expired(self, now_ms: int, limit: int) -> int:
        """Looks at what fell due: counts it, and drops what is past its retention.

        Looks at about `limit` messages and gives how many. May raise NeedsLane or Needs; it goes
        on where it was.
        """

        def is_over(item: AvailableMessage) -> bool:
            return 0 < item.retention_deadline_ms <= now_ms

        try:
            return self._available.look_at_due(is_over, now_ms, limit)
        finally:
            if self._available.dropped_count:
                self.expired_count += self._available.dropped_count
                self._available.dropped_count = 0
                self.touch()

    # --- Records ------------------------------------------------------------

    def drain(self, now_ms: int, generation: int, rows: list[Row]) -> list[Beyond]:
        """Adds what changed since the last drain; what lanes may let go of when that is durable."""
        beyond = self._available.drain(generation, rows)
        # A commit may touch ten thousand queues, of which most got messages, and nothing else.
        if self._numbers is None:
            self._drain_lists(now_ms, rows)
        rows.append((self._state_key, self._state()))
        return beyond

    def _drain_lists(self, now_ms: int, rows: list[Row]) -> None:
        if self.in_flight.has_changes:
            rows.extend(self.in_flight.drain())
        if self.done.has_new:
            rows.extend(self.done.rows(lambda: self._orders.next(now_ms)))
        if self.failed.has_new:
            rows.extend(self.failed.rows(lambda: self._orders.next(now_ms)))
        if self.archived.has_new:
            rows.extend(self.archived.rows(lambda: self._orders.next(now_ms)))
        if self.delayed.has_new:
            next_order = partial(self._orders.next_of, self.lane_epoch, now_ms)
            rows.extend(self.delayed.drain(self.queue_id, next_order))

    def _state(self) -> bytes:
        if self._numbers is not None:
            lanes = self._available.records()
            if len(lanes) == 1:
                return encode_usual_state(self.epoch, self._orders.last, self._numbers, lanes[0])
        state = _state_of(self)
        self._numbers = _numbers_of(state)
        return encode_queue_state(state)

    def leases(self) -> Iterator[Lease]:
        """Every lease of the queue."""
        return self.in_flight.leases()


def _state_of(queue: QueueEntries) -> QueueStateRecord:
    """The record of the queue as it is now."""
    in_flight, done, failed = queue.in_flight, queue.done, queue.failed
    return QueueStateRecord(  # by place: a commit may make ten thousand, names cost a third
        queue.epoch,
        False,  # deleted
        queue.last_order,
        queue.garbage_epochs,
        queue.created_revision,
        in_flight.count,
        done.count,
        failed.count,
        in_flight.first_order,
        done.oldest_order,
        failed.oldest_order,
        queue.available.records(),
        _purges(queue),
        _archived(queue),
    )


def _numbers_of(state: QueueStateRecord) -> tuple[int, ...] | None:
    """For `encode_usual_state`, but for the lane: its numbers; None where it is not usual."""
    if state.garbage_epochs or state.purges or state.archived:
        return None
    return state[4:11]


def _purges(queue: QueueEntries) -> PurgesRecord | None:
    lane_epoch, lane_epochs = queue.lane_epoch, queue.garbage_lane_epochs
    done, failed = queue.done.garbage, queue.failed.garbage
    if lane_epoch == queue.epoch and not (lane_epochs or done.last or failed.last):
        return None
    return PurgesRecord(lane_epoch, lane_epochs, done, failed)


def _archived(queue: QueueEntries) -> ArchivedRecord | None:
    archived = queue.archived
    if not (archived.count or archived.garbage.last):
        return None
    return ArchivedRecord(archived.count, archived.oldest_order, archived.garbage)
