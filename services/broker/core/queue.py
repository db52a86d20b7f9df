"""The state machine of one queue: no I/O, no clock, no asyncio.

      assign ──► waiting ──claim──► leases ──ack──► done
                    ▲                 │
                    └─ nack, lease end ┴── no attempts left ──► failed

A queue is made of parts: `waiting` (what can be claimed, or is delayed), `leases` (what is in
flight), and the lists `done`, `failed` and `archived`. Commands on one part are its methods; here
are those that move messages from one part to another.

Every command takes the time as an argument, changes memory at once, and notes which records
changed; `drain` hands these to the commit. A command that must know more than memory holds raises
NeedsLane or Needs before it has changed anything: the caller reads, and runs it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

from libs.storage.layout.buckets import BucketKind
from libs.storage.layout.keys import done_key, failed_key, queue_state_key
from libs.storage.layout.own_keys import archived_key
from libs.storage.layout.primitives import RowChange
from libs.storage.records.archived_records import ArchivedMessage, encode_archived
from libs.storage.records.queues import (
    AvailableMessage,
    FailedMessage,
    encode_done,
    encode_failed,
)
from libs.storage.records.states import (
    ArchivedRecord,
    OrderRange,
    PurgesRecord,
    QueueStateRecord,
    encode_queue_state,
)
from services.broker.core.leases import Claimed, InFlight, Lease, LeaseBucket, Terms, done
from services.broker.core.lists.finished_lists import FinishedList
from services.broker.core.settings import QueueSettings
from services.broker.core.waiting.available import Available, Beyond
from services.broker.core.waiting.orders import Orders, free_epoch
from services.broker.core.waiting.scan import (
    Choice,
    ExpiryPolicy,
    NeedsLane,
    Passing,
    Segment,
    Selector,
)

__all__ = ["Choice", "NeedsLane", "Notes", "Queue", "Selector"]

NEVER: Final = 1 << 63
"""A revision that is not reached."""

IdFilter = Callable[[Sequence[int]], Sequence[int]]
"""Selects, from the IDs of some messages, those to look at."""

ATTEMPTS_USED_UP = "no attempts left"
"""The reason of a dead letter whose queue now allows fewer attempts than it has had."""


@dataclass(slots=True)
class Notes:
    """What changed, for those who act on it."""

    to_commit: dict[Queue, None] = field(default_factory=dict)
    """Queues whose records the next commit must write, in the order in which they changed."""
    to_serve: dict[Queue, None] = field(default_factory=dict)
    """Queues that may have something for a waiting claim now, in the same order."""
    forget: Callable[[Queue, int], None] = lambda queue, message_id: None
    """Called with a message that leaves a queue for ever, for the history of its attempts."""


class Queue:
    """One queue. Orders contain its epoch; times are ms by the broker's clock."""

    def __init__(
        self,
        queue_id: str,
        settings: QueueSettings,
        state: QueueStateRecord,
        notes: Notes,
    ) -> None:
        self.queue_id = queue_id
        self.settings = settings
        self.epoch = state.epoch
        self.garbage_epochs = state.garbage_epochs
        self.created_revision = state.created_revision
        self.routing_revision = settings.revision
        # Live routing judges for it from this revision on; earlier ranges are left to replays.
        self.live_revision = NEVER if settings.quarantine else state.created_revision
        self.is_leaving = False
        """It is about to move to another shard: no claim, edit, redrive or purge begins."""
        self.nacked_count = 0  # since the start, for metrics; so is the next one
        self.ended_leases_count = 0
        self.claimed_count = 0  # messages since the start; so are the next three
        self.acked_count = 0
        self.requeued_count = 0
        self.dead_letters_count = 0
        self.orders = Orders(state.epoch, state.last_order)
        purges = state.purges or PurgesRecord(state.epoch)
        forget = partial(notes.forget, self)
        self.waiting = Available(queue_id, self.orders, purges, state.lanes, self.touch, forget)
        touch = self._touch_lists
        self.leases = InFlight(queue_id, self.orders, touch)
        # DoneMessages, as bare tuples: every ack makes one.
        self.done: FinishedList[tuple[Any, ...]] = FinishedList(
            partial(done_key, queue_id),
            encode_done,
            self.orders,
            touch,
            state.done_count,
            state.oldest_done_order,
            purges.garbage_done,
        )
        self.failed: FinishedList[FailedMessage] = FinishedList(
            partial(failed_key, queue_id),
            encode_failed,
            self.orders,
            touch,
            state.failed_count,
            state.oldest_failed_order,
            purges.garbage_failed,
        )
        archived = state.archived or ArchivedRecord()
        self.archived: FinishedList[ArchivedMessage] = FinishedList(
            partial(archived_key, queue_id),
            encode_archived,
            self.orders,
            touch,
            archived.messages_count,
            archived.oldest_order,
            archived.garbage,
        )
        self._lists: _ListState | None = None
        self._notes = notes
        self._state_key = queue_state_key(queue_id)

    def touch(self) -> None:
        """Notes that the queue's state changed."""
        self._notes.to_commit[self] = None
        self._notes.to_serve[self] = None

    def _touch_lists(self) -> None:
        self._lists = None
        self.touch()

    @property
    def capacity(self) -> int:
        """How many more messages may go in flight."""
        return max(0, self.settings.max_in_flight - self.leases.count)

    # --- Messages are claimed -----------------------------------------------

    def peek(
        self, limit: int, wanted: IdFilter, now_ms: int, passing: Passing | None = None
    ) -> list[int]:
        """IDs of the wanted messages that come next, at most `limit`.

        May raise NeedsLane, and with `passing` Needs.
        """
        selector = _Peek(limit, wanted, passing)
        self._walk(selector, now_ms, limit)
        return selector.ids

    def claim(
        self,
        selector: Selector,
        next_block: Callable[[], int],
        lease_ms: int,
        consumer: str,
        now_ms: int,
        principal: str = "",
    ) -> Claimed:
        """Moves the messages selected to in flight, as many as may be.

        May raise NeedsLane, and where the selector goes on behind many others, Needs.
        `next_block` returns blocks of tokens that are not in use.
        """
        segments = self._walk(selector, now_ms, self.capacity)
        terms = Terms(self, consumer, now_ms, now_ms + lease_ms, lease_ms, principal)
        claimed = Claimed(terms, segments)
        self.claimed_count += len(claimed.items)
        self.leases.put(claimed, next_block)
        return claimed

    def _walk(self, selector: Selector, now_ms: int, capacity: int) -> list[Segment]:
        fail = partial(self._add_failed, reason=ATTEMPTS_USED_UP, now_ms=now_ms)
        expiry = ExpiryPolicy(now_ms, self.settings.max_attempts, self.waiting.note_over, fail)
        return self.waiting.walk(selector, expiry, now_ms, capacity)

    # --- Leases end ---------------------------------------------------------

    def extend(self, lease: Lease, deadline_ms: int) -> None:
        lease.deadline_ms = deadline_ms
        self.leases.note_changed(lease.bucket)

    def ack(self, leases: Sequence[Lease], now_ms: int, transferred_to: str = "") -> None:
        """Moves messages to done; `transferred_to` names the queue that has them now."""
        self.acked_count += len(leases)
        self.leases.remove(leases)
        self.done.add([done(lease, now_ms, transferred_to) for lease in leases])

    def ack_in(self, bucket: LeaseBucket, tokens: Sequence[int], now_ms: int) -> None:
        """Moves messages to done, whose leases lie in one bucket."""
        self.acked_count += len(tokens)
        self.done.add(bucket.remove_done(tokens, now_ms))
        self.leases.note_removed(bucket, len(tokens))

    def requeue(self, lease: Lease, visible_at_ms: int, now_ms: int) -> bool:
        """Makes the message available again, or drops it when its retention is over (False)."""
        self.leases.remove((lease,))
        item = AvailableMessage(
            lease.message_id,
            lease.priority,
            visible_at_ms,
            lease.retention_deadline_ms,
            lease.attempts,
        )
        if self.waiting.enqueue(item, now_ms) is None:
            return False
        self.requeued_count += 1
        return True

    def fail(self, lease: Lease, reason: str, now_ms: int) -> None:
        """Moves a message to failed."""
        self.leases.remove((lease,))
        self._add_failed(lease, reason, now_ms)

    def _add_failed(self, one: Lease | AvailableMessage, reason: str, now_ms: int) -> None:
        self.dead_letters_count += 1
        deadline_ms = one.retention_deadline_ms
        failed = FailedMessage(
            one.message_id, now_ms, one.attempts, one.priority, deadline_ms, reason
        )
        self.failed.add((failed,))

    def release(self, leases: Sequence[Lease]) -> None:
        """Undoes claims that no consumer has seen.

        Each message goes back to its place, and the attempt is not counted.
        """
        origins: dict[tuple[int, BucketKind, int], list[tuple[int, AvailableMessage]]] = {}
        self.leases.remove(leases)
        for lease in leases:
            item = AvailableMessage(
                lease.message_id,
                lease.priority,
                lease.visible_at_ms,
                lease.retention_deadline_ms,
                lease.attempts - 1,
            )
            assert lease.origin is not None, "only claims of this process are released"
            kind, order, place = lease.origin
            origins.setdefault((lease.priority, kind, order), []).append((place, item))
        for (priority, kind, order), items in origins.items():
            self.waiting.reinsert(priority, kind, order, items)

    # --- Purges -------------------------------------------------------------

    @property
    def can_purge_available(self) -> bool:
        """Whether an epoch is free for the lanes: the sweeping of earlier purges may lag."""
        return self._free_epoch() is not None

    def _free_epoch(self) -> int | None:
        taken = {self.epoch, self.waiting.epoch}
        taken.update(self.garbage_epochs, self.waiting.garbage_epochs)
        return free_epoch(self.waiting.epoch, taken)

    def purge_available(self) -> int:
        """Drops all available and delayed messages in O(lanes); returns how many they were.

        See `can_purge_available`. Their rows are left to the sweeper.
        """
        epoch = self._free_epoch()
        assert epoch is not None, "see can_purge_available"
        return self.waiting.purge(epoch)

    # --- Records ------------------------------------------------------------

    def drain(self, now_ms: int, generation: int, rows: list[RowChange]) -> list[Beyond]:
        """Adds what changed since the last drain; what lanes may let go of when that is durable."""
        beyond = self.waiting.drain(now_ms, generation, rows)
        # A commit may have ten thousand queues, of which most got messages, and nothing else.
        if self._lists is None:
            rows.extend(self.leases.drain())
            for finished in (self.done, self.failed, self.archived):
                rows.extend(finished.drain(now_ms))
            self._lists = _list_state(self)
        rows.append((self._state_key, encode_queue_state(self._state(self._lists))))
        return beyond

    def _state(self, lists: _ListState) -> QueueStateRecord:
        waiting, purges = self.waiting, None
        lanes_moved = waiting.epoch != self.epoch or waiting.garbage_epochs
        if lanes_moved or lists.garbage_done.last or lists.garbage_failed.last:
            purges = PurgesRecord(
                waiting.epoch, waiting.garbage_epochs, lists.garbage_done, lists.garbage_failed
            )
        return QueueStateRecord(  # by place: a commit may make ten thousand, names cost a third
            self.epoch,
            False,  # deleted
            self.orders.last,
            self.garbage_epochs,
            self.created_revision,
            *lists.numbers,
            waiting.records(),
            purges,
            lists.archived,
        )


class _ListState(NamedTuple):
    """What the leases and the finished lists add to the state record, until they change."""

    numbers: tuple[int, int, int, int, int, int]
    garbage_done: OrderRange
    garbage_failed: OrderRange
    archived: ArchivedRecord | None


def _list_state(queue: Queue) -> _ListState:
    leases, done, failed, archived = queue.leases, queue.done, queue.failed, queue.archived
    numbers = (
        leases.count,
        done.count,
        failed.count,
        leases.first_order,
        done.oldest_order,
        failed.oldest_order,
    )
    stored = None
    if archived.count or archived.garbage.last:
        stored = ArchivedRecord(archived.count, archived.oldest_order, archived.garbage)
    return _ListState(numbers, done.garbage, failed.garbage, stored)


class _Peek(Selector):
    """Looks at what comes next, and takes nothing."""

    takes = False

    def __init__(self, limit: int, wanted: IdFilter, passing: Passing | None) -> None:
        self.passing = passing
        self.ids: list[int] = []
        self._limit = limit
        self._wanted = wanted

    @property
    def has_found(self) -> bool:
        return bool(self.ids)

    def capacity(self) -> int:
        return self._limit - len(self.ids)

    def offer(self, items: Sequence[AvailableMessage]) -> bool:
        ids = list(map(_MESSAGE_ID, items))
        if len(self._wanted(ids)) < len(ids):
            return False
        self.ids += ids
        return True

    def choose(self, item: AvailableMessage) -> Choice:
        if len(self.ids) >= self._limit:
            return Choice.STOP
        self.ids += self._wanted((item.message_id,))
        return Choice.SKIP


_MESSAGE_ID = attrgetter("message_id")
