"""The leases of a shard: what claims make, where each lies, when they end, and how they ended.

Pure, like the queue machine. The leases themselves are in their queues: see `leases`.
"""

from __future__ import annotations

import heapq
import secrets
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import groupby, islice, repeat
from typing import Final, NamedTuple

from libs.storage.records.queues import FailedAttempt
from libs.storage.records.states import FinishedLeasesRecord, LeaseOutcome
from services.broker.core.commands import Finish, Nack
from services.broker.core.leases import PLACE_BITS, Claimed, Lease, LeaseBucket, LeaseOwner
from services.broker.core.lists.attempts import Attempts, attempts_at
from services.broker.core.queue import Queue, Selector
from slatemq.errors import FailedPrecondition, NotFound

EXPIRED_LEASE = "lease expired"
"""The outcome of an attempt whose lease ended by the clock."""

FINISHED_SLOTS = 2048
"""Rows of the ring of finished leases; each takes FINISHED_SLOT_MIN before the next one."""

SLOT_LEASES_MAX = 60_000
"""Finished leases in one row at most: an array has room for a few more."""

FINISHED_SLOT_MIN = 64
"""At least 2,047 x 64 = 131,008 finished leases are remembered; the protos promise 100,000."""

FINISHED_MAX = 300_000
"""Finished leases remembered at most (about 30 MB in memory, 3 MB stored): full commits make fuller
slots. The rows of those forgotten for it are deleted, since a start reads all that there are."""

FORGOTTEN_AT_ONCE = 30_000
"""Approximate: of a larger commit, the leases that finished last are still remembered."""

GRACE_MS = 30_000
"""A lease alive at the last commit gets this long (or its length) after a restart: no consumer
could extend or ack while the broker was down."""

STEP_LEASES: Final = 4000
"""Leases of one step of a grace at most, plus those of one bucket: some 5 ms."""

BUCKET_LEASES: Final = 16
"""What a bucket with fewer leases counts for in a grace: it is a record of its own."""


class LeaseGroup(NamedTuple):
    """Leases of one bucket that end together; no bucket: they do not run."""

    bucket: LeaseBucket | None
    tokens: Sequence[int]
    whole: bool
    """Whether they are all that the block ever had."""


class LeaseIndex:
    """Where each running lease lies, by its token.

    A large claim gets blocks of its own, so that a thousand leases take five entries here, and one
    comparison recognizes an ack of a whole block.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, LeaseBucket] = {}
        self._left: dict[int, int] = {}  # by block: how many of its leases run
        self._in_blocks = 0  # the sum of these
        self._singles: dict[int, LeaseBucket] = {}  # by token: those outside of blocks
        self._held = Counter[str]()  # by principal: how many leases of its claims run
        self._freed = set[str]()  # principals with leases that ended since they were last asked for

    def __len__(self) -> int:
        return len(self._singles) + self._in_blocks

    def held_by(self, principal: str) -> int:
        """How many leases run that a principal claimed; of an empty name, those of unknown ones."""
        return self._held[principal]

    def take_freed(self) -> Set[str]:
        """The principals of whose leases some have ended since this was last called."""
        freed, self._freed = self._freed, set()
        return freed

    def add(self, bucket: LeaseBucket, tokens: Sequence[int]) -> None:
        """Adds leases of a bucket: all of them, if it is a block."""
        self._held[bucket.principal] += len(tokens)
        if bucket.is_block:
            block = tokens[0] >> PLACE_BITS
            self._blocks[block], self._left[block] = bucket, len(tokens)
            self._in_blocks += len(tokens)
        else:
            self._singles.update(dict.fromkeys(tokens, bucket))

    def is_free(self, block: int) -> bool:
        """Whether a block is unused, as it is in all but one of 10^11 cases."""
        return block not in self._blocks and block << PLACE_BITS not in self._singles

    def find(self, token: int) -> LeaseBucket | None:
        """Where the lease lies; None if it has ended, or never existed."""
        bucket = self._singles.get(token)
        if bucket is None:
            bucket = self._blocks.get(token >> PLACE_BITS)
            if bucket is not None and not bucket.holds(token):
                return None
        return bucket

    def holders(self, tokens: Sequence[int]) -> Iterable[LeaseBucket]:
        """The buckets of all blocks that tokens are of, and of tokens outside of blocks.

        Each once, in an order that follows from the tokens alone.
        """
        blocks = {token >> PLACE_BITS for token in tokens}
        found = {self._blocks[block]: None for block in blocks if block in self._blocks}
        if self._singles and len(found) < len(blocks):
            singles = map(self._singles.get, tokens)
            found.update((bucket, None) for bucket in singles if bucket is not None)
        return found

    def remove(self, token: int) -> None:
        bucket = self._singles.pop(token, None)
        if bucket is None:
            self._leave(token >> PLACE_BITS, 1)
        else:
            self._let_go(bucket, 1)

    def drop(self, bucket: LeaseBucket, tokens: Sequence[int]) -> None:
        """Ends all leases of a bucket that run: these."""
        if bucket.is_block:
            self._leave(tokens[0] >> PLACE_BITS, len(tokens))
        else:
            for token in tokens:
                del self._singles[token]
            self._let_go(bucket, len(tokens))

    def take(self, tokens: Sequence[int]) -> Iterator[LeaseGroup]:
        """Ends leases, in the order given; the caller removes them from their bucket at once."""
        at, count = 0, len(tokens)
        others: list[int] = []
        while at < count:
            block = tokens[at] >> PLACE_BITS
            bucket = self._blocks.get(block)
            if bucket is None:
                others.append(tokens[at])
                at += 1
                continue
            if others:
                # First, since they may be of this block too.
                yield from self._take_each(others)
                others = []
                continue
            taken = _of_block(bucket, tokens, at)
            at += len(taken.tokens)
            if taken.whole or bucket.holds_all(taken.tokens):
                self._leave(block, len(taken.tokens))
                yield taken
            else:
                others += taken.tokens
        yield from self._take_each(others)

    def _take_each(self, tokens: Sequence[int]) -> Iterator[LeaseGroup]:
        buckets: list[LeaseBucket | None] = list(map(self._singles.pop, tokens, repeat(None)))
        end = 0
        for bucket, same in groupby(buckets):
            first, end = end, end + len(list(same))
            if bucket is not None:
                self._let_go(bucket, end - first)
                yield LeaseGroup(bucket, tokens[first:end], whole=False)
            else:
                yield from map(self._take_of_block, tokens[first:end])

    def _take_of_block(self, token: int) -> LeaseGroup:
        bucket = self._blocks.get(token >> PLACE_BITS)
        if bucket is None or not bucket.holds(token):
            return LeaseGroup(None, (token,), whole=False)
        self._leave(token >> PLACE_BITS, 1)
        return LeaseGroup(bucket, (token,), whole=False)

    def _leave(self, block: int, count: int) -> None:
        self._let_go(self._blocks[block], count)
        self._left[block] -= count
        self._in_blocks -= count
        if not self._left[block]:
            del self._blocks[block], self._left[block]

    def _let_go(self, bucket: LeaseBucket, count: int) -> None:
        self._freed.add(bucket.principal)
        self._held[bucket.principal] -= count
        if not self._held[bucket.principal]:
            del self._held[bucket.principal]


def _of_block(bucket: LeaseBucket, tokens: Sequence[int], at: int) -> LeaseGroup:
    whole = bucket.whole
    if whole and tuple(tokens[at : at + len(whole)]) == whole:
        return LeaseGroup(bucket, whole, whole=True)
    block, end = tokens[at] >> PLACE_BITS, at + 1
    while end < len(tokens) and tokens[end] >> PLACE_BITS == block:
        end += 1
    return LeaseGroup(bucket, tokens[at:end], whole=False)


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
        self._first_row = newest_first[-1].sequence if newest_first else 0  # what may be stored
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

    def drain(self) -> list[tuple[int, FinishedLeasesRecord | None]]:
        """The slots to write with the next commit, or (None) to delete: (slot, record)."""
        if not self._changed:
            return []
        self._changed = False
        rows: list[tuple[int, FinishedLeasesRecord | None]] = []
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
        return rows + [(sequence % FINISHED_SLOTS, None) for sequence in self._forget_oldest()]

    def _forget_oldest(self) -> range:
        """Forgets what is too old, or too much; returns the rows of it that are not overwritten."""
        overwritten = self._sequence - FINISHED_SLOTS
        forgotten = -1
        while self._slots and (
            self._slots[0].sequence <= overwritten or self._count > FINISHED_MAX
        ):
            slot = self._slots.popleft()
            for token in slot.singles:
                self._outcomes.pop(token, None)
            self._count -= len(slot.singles)
            for block in slot.blocks:
                self._count -= len(self._blocks.pop(block, ((), None))[0])
            if not self._slots or self._slots[0].sequence > slot.sequence:  # all of its row
                forgotten = slot.sequence
        rows = range(max(self._first_row, overwritten + 1), forgotten + 1)
        self._first_row = max(self._first_row, forgotten + 1)
        return rows


class _Slot(NamedTuple):
    """What is forgotten together, when its slot of the ring is overwritten."""

    sequence: int
    singles: list[int]
    blocks: list[int]


def lease_unknown() -> NotFound:
    message = "no such lease: never given out, or its message is gone"
    return NotFound("lease", "", message, reason="LEASE_UNKNOWN")


def lease_ended() -> FailedPrecondition:
    return FailedPrecondition(
        "LEASE_ENDED",
        "the lease ran out or was finished otherwise; another consumer may have the message",
        subject="lease",
    )


def random_blocks() -> Iterator[int]:
    """Blocks of lease tokens: random, 56 bits, never 0."""
    while True:
        yield secrets.randbits(56) or 1


class _Return(NamedTuple):
    """A message that leaves its lease undone, as planned."""

    lease: Lease
    outcome: str
    """Of the attempt; empty: it is not counted."""
    visible_at_ms: int


class LeaseTable:
    def __init__(
        self,
        attempts: Attempts,
        finished: Sequence[FinishedLeasesRecord] = (),
        blocks: Iterator[int] | None = None,
    ) -> None:
        self.finished = FinishedLeases(finished)
        self.deadlines = Deadlines()
        self._attempts = attempts
        self._running = LeaseIndex()
        self._blocks = blocks or random_blocks()

    @property
    def in_flight_count(self) -> int:
        """Messages in flight, of all queues."""
        return len(self._running)

    def held_by(self, principal: str) -> int:
        """How many of them a principal has claimed since the start; of an empty name, the rest."""
        return self._running.held_by(principal)

    def take_freed(self) -> Set[str]:
        """The principals of whose leases some have ended since this was last called."""
        return self._running.take_freed()

    def restore(self, queue: Queue, order: int, lease: Lease) -> None:
        """Takes in a stored lease."""
        bucket = queue.leases.restore(lease, order)
        self._running.add(bucket, (lease.token,))
        self.deadlines.watch(bucket, lease.deadline_ms)

    def claim(
        self,
        queue: Queue,
        selector: Selector,
        lease_ms: int,
        consumer: str,
        now_ms: int,
        principal: str = "",
    ) -> Claimed:
        """Moves the messages selected to in flight. May raise NeedsLane."""
        lease_ms = min(lease_ms, queue.settings.max_lease_ms)  # it may be a long-lived stream's
        claimed = queue.claim(selector, self._free_block, lease_ms, consumer, now_ms, principal)
        for bucket, first, end in claimed.parts:
            self._running.add(bucket, claimed.tokens[first:end])
            self.deadlines.watch(bucket, claimed.terms.deadline_ms)
        return claimed

    def _free_block(self) -> int:
        return next(filter(self._running.is_free, self._blocks))

    def ack(self, tokens: Sequence[int], now_ms: int) -> list[Finish]:
        """Finishes leases: their messages are done."""
        results: list[Finish] = []
        for bucket, part, whole in self._running.take(tokens):
            if bucket is None:
                results += [self._finished(token, LeaseOutcome.ACKED) for token in part]
                continue
            self.finished.add(part, LeaseOutcome.ACKED, whole_block=whole)
            bucket.queue.ack_in(bucket, part, now_ms)
            results += [Finish.OK] * len(part)
        return results

    def nack(
        self, items: Sequence[Nack], now_ms: int, arrived_ms: int | None = None
    ) -> list[Finish]:
        """Finishes leases: their messages are available again, or failed. May raise Needs.

        Delays count from `arrived_ms`, when the command came; None: now.
        """
        since_ms = now_ms if arrived_ms is None else arrived_ms
        planned: dict[int, _Return] = {}
        for item in items:
            lease = None if item.token in planned else self.running(item.token)
            if lease is not None:
                planned[item.token] = _planned(lease, item, since_ms)
        self._require_attempts(planned.values())
        results = []
        for item in items:
            one = planned.pop(item.token, None)
            if one is None:
                results.append(self._finished(item.token, LeaseOutcome.NACKED))
                continue
            one.lease.queue.nacked_count += not item.release
            self._return(one, LeaseOutcome.NACKED, now_ms)
            results.append(Finish.OK)
        return results

    def extend(self, tokens: Sequence[int], lease_ms: int, now_ms: int) -> list[tuple[Finish, int]]:
        """Moves the ends of running leases to now + `lease_ms` (0: the claim's own length).

        Returns the ends that hold: none is moved beyond the queue's longest total lease.
        """
        results = []
        for token in tokens:
            lease = self.running(token)
            if lease is None:
                known = self.finished.outcome(token) is not None
                results.append((Finish.ENDED if known else Finish.UNKNOWN, 0))
                continue
            settings = lease.queue.settings
            length = min(lease_ms or lease.length_ms, settings.max_lease_ms)
            # A lower setting since, or a restart's grace, takes nothing from an end that holds.
            last_ms = max(lease.claimed_at_ms + settings.max_total_lease_ms, lease.deadline_ms)
            lease.queue.extend(lease, min(now_ms + length, last_ms))
            self.deadlines.watch(lease.bucket, lease.deadline_ms)
            results.append((Finish.OK, lease.deadline_ms))
        return results

    def expire(self, leases: Sequence[Lease], now_ms: int) -> list[LeaseOwner]:
        """Ends those of the leases that still run; returns their queues. May raise Needs.

        The clock ends a lease only here: as long as this is not called, an ack is accepted.
        """
        planned = [
            _Return(lease, EXPIRED_LEASE, _later(now_ms, _backoff_ms(lease)))
            for lease in leases
            if lease.deadline_ms <= now_ms and self._running.find(lease.token) is lease.bucket
        ]
        self._require_attempts(planned)
        for one in planned:
            one.lease.queue.ended_leases_count += 1
            self._return(one, LeaseOutcome.ENDED, now_ms)
        return list({one.lease.queue.queue_id: one.lease.queue for one in planned}.values())

    def fail(self, leases: Sequence[Lease], reason: str, now_ms: int) -> None:
        """Moves claimed messages that cannot be delivered to failed, whatever attempts are left."""
        for lease in leases:
            self._running.remove(lease.token)
            lease.attempts -= 1  # no consumer has seen the message
            lease.queue.fail(lease, reason, now_ms)

    def release(self, tokens: Iterable[int]) -> None:
        """Undoes claims that no consumer has seen; ignores leases that have ended."""
        by_queue: dict[LeaseOwner, list[Lease]] = {}
        for token in dict.fromkeys(tokens):
            lease = self.running(token)
            if lease is not None:
                self._running.remove(token)
                by_queue.setdefault(lease.queue, []).append(lease)
        for queue, held in by_queue.items():
            queue.release(held)

    def take_back(self, queue: Queue, limit: int, now_ms: int) -> None:
        """Ends leases of a queue, at most `limit`, whose consumers cannot finish them any more.

        Their attempts are not counted. Messages go back to their places where those are known.
        """
        placed: list[Lease] = []
        for lease in list(islice(queue.leases, limit)):
            self.end(lease, LeaseOutcome.ENDED)
            if lease.origin is not None:
                placed.append(lease)
            else:
                lease.attempts -= 1
                queue.requeue(lease, 0, now_ms)
        if placed:
            queue.release(placed)

    def running(self, token: int) -> Lease | None:
        """The lease of this token; None if it has ended, or never existed."""
        bucket = self._running.find(token)
        return bucket.leases[token] if bucket is not None else None

    def queue_ids(self, tokens: Sequence[int]) -> Iterable[str]:
        """The queues of all running leases among these, each once."""
        return dict.fromkeys(one.queue.queue_id for one in self._running.holders(tokens))

    def end(self, lease: Lease, outcome: LeaseOutcome) -> None:
        """Ends a lease; its message is up to the caller."""
        self._running.remove(lease.token)
        self.finished.add((lease.token,), outcome)

    def purge(self, queue: Queue) -> int:
        """Ends all leases of a queue and drops their messages; returns how many they were."""
        count = queue.leases.count
        # By bucket, without making their leases objects: 100,000 take some 20 to 40 ms.
        for bucket, tokens, is_whole in queue.leases.empty():
            self._running.drop(bucket, tokens)
            self.finished.add(tokens, LeaseOutcome.ENDED, whole_block=is_whole)
        return count

    def forget(self, queue: Queue) -> None:
        """Drops the leases of a queue that is deleted."""
        for bucket, tokens, _ in queue.leases.forget():
            self._running.drop(bucket, tokens)

    def _finished(self, token: int, wanted: LeaseOutcome) -> Finish:
        outcome = self.finished.outcome(token)
        if outcome is None:
            return Finish.UNKNOWN
        return Finish.OK if outcome == wanted else Finish.ENDED

    def _require_attempts(self, planned: Iterable[_Return]) -> None:
        # Of a first attempt too: another entry of the message may have failed here before.
        self._attempts.require(
            attempts_at(one.lease.queue, one.lease.message_id) for one in planned if one.outcome
        )

    def _return(self, planned: _Return, ended: LeaseOutcome, now_ms: int) -> None:
        lease, outcome, visible_at_ms = planned
        queue = lease.queue
        self.end(lease, ended)
        if not outcome:
            lease.attempts -= 1
            queue.requeue(lease, visible_at_ms, now_ms)
            return
        if lease.attempts >= queue.settings.max_attempts:
            queue.fail(lease, outcome, now_ms)
        elif not queue.requeue(lease, visible_at_ms, now_ms):
            return
        attempt = FailedAttempt(lease.consumer, lease.claimed_at_ms, outcome)
        self._attempts.add(attempts_at(queue, lease.message_id), attempt)


def _planned(lease: Lease, item: Nack, since_ms: int) -> _Return:
    delay_ms = item.delay_ms
    if item.release:
        return _Return(lease, "", _later(since_ms, delay_ms or 0))
    if delay_ms is None:
        delay_ms = _backoff_ms(lease)
    outcome = f"nack: {item.reason}" if item.reason else "nack"
    return _Return(lease, outcome, _later(since_ms, delay_ms))


def _later(since_ms: int, delay_ms: int) -> int:
    """When a message is visible again; 0: at once."""
    return since_ms + delay_ms if delay_ms else 0


def _backoff_ms(lease: Lease) -> int:
    return lease.queue.settings.backoff_ms(lease.attempts, lease.token)


class LeaseGrace:
    """More time, given in steps, for the leases that were alive when time was lost.

    Meanwhile no consumer could ack or extend. Between two steps commands may run and commits begin:
    a lease that ends is skipped, one claimed meanwhile has its full time anyway, and a crash leaves
    the rest to the grace of the restart. Only the end of leases by the clock must wait for the last
    step: see `ShardOwner`.
    """

    def __init__(
        self, queues: Iterable[Queue], since_ms: int, now_ms: int, grace_ms: int = GRACE_MS
    ) -> None:
        """Give the leases of these queues that were alive at `since_ms` a grace from `now_ms` on.

        It is the lease's length, or `grace_ms` where that is shorter: by default as at a restart.
        """
        self.is_done = False
        self._grace_ms = grace_ms
        self._since_ms = since_ms
        self._now_ms = now_ms
        self._buckets = _buckets_of([queue for queue in queues if queue.leases.count])

    def step(self) -> list[Queue]:
        """Goes on a little; returns the queues with leases that have more time now."""
        looked_at, changed = 0, dict[Queue, None]()
        for queue, bucket in self._buckets:
            if bucket.count and bucket.lengthen(self._since_ms, self._now_ms, self._grace_ms):
                queue.leases.note_changed(bucket)
                changed[queue] = None
            looked_at += max(bucket.count, BUCKET_LEASES)
            if looked_at >= STEP_LEASES:
                return list(changed)
        self.is_done = True
        return list(changed)


def _buckets_of(queues: Iterable[Queue]) -> Iterator[tuple[Queue, LeaseBucket]]:
    for queue in queues:
        for bucket in list(queue.leases.buckets_from(0)):  # a deleted queue has none any more
            yield queue, bucket
