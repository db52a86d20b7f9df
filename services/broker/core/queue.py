"""The state machine of one queue: no I/O, no clock, no asyncio.

      assign ──► available ──claim──► in flight ──ack──► done
                     ▲                    │
                     └── nack, lease end ─┴── no attempts left ──► failed

Every command takes the time as an argument, changes memory at once, and notes which records
changed; `drain` hands these to the commit. A command that must know more than memory holds raises
NeedsLane or Needs before it has changed anything: the caller reads, and runs it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from libs.storage.layout.buckets import BucketKind
from libs.storage.layout.primitives import Row
from libs.storage.records.queues import AvailableMessage, FailedMessage
from libs.storage.records.states import QueueStateRecord
from services.broker.core.leases.lease_bucket import Claimed, Lease, LeaseBucket, Terms, done
from services.broker.core.queue_entries import QueueEntries
from services.broker.core.settings import QueueSettings
from services.broker.core.waiting.scan import BulkSelector, Choice, NeedsLane, Segment, Selector

__all__ = ["Choice", "NeedsLane", "Notes", "Queue", "Row", "Selector"]

IdFilter = Callable[[Sequence[int]], Sequence[int]]
"""Those of some messages that are to be looked at, by their IDs."""

ATTEMPTS_USED_UP = "no attempts left"
"""The reason of a dead letter whose queue allows fewer attempts than it had already."""


@dataclass(slots=True)
class Notes:
    """What changed, for those who act on it."""

    to_commit: dict[Queue, None] = field(default_factory=dict)
    """Queues whose records the next commit must write, in the order in which they changed."""
    to_serve: set[Queue] = field(default_factory=set)
    """Queues that may have something for a waiting claim now."""


class Queue(QueueEntries):
    """One queue. Orders contain its epoch; times are ms by the broker's clock."""

    def __init__(
        self,
        queue_id: str,
        settings: QueueSettings,
        state: QueueStateRecord,
        notes: Notes,
    ) -> None:
        super().__init__(queue_id, settings, state)
        self._notes = notes

    def touch(self) -> None:
        """Notes that the queue's state changed."""
        self._numbers = None
        self._came()

    def _came(self) -> None:
        self._notes.to_commit[self] = None
        self._notes.to_serve.add(self)

    # --- Messages are claimed -----------------------------------------------

    def peek(self, limit: int, wanted: IdFilter, now_ms: int) -> list[int]:
        """IDs of the wanted messages that come next, at most `limit`. May raise NeedsLane."""
        ids: list[int] = []

        def choose(item: AvailableMessage) -> Choice:
            if len(ids) >= limit:
                return Choice.STOP
            ids.extend(wanted((item.message_id,)))
            return Choice.SKIP

        self._walk(choose, now_ms, ids, _Peek(limit, wanted, ids))
        return ids

    def claim(
        self,
        choose: Selector,
        next_block: Callable[[], int],
        lease_ms: int,
        consumer: str,
        now_ms: int,
        many: BulkSelector | None = None,
    ) -> Claimed:
        """Moves the messages chosen to in flight. May raise NeedsLane.

        `many` chooses no more than may go in flight; `choose` may. `next_block` gives blocks of
        tokens that nobody has.
        """
        room = self.room

        def bounded(item: AvailableMessage) -> Choice:
            nonlocal room
            choice = choose(item) if room > 0 else Choice.STOP
            if choice is Choice.TAKE:
                room -= 1
            return choice

        segments = self._walk(bounded, now_ms, (), many)
        terms = Terms(self, consumer, now_ms, now_ms + lease_ms, lease_ms)
        claimed = Claimed(terms, segments)
        self.in_flight.put(claimed, lambda: self._orders.next(now_ms), next_block)
        return claimed

    def _walk(
        self, choose: Selector, now_ms: int, found: Sequence[object], many: BulkSelector | None
    ) -> list[Segment]:
        try:
            return self._available.walk(choose, _Expiry(self, now_ms), now_ms, found, many)
        finally:
            if self._available.changed:
                self._available.changed = False
                self.touch()

    def exhaust(self, item: AvailableMessage, now_ms: int) -> None:
        """Moves a message that has no attempts left to failed, when a walk comes upon it."""
        failed = FailedMessage(
            item.message_id,
            now_ms,
            item.attempts,
            item.priority,
            item.retention_deadline_ms,
            ATTEMPTS_USED_UP,
        )
        self.failed.add((failed,))

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
        self.lengthened(lease.bucket)

    def lengthened(self, bucket: LeaseBucket) -> None:
        """Notes that the ends of leases in a bucket have moved."""
        self.in_flight.changed(bucket)
        self.touch()

    def ack(self, leases: Sequence[Lease], now_ms: int, transferred_to: str = "") -> None:
        """Moves messages to done; `transferred_to` names the queue that has them now."""
        self._take_out(leases)
        self.done.add([done(lease, now_ms, transferred_to) for lease in leases])

    def ack_in(self, bucket: LeaseBucket, tokens: Sequence[int], now_ms: int) -> None:
        """Moves messages to done, whose leases lie in one bucket."""
        self.done.add(bucket.take_done(tokens, now_ms))
        self.in_flight.taken_out(bucket, len(tokens))
        self.touch()

    def give_back(self, lease: Lease, visible_at_ms: int, now_ms: int) -> bool:
        """Makes the message available again, or drops it when its retention is over (False)."""
        self._take_out((lease,))
        return self.enter(_returned(lease, visible_at_ms), now_ms) is not None

    def fail(self, lease: Lease, reason: str, now_ms: int) -> None:
        """Moves a message to failed."""
        self._take_out((lease,))
        failed = FailedMessage(
            lease.message_id,
            now_ms,
            lease.attempts,
            lease.priority,
            lease.retention_deadline_ms,
            reason,
        )
        self.failed.add((failed,))

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

    def purge_in_flight(self) -> list[Lease]:
        """Drops all messages in flight, and gives their leases."""
        leases = list(self.leases())
        self._take_out(leases)
        return leases

    def _take_out(self, leases: Iterable[Lease]) -> None:
        self.in_flight.take_out(leases)
        self.touch()


class _Expiry:
    """What is past its retention, or has no attempts left."""

    def __init__(self, queue: Queue, now_ms: int) -> None:
        self._queue = queue
        self._max_attempts = queue.settings.max_attempts
        self._now_ms = now_ms

    def drop(self, item: AvailableMessage) -> bool:
        """See walks.Over."""
        if 0 < item.retention_deadline_ms <= self._now_ms:
            self._queue.expired_count += 1
            return True
        if item.attempts >= self._max_attempts:
            self._queue.exhaust(item, self._now_ms)
            return True
        return False

    def any_may(self, attempts: int, deadline_ms: int) -> bool:
        """See walks.Over."""
        return attempts >= self._max_attempts or 0 < deadline_ms <= self._now_ms


class _Peek(BulkSelector):
    """A look at what comes next: see `Queue.peek`."""

    takes = False

    def __init__(self, limit: int, wanted: IdFilter, ids: list[int]) -> None:
        self._limit = limit
        self._wanted = wanted
        self._ids = ids

    def room(self) -> int:
        """See Many."""
        return self._limit - len(self._ids)

    def offer(self, items: Sequence[AvailableMessage]) -> bool:
        """See Many."""
        ids = list(map(_MESSAGE_ID, items))
        if len(self._wanted(ids)) < len(ids):
            return False
        self._ids += ids
        return True


_MESSAGE_ID = attrgetter("message_id")


def _returned(lease: Lease, visible_at_ms: int) -> AvailableMessage:
    """The message of a lease, when it waits again."""
    return AvailableMessage(
        lease.message_id,
        lease.priority,
        visible_at_ms,
        lease.retention_deadline_ms,
        lease.attempts,
    )
