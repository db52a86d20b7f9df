"""The leases of a shard: what claims make, and how they end. Pure, like the queue machine."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from libs.storage.records.queues import FailedAttempt
from libs.storage.records.states import FinishedLeasesRecord, LeaseOutcome
from services.broker.core.commands import Finish, Nack
from services.broker.core.leases.lease_bucket import Claimed, Lease, LeaseOwner
from services.broker.core.leases.leases import Deadlines, FinishedLeases
from services.broker.core.leases.token_index import LeaseIndex
from services.broker.core.lists.attempts import Attempts, attempts_at
from services.broker.core.queue import Queue, Selector

EXPIRED_LEASE = "lease expired"
"""The outcome of an attempt whose lease ended by the clock."""


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
    """All leases of a broker shard, and what became of those finished last."""

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

    def restore(self, queue: Queue, order: int, lease: Lease, *, changed: bool) -> None:
        """Takes in a lease; `changed` if it differs from what is stored."""
        bucket = queue.leases.restore(lease, order, changed=changed)
        self._running.add(bucket, (lease.token,))
        self.deadlines.watch(bucket, lease.deadline_ms)

    def claim(
        self, queue: Queue, selector: Selector, lease_ms: int, consumer: str, now_ms: int
    ) -> Claimed:
        """Moves the messages selected to in flight. May raise NeedsLane."""
        lease_ms = min(lease_ms, queue.settings.max_lease_ms)  # it may be a long-lived stream's
        claimed = queue.claim(selector, self._free_block, lease_ms, consumer, now_ms)
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

    def nack(self, items: Sequence[Nack], now_ms: int, came_ms: int | None = None) -> list[Finish]:
        """Finishes leases: their messages are available again, or failed. May raise Needs.

        Delays count from `came_ms`, when the command came; None: now.
        """
        since_ms = now_ms if came_ms is None else came_ms
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

        A lease ends here and nowhere else: as long as this is not called, an ack is accepted.
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

    def running(self, token: int) -> Lease | None:
        """The lease of this token; None if it has ended, or never existed."""
        bucket = self._running.find(token)
        return bucket.leases[token] if bucket is not None else None

    def end(self, lease: Lease, outcome: LeaseOutcome) -> None:
        """Ends a lease; its message is up to the caller."""
        self._running.remove(lease.token)
        self.finished.add((lease.token,), outcome)

    def purge(self, queue: Queue) -> int:
        """Ends all leases of a queue and drops their messages; returns how many they were."""
        leases = list(queue.leases)
        queue.leases.remove(leases)
        for lease in leases:
            self.end(lease, LeaseOutcome.ENDED)
        return len(leases)

    def forget(self, queue: Queue) -> None:
        """Drops the leases of a queue that is deleted."""
        for token in queue.leases.clear():
            self._running.remove(token)

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
