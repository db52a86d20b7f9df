"""The state machine of one queue: no I/O, no clock, no asyncio.

      assign ──► available ──claim──► in flight ──ack──► done
                     ▲                    │
                     └── nack, lease end ─┴── no attempts left ──► failed

Every command takes the time as an argument, changes memory at once, and notes which records
changed; `drain` hands these to the commit. A command that must know more than memory holds raises
NeedsLane or Needs before it has changed anything: the caller reads, and runs it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from libs.storage.buckets import BucketKind
from libs.storage.keys import done_key, failed_key, queue_state_key
from libs.storage.queues import (
    AvailableMessage,
    DoneMessage,
    FailedMessage,
    encode_done,
    encode_failed,
)
from libs.storage.states import QueueStateRecord, encode_queue_state
from services.broker.available import Available, Beyond, Orders
from services.broker.leases import InFlight, Lease, LeaseBucket, Row
from services.broker.queue_settings import QueueSettings
from services.broker.walks import Choice, Chooser, NeedsLane, NeedsSlot, Taken

__all__ = ["Choice", "Chooser", "NeedsLane", "NeedsSlot", "Notes", "Queue", "Row"]

LIST_ROW_MAX = 60_000
"""Done or failed messages in one row at most: an Array counts to 65,535."""

ATTEMPTS_USED_UP = "no attempts left"
"""The reason of a dead letter whose queue allows fewer attempts than it had already."""


@dataclass(slots=True)
class Notes:
    """What changed, for those who act on it."""

    to_commit: set[Queue] = field(default_factory=set)
    """Queues whose records the next commit must write."""
    to_serve: set[Queue] = field(default_factory=set)
    """Queues that may have something for a waiting claim now."""


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
        self.done_count = state.done_count
        self.failed_count = state.failed_count
        self.expired_count = 0  # since the start, for metrics
        self.in_flight = InFlight(queue_id)
        self._notes = notes
        self._oldest_done = state.oldest_done_order
        self._oldest_failed = state.oldest_failed_order
        self._orders = Orders(state.epoch, state.last_order)
        self._available = Available(queue_id, self._orders, state.lanes)
        self._done: list[DoneMessage] = []
        self._failed: list[FailedMessage] = []

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
    def has_room(self) -> bool:
        """Whether another message may go in flight."""
        return self.in_flight_count < self.settings.max_in_flight

    def next_due_ms(self) -> int | None:
        """When the first timed message falls due, or a lower bound; None when there is none."""
        return self._available.next_due_ms()

    @property
    def last_order(self) -> int:
        """The highest order that a bucket got from the clock."""
        return self._orders.last

    def touch(self) -> None:
        """Notes that the queue's state changed."""
        self._notes.to_commit.add(self)
        self._notes.to_serve.add(self)

    # --- Messages come ------------------------------------------------------

    def add_ready(self, priority: int, items: Sequence[AvailableMessage], now_ms: int) -> None:
        """Makes messages of one priority available now, behind those that are."""
        self._available.add_ready(priority, items, now_ms)
        self.touch()

    def add_timed(self, priority: int, item: AvailableMessage) -> None:
        """Makes a message available from its `visible_at_ms` on. See `needs_slot`, `seen_until`."""
        self._available.add_timed(priority, item)
        self.touch()

    def seen_until(self, now_ms: int) -> int:
        """A message that is visible after this must wait for its time, not only for a claim."""
        return self._available.seen_until(now_ms)

    def needs_slot(self, priority: int, visible_at_ms: int) -> NeedsSlot | None:
        """What must be read before `add_timed`, if anything."""
        return self._available.needs_slot(priority, visible_at_ms)

    # --- Messages are claimed -----------------------------------------------

    def peek(self, limit: int, wanted: Callable[[int], bool], now_ms: int) -> list[int]:
        """IDs of the wanted messages that come next, at most `limit`. May raise NeedsLane."""
        ids: list[int] = []

        def choose(item: AvailableMessage) -> Choice:
            if len(ids) >= limit:
                return Choice.STOP
            if wanted(item.message_id):
                ids.append(item.message_id)
            return Choice.SKIP

        self._walk(choose, now_ms, ids)
        return ids

    def claim(
        self,
        choose: Chooser,
        tokens: Iterator[int],
        lease_ms: int,
        consumer: str,
        now_ms: int,
    ) -> list[Lease]:
        """Moves the messages chosen to in flight. May raise NeedsLane."""
        room = self.settings.max_in_flight - self.in_flight.count

        def bounded(item: AvailableMessage) -> Choice:
            nonlocal room
            choice = choose(item) if room > 0 else Choice.STOP
            if choice is Choice.TAKE:
                room -= 1
            return choice

        taken = self._walk(bounded, now_ms, ())
        leases = [
            Lease(
                token,
                item.message_id,
                item.priority,
                now_ms,
                now_ms + lease_ms,
                item.attempts + 1,
                item.retention_deadline_ms,
                lease_ms,
                consumer,
                self,
                item.visible_at_ms,
                origin,
            )
            for (item, origin), token in zip(taken, tokens, strict=False)
        ]
        self.in_flight.put(leases, lambda: self._orders.next(now_ms))
        return leases

    def _walk(self, choose: Chooser, now_ms: int, found: Sequence[object]) -> list[Taken]:
        max_attempts = self.settings.max_attempts

        def is_over(item: AvailableMessage) -> bool:
            if 0 < item.retention_deadline_ms <= now_ms:
                self.expired_count += 1
                return True
            if item.attempts >= max_attempts:
                self._use_up(item, now_ms)
                return True
            return False

        try:
            return self._available.walk(choose, is_over, now_ms, found)
        finally:
            if self._available.changed:
                self._available.changed = False
                self.touch()

    def _use_up(self, item: AvailableMessage, now_ms: int) -> None:
        self._failed.append(
            FailedMessage(
                item.message_id,
                now_ms,
                item.attempts,
                item.priority,
                item.retention_deadline_ms,
                ATTEMPTS_USED_UP,
            )
        )
        self.failed_count += 1

    def restore_lease(self, lease: Lease, order: int, *, changed: bool) -> LeaseBucket:
        """Takes in a lease that was in flight before the start; orders must come ascending.

        `changed` when it differs from what is stored: the next commit writes it.
        """
        if changed:
            self.touch()
        return self.in_flight.restore(lease, order, changed=changed)

    # --- Leases end ---------------------------------------------------------

    def extended(self, lease: Lease, deadline_ms: int) -> None:
        """Moves the end of a lease."""
        lease.deadline_ms = deadline_ms
        self.in_flight.changed(lease.bucket)
        self.touch()

    def ack(self, leases: Sequence[Lease], now_ms: int, transferred_to: str = "") -> None:
        """Moves messages to done; `transferred_to` names the queue that has them now."""
        self._take_out(leases)
        self._done += [
            DoneMessage(
                lease.message_id,
                now_ms,
                lease.attempts,
                lease.consumer,
                lease.claimed_at_ms,
                lease.token,
                transferred_to,
            )
            for lease in leases
        ]
        self.done_count += len(leases)

    def give_back(self, lease: Lease, delay_ms: int, now_ms: int) -> bool:
        """Makes the message available again, or drops it when its retention is over (False)."""
        self._take_out((lease,))
        if 0 < lease.retention_deadline_ms <= now_ms:
            self.expired_count += 1
            return False
        later = delay_ms > 0 and now_ms + delay_ms > self.seen_until(now_ms)
        visible_at_ms = now_ms + delay_ms if later else 0
        item = AvailableMessage(
            lease.message_id,
            lease.priority,
            visible_at_ms,
            lease.retention_deadline_ms,
            lease.attempts,
        )
        if later:
            self.add_timed(lease.priority, item)
        else:
            self.add_ready(lease.priority, [item], now_ms)
        return True

    def fail(self, lease: Lease, reason: str, now_ms: int) -> None:
        """Moves a message to failed."""
        self._take_out((lease,))
        self._failed.append(
            FailedMessage(
                lease.message_id,
                now_ms,
                lease.attempts,
                lease.priority,
                lease.retention_deadline_ms,
                reason,
            )
        )
        self.failed_count += 1

    def release(self, leases: Iterable[Lease]) -> None:
        """Undoes claims that nobody was told of.

        Each message goes back to its place, and the attempt is not counted.
        """
        origins: dict[tuple[int, BucketKind, int], list[tuple[int, AvailableMessage]]] = {}
        leases = list(leases)
        self._take_out(leases)
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
            self._available.put_back(priority, kind, order, items)

    def _take_out(self, leases: Iterable[Lease]) -> None:
        self.in_flight.take_out(leases)
        self.touch()

    # --- Records ------------------------------------------------------------

    def drain(self, now_ms: int, generation: int) -> tuple[list[Row], list[Beyond]]:
        """What changed since the last drain, and what lanes may let go of when that is durable."""
        rows, beyond = self._available.drain(generation)
        rows.extend(self.in_flight.drain())
        rows.extend(self._list_rows(now_ms))
        rows.append((queue_state_key(self.queue_id), encode_queue_state(self.record())))
        return rows, beyond

    def _list_rows(self, now_ms: int) -> Iterator[Row]:
        if self._done:
            order = self._orders.next(now_ms)
            self._oldest_done = self._oldest_done or order
            for start in range(0, len(self._done), LIST_ROW_MAX):
                part = self._done[start : start + LIST_ROW_MAX]
                yield done_key(self.queue_id, order), encode_done(part)
                order = self._orders.next(now_ms)
            self._done = []
        if self._failed:
            order = self._orders.next(now_ms)
            self._oldest_failed = self._oldest_failed or order
            for start in range(0, len(self._failed), LIST_ROW_MAX):
                failed = self._failed[start : start + LIST_ROW_MAX]
                yield failed_key(self.queue_id, order), encode_failed(failed)
                order = self._orders.next(now_ms)
            self._failed = []

    def record(self) -> QueueStateRecord:
        """The queue's state record."""
        return QueueStateRecord(
            epoch=self.epoch,
            deleted=False,
            last_order=self._orders.last,
            garbage_epochs=self.garbage_epochs,
            created_revision=self.created_revision,
            in_flight_count=self.in_flight.count,
            done_count=self.done_count,
            failed_count=self.failed_count,
            first_in_flight_order=self.in_flight.first_order,
            oldest_done_order=self._oldest_done,
            oldest_failed_order=self._oldest_failed,
            lanes=self._available.records(),
        )

    def leases(self) -> Iterator[Lease]:
        """Every lease of the queue."""
        return self.in_flight.leases()
