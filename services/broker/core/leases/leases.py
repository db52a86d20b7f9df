"""Leases: the messages of a queue that are in flight, when leases end, and how they ended.

In-flight messages lie in buckets too, one or more for each commit that claimed; a bucket is written
again when some of its leases finish, and deleted with the last of them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from libs.storage.layout.buckets import BucketKind, bucket_number
from libs.storage.layout.keys import active_key
from libs.storage.layout.primitives import Row
from libs.storage.records.states import FinishedLeasesRecord, LeaseOutcome
from services.broker.core.leases.lease_bucket import Claimed, Lease, LeaseBucket, LeaseOwner
from services.broker.core.leases.token_index import PLACE_BITS, tokens_of
from services.broker.core.waiting.orders import Orders

IN_FLIGHT_BUCKET_MAX = 250
"""Leases in a bucket at most: finishing one writes the others again, about 60 bytes each. No more
than a block has tokens."""

PACKED_MIN = 50
"""Claims of this many messages get a bucket of their own, which keeps them as columns."""

FINISHED_SLOTS = 2048
"""Rows of the ring of finished leases; each takes FINISHED_SLOT_MIN before the next one."""

SLOT_LEASES_MAX = 60_000
"""Finished leases in one row at most: an array has room for a few more."""

FINISHED_SLOT_MIN = 64
"""At least 2,047 x 64 = 131,008 finished leases are remembered; the protos promise 100,000."""

FINISHED_MAX = 300_000
"""Finished leases in memory at most (about 30 MB): full commits make fuller slots."""

FORGOTTEN_AT_ONCE = 30_000
"""Approximate: of a larger commit, the leases that finished last are still remembered."""

GRACE_MS = 30_000
"""A lease alive at the last commit gets this long (or its length) after a restart: no consumer
could extend or ack while the broker was down."""


class InFlight:
    """The in-flight messages of one queue, in buckets by the order in which they were claimed."""

    def __init__(self, queue_id: str, orders: Orders, touch: Callable[[], None]) -> None:
        """`touch` is called whenever the queue's state record changes."""
        self.count = 0
        self._queue_id = queue_id
        self._orders = orders
        self._touch = touch
        self._buckets: dict[int, LeaseBucket] = {}
        self._open: LeaseBucket | None = None
        self._changed: dict[int, LeaseBucket] = {}

    @property
    def first_order(self) -> int:
        """The order of the first bucket; 0 when there is none."""
        return next(iter(self._buckets), 0)

    def __iter__(self) -> Iterator[Lease]:
        for bucket in self._buckets.values():
            yield from bucket.leases.values()

    def put(self, claimed: Claimed, next_block: Callable[[], int]) -> None:
        """Adds leases and gives them their tokens: those of one bucket have a block."""
        now_ms = claimed.terms.claimed_at_ms
        first, count = 0, len(claimed.items)
        while first < count:
            length = min(count - first, IN_FLIGHT_BUCKET_MAX)
            if count - first >= PACKED_MIN:
                tokens = tokens_of(next_block(), length)
                bucket = LeaseBucket.packed(self._orders.next(now_ms), claimed, first, tokens)
                claimed.tokens += bucket.whole
                self._buckets[bucket.order] = bucket
            else:
                bucket = self._open or LeaseBucket(claimed.terms.queue, self._orders.next(now_ms))
                self._buckets[bucket.order] = bucket
                length = min(length, IN_FLIGHT_BUCKET_MAX - bucket.count)
                claimed.tokens += tokens_of(next_block(), length)
                bucket.put(claimed.make(first, first + length))
                self._open = bucket if bucket.count < IN_FLIGHT_BUCKET_MAX else None
            self.note_changed(bucket)
            claimed.parts.append((bucket, first, first + length))
            first += length
        self.count += count

    def remove(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            del lease.bucket.leases[lease.token]
            self.note_removed(lease.bucket, 1)

    def note_removed(self, bucket: LeaseBucket, count: int) -> None:
        """Notes that leases have left a bucket."""
        self.count -= count
        self.note_changed(bucket)

    def note_changed(self, bucket: LeaseBucket) -> None:
        """Notes that the leases of a bucket differ from what is stored."""
        self._changed[bucket.order] = bucket
        self._touch()

    def restore(self, lease: Lease, order: int, *, changed: bool) -> LeaseBucket:
        """Takes in a stored lease; orders must come ascending.

        `changed` if it differs from what is stored: the next commit writes it.
        """
        bucket = self._buckets.get(order)
        if bucket is None:
            bucket = self._buckets[order] = LeaseBucket(lease.queue, order, stored=True)
        bucket.put((lease,))
        if changed:
            self.note_changed(bucket)
        self.count += 1
        return bucket

    def of_message(self, message_id: int) -> list[Lease]:
        """The leases on the entries of a message: scans all, some milliseconds for 100,000.

        An index would slow every claim, and only a handle that is out of date asks.
        """
        return [
            lease
            for bucket in self._buckets.values()
            if message_id in bucket.message_ids()
            for lease in bucket.leases.values()
            if lease.message_id == message_id
        ]

    def message_ids(self) -> set[int]:
        """The messages of all leases; some milliseconds for 100,000."""
        return {one for bucket in self._buckets.values() for one in bucket.message_ids()}

    def buckets_from(self, order: int) -> Iterator[LeaseBucket]:
        """The buckets from an order on, ascending."""
        for at in self._buckets:
            if at >= order:
                yield self._buckets[at]

    def clear(self) -> list[int]:
        """Drops all leases and returns their tokens; writes nothing."""
        tokens = [token for bucket in self._buckets.values() for token in bucket.tokens()]
        for bucket in self._buckets.values():
            bucket.clear()
        self.count, self._buckets, self._changed, self._open = 0, {}, {}, None
        return tokens

    def drain(self) -> Iterator[Row]:
        """The rows of the buckets that changed since the last drain."""
        for order, bucket in self._changed.items():
            key = active_key(self._queue_id, bucket_number(0, BucketKind.IN_FLIGHT, order))
            if bucket.count:
                yield key, bucket.value()
                bucket.stored = True
            else:
                del self._buckets[order]
                if bucket.stored:
                    yield key, None
        self._changed = {}
        self._open = None


class Deadlines:
    """Which buckets hold a lease that may have ended: about one entry for each bucket."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, LeaseBucket]] = []
        # By queue, the buckets with leases to end; a queue that had its turn goes to the end.
        self._due: dict[LeaseOwner, deque[LeaseBucket]] = {}
        self._count = 0  # breaks ties, since buckets do not compare
        self._compact_at = 1024

    def watch(self, bucket: LeaseBucket, deadline_ms: int) -> None:
        """Notes that the bucket must be looked at by `deadline_ms`."""
        if bucket.watched_ms is not None and bucket.watched_ms <= deadline_ms:
            return
        bucket.watched_ms = deadline_ms
        self._count += 1
        heapq.heappush(self._heap, (deadline_ms, self._count, bucket))
        if len(self._heap) > self._compact_at:
            # Buckets emptied long before their deadline would stay for hours otherwise.
            self._heap = [entry for entry in self._heap if _is_live(entry)]
            heapq.heapify(self._heap)
            self._compact_at = max(1024, 2 * len(self._heap))

    def next_ms(self) -> int | None:
        """When to look next, 0 if some leases wait to be ended; None if no lease runs."""
        while self._due:
            queue, buckets = next(iter(self._due.items()))
            while buckets and not buckets[0].count:
                buckets.popleft().watched_ms = None
            if buckets:
                return 0
            del self._due[queue]
        while self._heap and not _is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def ended(self, now_ms: int, limit: int) -> list[Lease]:
        """Up to `limit` leases whose deadline has come; queues take turns, with equal shares.

        The caller ends them now; those that it does not end are returned again.
        """
        while self._heap and self._heap[0][0] <= now_ms:
            entry = heapq.heappop(self._heap)
            bucket = entry[2]
            if _is_live(entry):
                bucket.watched_ms = 0  # it cannot be due any sooner: keep it out of the heap
                self._due.setdefault(bucket.queue, deque()).append(bucket)
        due: list[Lease] = []
        for turns_left, queue in zip(range(len(self._due), 0, -1), list(self._due), strict=True):
            share = -(-(limit - len(due)) // turns_left)
            if not share:
                break
            due += self._share_of(queue, now_ms, share)
        return due

    def _share_of(self, queue: LeaseOwner, now_ms: int, share: int) -> list[Lease]:
        """The first leases of a queue that ended; its next turn comes after all others'."""
        buckets = self._due.pop(queue)
        found: list[Lease] = []
        begun: list[LeaseBucket] = []
        while buckets and len(found) < share:
            bucket = buckets.popleft()
            ended = bucket.ended(now_ms)
            if ended:
                begun.append(bucket)
                found += ended[: share - len(found)]
                continue
            bucket.watched_ms = None
            if bucket.count:
                self.watch(bucket, bucket.earliest_ms())
        buckets.extendleft(reversed(begun))
        if buckets:
            self._due[queue] = buckets
        return found


def _is_live(entry: tuple[int, int, LeaseBucket]) -> bool:
    """Whether an entry still stands for a bucket."""
    deadline_ms, _, bucket = entry
    if bucket.watched_ms != deadline_ms:
        return False
    if not bucket.count:
        bucket.watched_ms = None  # it may still be open, and be filled again
        return False
    return True


class FinishedLeases:
    """How the last leases ended: a repeated ack must be distinguished from a forged one."""

    def __init__(self, stored: Iterable[FinishedLeasesRecord] = ()) -> None:
        self._outcomes: dict[int, LeaseOutcome] = {}
        self._blocks: dict[int, tuple[range, LeaseOutcome]] = {}  # that ended as a whole
        self._count = 0
        self._slots: deque[_Slot] = deque()
        self._open: list[int] = []
        self._open_outcomes: list[LeaseOutcome] = []  # cheaper than looking them up again
        self._open_slots = [_Slot(0, [], [])]
        self._open_slot_count = 0  # in the last one
        self._changed = False
        newest_first = sorted(stored, key=lambda record: record.sequence, reverse=True)
        self._sequence = newest_first[0].sequence + 1 if newest_first else 0
        for record in newest_first:
            if self._count + len(record.leases) > FINISHED_MAX:
                break
            self._slots.appendleft(_Slot(record.sequence, list(record.leases), []))
            self._outcomes.update(zip(record.leases, record.outcomes, strict=True))
            self._count += len(record.leases)

    def add(
        self, tokens: Sequence[int], outcome: LeaseOutcome, *, whole_block: bool = False
    ) -> None:
        if self._open_slot_count >= FORGOTTEN_AT_ONCE:
            self._open_slots.append(_Slot(0, [], []))
            self._open_slot_count = 0
        self._open_slot_count += len(tokens)
        slot = self._open_slots[-1]
        if whole_block:
            block = tokens[0] >> PLACE_BITS
            self._blocks[block] = range(tokens[0], tokens[-1] + 1), outcome
            slot.blocks.append(block)
        else:
            self._outcomes.update(dict.fromkeys(tokens, outcome))
            slot.singles.extend(tokens)
        self._open += tokens
        self._open_outcomes += [outcome] * len(tokens)
        self._count += len(tokens)
        self._changed = self._changed or bool(tokens)

    def outcome(self, token: int) -> LeaseOutcome | None:
        """How a lease ended; None if it runs, never existed, or was forgotten."""
        outcome = self._outcomes.get(token)
        if outcome is None and token >> PLACE_BITS in self._blocks:
            tokens, ended = self._blocks[token >> PLACE_BITS]
            return ended if token in tokens else None
        return outcome

    def drain(self) -> list[tuple[int, FinishedLeasesRecord]]:
        """The slots to write with the next commit: (slot, record)."""
        if not self._changed:
            return []
        self._changed = False
        rows = []
        # One slot holds at most what an Array can count; the last one stays open while it is small.
        while self._open:
            part = self._open[:SLOT_LEASES_MAX]
            outcomes = tuple(self._open_outcomes[: len(part)])
            record = FinishedLeasesRecord(self._sequence, tuple(part), outcomes)
            rows.append((self._sequence % FINISHED_SLOTS, record))
            if len(part) < FINISHED_SLOT_MIN:
                break
            self._sequence += 1
            del self._open[: len(part)], self._open_outcomes[: len(part)]
        if rows and not self._open:
            # None is forgotten before the last row with some of them is overwritten.
            written = self._sequence - 1
            self._slots.extend(slot._replace(sequence=written) for slot in self._open_slots)
            self._open_slots, self._open_slot_count = [_Slot(0, [], [])], 0
        self._forget_oldest()
        return rows

    def _forget_oldest(self) -> None:
        while self._slots and (
            self._slots[0].sequence <= self._sequence - FINISHED_SLOTS or self._count > FINISHED_MAX
        ):
            slot = self._slots.popleft()
            for token in slot.singles:
                self._outcomes.pop(token, None)
            self._count -= len(slot.singles)
            for block in slot.blocks:
                self._count -= len(self._blocks.pop(block, ((), None))[0])


class _Slot(NamedTuple):
    """What is forgotten together, when its slot of the ring is overwritten."""

    sequence: int
    singles: list[int]
    blocks: list[int]
