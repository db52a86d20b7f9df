"""The leases of a shard: what claims make, and how they end. Pure, like the queue machine."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence

from libs.storage.records.queues import FailedAttempt
from libs.storage.records.states import FinishedLeasesRecord, LeaseOutcome
from services.broker.core.commands import Finish, Nack, Needs
from services.broker.core.leases.lease_bucket import Claimed, Lease, LeaseOwner
from services.broker.core.leases.leases import Deadlines, FinishedLeases
from services.broker.core.leases.token_index import LeaseIndex
from services.broker.core.lists.attempts import Attempts, attempts_at
from services.broker.core.queue import Queue, Selector
from services.broker.core.waiting.scan import BulkSelector

EXPIRED_LEASE = "lease expired"
"""The outcome of an attempt whose lease ended by the clock."""


def random_blocks() -> Iterator[int]:
    """Blocks of lease tokens: random, 56 bits, never 0."""
    while True:
        yield secrets.randbits(56) or 1


class ShardLeases:
    """All leases of a broker shard, what became of those finished last, and failed attempts."""

    def __init__(
        self, finished: Sequence[FinishedLeasesRecord], blocks: Iterator[int] | None
    ) -> None:
        self.finished = FinishedLeases(finished)
        self.deadlines = Deadlines()
        self.attempts = Attempts()
        self._running = LeaseIndex()
        self._blocks = blocks or random_blocks()

    def restore_lease(self, queue: Queue, order: int, lease: Lease, *, changed: bool) -> None:
        """Takes in a lease; `changed` when it is not as it was stored."""
        bucket = queue.restore_lease(lease, order, changed=changed)
        self._running.add(bucket, (lease.token,))
        self.deadlines.watch(bucket, lease.deadline_ms)

    def claim(
        self,
        queue: Queue,
        choose: Selector,
        lease_ms: int,
        consumer: str,
        now_ms: int,
        many: BulkSelector | None = None,
    ) -> Claimed:
        """Moves the messages chosen to in flight. May raise NeedsLane. See `Queue.claim`."""
        lease_ms = min(lease_ms, queue.settings.max_lease_ms)  # it may be a long-lived stream's
        claimed = queue.claim(choose, self._free_block, lease_ms, consumer, now_ms, many)
        for bucket, first, end in claimed.parts:
            self._running.add(bucket, claimed.tokens[first:end])
            self.deadlines.watch(bucket, claimed.terms.deadline_ms)
        return claimed

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

    def _free_block(self) -> int:
        return next(filter(self._running.is_free, self._blocks))

    def nack(self, items: Sequence[Nack], now_ms: int, came_ms: int | None = None) -> list[Finish]:
        """Finishes leases: their messages are available again, or failed. May raise Needs.

        Delays count from `came_ms`, when the command came; None: now.
        """
        since_ms = now_ms if came_ms is None else came_ms
        held = [(item, self.running(item.token)) for item in items]
        returns = [
            (lease, _later(since_ms, _wait_ms(lease, item)), item.release)
            for item, lease in held
            if lease
        ]
        self._check_returns(returns)
        results = []
        for item in items:
            lease = self.running(item.token)
            if lease is None:
                results.append(self._finished(item.token, LeaseOutcome.NACKED))
                continue
            self._running.remove(item.token)
            visible_at_ms = _later(since_ms, _wait_ms(lease, item))
            if item.release:
                lease.attempts -= 1
                lease.queue.give_back(lease, visible_at_ms, now_ms)
            else:
                lease.queue.nacked_count += 1
                outcome = f"nack: {item.reason}" if item.reason else "nack"
                self._return(lease, outcome, visible_at_ms, now_ms)
            self.finished.add((item.token,), LeaseOutcome.NACKED)
            results.append(Finish.OK)
        return results

    def extend(self, tokens: Sequence[int], lease_ms: int, now_ms: int) -> list[tuple[Finish, int]]:
        """Moves the ends of running leases to now + `lease_ms` (0: the claim's own length).

        Gives the ends that hold: none is moved beyond the queue's longest total lease.
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
            lease.queue.extended(lease, min(now_ms + length, last_ms))
            self.deadlines.watch(lease.bucket, lease.deadline_ms)
            results.append((Finish.OK, lease.deadline_ms))
        return results

    def due(self, now_ms: int, limit: int) -> list[Lease]:
        """Up to `limit` leases to end now, fairly of all queues; see `expire`."""
        return self.deadlines.ended(now_ms, limit)

    def expire(self, leases: Sequence[Lease], now_ms: int) -> list[LeaseOwner]:
        """Ends those of the leases that still run; gives their queues. May raise Needs.

        A lease ends here and nowhere else: as long as this is not called, an ack is taken.
        """
        due = [one for one in leases if one.deadline_ms <= now_ms and self._runs(one)]
        returns = [(lease, _later(now_ms, _backoff_ms(lease)), False) for lease in due]
        self._check_returns(returns)
        queues: dict[str, LeaseOwner] = {}
        for lease, visible_at_ms, _ in returns:
            self._running.remove(lease.token)
            self.finished.add((lease.token,), LeaseOutcome.ENDED)
            lease.queue.ended_leases_count += 1
            self._return(lease, EXPIRED_LEASE, visible_at_ms, now_ms)
            queues[lease.queue.queue_id] = lease.queue
        return list(queues.values())

    def fail(self, leases: Sequence[Lease], reason: str, now_ms: int) -> None:
        """Moves claimed messages that cannot be delivered to failed, whatever attempts are left."""
        for lease in leases:
            self._running.remove(lease.token)
            lease.attempts -= 1  # nobody saw the message
            lease.queue.fail(lease, reason, now_ms)

    def release(self, tokens: Iterable[int]) -> None:
        """Undoes claims that nobody was told of; leases that have ended are passed over."""
        by_queue: dict[LeaseOwner, list[Lease]] = {}
        for token in dict.fromkeys(tokens):
            lease = self.running(token)
            if lease is not None:
                self._running.remove(token)
                by_queue.setdefault(lease.queue, []).append(lease)
        for queue, held in by_queue.items():
            queue.release(held)

    def running(self, token: int) -> Lease | None:
        """The lease of this token; None when it has ended, or never was."""
        bucket = self._running.find(token)
        return bucket.leases[token] if bucket is not None else None

    def _runs(self, lease: Lease) -> bool:
        return self._running.find(lease.token) is lease.bucket

    def end(self, lease: Lease, outcome: LeaseOutcome) -> None:
        """Ends a lease; what becomes of its message is up to the caller."""
        self._running.remove(lease.token)
        self.finished.add((lease.token,), outcome)

    def purge_in_flight(self, queue: Queue) -> int:
        """Ends all leases of a queue, and their messages are gone; gives how many they were."""
        leases = queue.purge_in_flight()
        for lease in leases:
            self._running.remove(lease.token)
            self.finished.add((lease.token,), LeaseOutcome.ENDED)
        return len(leases)

    def _finished(self, token: int, wanted: LeaseOutcome) -> Finish:
        outcome = self.finished.outcome(token)
        if outcome is None:
            return Finish.UNKNOWN
        return Finish.OK if outcome == wanted else Finish.ENDED

    # --- Failed attempts ----------------------------------------------------

    def _check_returns(self, returns: Sequence[tuple[Lease, int, bool]]) -> None:
        attempts = []
        for lease, _, release in returns:
            key = attempts_at(lease.queue, lease.message_id)
            # The first attempt, too: another entry of the message may have failed here before.
            if not release and key not in self.attempts:
                attempts.append(key)
        if attempts:
            raise Needs((), attempts)

    def _return(self, lease: Lease, outcome: str, visible_at_ms: int, now_ms: int) -> None:
        queue = lease.queue
        failed = FailedAttempt(lease.consumer, lease.claimed_at_ms, outcome)
        if lease.attempts >= queue.settings.max_attempts:
            queue.fail(lease, outcome, now_ms)
        elif not queue.give_back(lease, visible_at_ms, now_ms):
            return
        self.attempts.add(attempts_at(queue, lease.message_id), failed)


def _later(since_ms: int, delay_ms: int) -> int:
    """When a message is visible again; 0: at once."""
    return since_ms + delay_ms if delay_ms else 0


def _wait_ms(lease: Lease, item: Nack) -> int:
    if item.delay_ms is not None:
        return item.delay_ms
    return 0 if item.release else _backoff_ms(lease)


def _backoff_ms(lease: Lease) -> int:
    return lease.queue.settings.backoff_ms(lease.attempts, lease.token)
