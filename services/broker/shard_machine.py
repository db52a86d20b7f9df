"""The state of one broker shard: all its queues, cursors, leases. Pure, like the queue machine."""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from libs.storage.configs import encode_config
from libs.storage.keys import (
    CONFIG_REVISION_KEY,
    config_key,
    finished_leases_key,
    queue_state_key,
    routing_cursor_key,
)
from libs.storage.queues import (
    AvailableMessage,
    FailedAttempt,
)
from libs.storage.states import (
    FinishedLeasesRecord,
    LeaseOutcome,
    QueueStateRecord,
    encode_config_revision,
    encode_finished_leases,
    encode_queue_state,
    encode_routing_cursor,
)
from services.broker.attempts import Attempts
from services.broker.available import Beyond
from services.broker.commands import Assignment, Finish, Nack, Needs, Range
from services.broker.leases import GRACE_MS, Deadlines, FinishedLeases, Lease
from services.broker.queue_lifecycle import creation_rows, deleted_state, new_state
from services.broker.queue_machine import Chooser, NeedsSlot, Notes, Queue, Row
from services.broker.queue_settings import DEFAULT_PRIORITY, QueueSettings

__all__ = ["Assignment", "Finish", "Nack", "Needs", "Range", "Shard"]

EXPIRED_LEASE = "lease expired"
"""The outcome of an attempt whose lease ended by the clock."""


def random_tokens() -> Iterator[int]:
    """Lease tokens: random, 64 bits, never 0."""
    while True:
        yield from filter(None, struct.unpack("<64Q", os.urandom(512)))


@dataclass(slots=True)
class Written:
    """What one drain put into a commit and memory keeps until that is durable."""

    generation: int
    beyond: list[Beyond] = field(default_factory=list)
    attempts: set[tuple[str, int]] = field(default_factory=set)


class Shard:
    """All state of a broker shard, as far as it is in memory."""

    def __init__(
        self,
        *,
        revision: int = 0,
        cursors: Mapping[int, int] | None = None,
        finished: Sequence[FinishedLeasesRecord] = (),
        tokens: Iterator[int] | None = None,
    ) -> None:
        self.revision = revision
        self.cursors = dict(cursors or {})
        self.queues: dict[str, Queue] = {}
        self.notes = Notes()
        self.deleted: dict[str, QueueStateRecord] = {}
        self.finished = FinishedLeases(finished)
        self.deadlines = Deadlines()
        self._leases: dict[int, Lease] = {}
        self._tokens = tokens or random_tokens()
        self.attempts = Attempts()
        self._changed_cursors: set[int] = set()
        self._rows: list[Row] = []  # of commands that are rare enough to encode at once
        self._generation = 0
        self._undurable: deque[Written] = deque()
        self._lingering: list[Beyond] = []  # of lanes that were being read

    # --- Start --------------------------------------------------------------

    def restore_queue(self, queue: Queue) -> None:
        """Takes in a queue as it was stored."""
        self.queues[queue.queue_id] = queue

    def restore_lease(self, queue: Queue, order: int, lease: Lease, *, changed: bool) -> None:
        """Takes in a lease; `changed` when it is not as it was stored."""
        bucket = queue.restore_lease(lease, order, changed=changed)
        self._leases[lease.token] = lease
        self.deadlines.watch(bucket, lease.deadline_ms)

    # --- Queues -------------------------------------------------------------

    def create_queue(self, queue_id: str, settings: QueueSettings) -> Queue:
        """Makes a queue; it must not exist, and an epoch must be free (see `epoch_is_free`)."""
        self._next_revision()
        before = self.deleted.pop(queue_id, None)
        state = new_state(before, self.revision)
        settings = settings.changed(revision=self.revision)
        queue = Queue(queue_id, settings, state, self.notes)
        self.queues[queue_id] = queue
        self._rows += creation_rows(queue)
        queue.touch()
        return queue

    def epoch_is_free(self, queue_id: str) -> bool:
        """Whether a queue of this name may be created now: the cleaning of an old one may lag."""
        before = self.deleted.get(queue_id)
        return before is None or before.epoch not in before.garbage_epochs

    def update_queue(self, queue: Queue, settings: QueueSettings) -> None:
        """Gives a queue other settings."""
        self._next_revision()
        queue.settings = settings.changed(revision=self.revision)
        self._rows.append((config_key(queue.queue_id), encode_config(queue.settings.record())))

    def delete_queue(self, queue: Queue) -> None:
        """Removes a queue in O(leases): its rows are left to the sweeper."""
        self._next_revision()
        for token in queue.in_flight.clear():
            del self._leases[token]
        self.attempts.drop_queue(queue.queue_id)
        del self.queues[queue.queue_id]
        self.notes.to_commit.discard(queue)
        state = deleted_state(queue, self.revision)
        self.deleted[queue.queue_id] = state
        self._rows += (
            (config_key(queue.queue_id), None),
            (queue_state_key(queue.queue_id), encode_queue_state(state)),
        )

    def delete_rows(self, keys: Sequence[bytes]) -> None:
        """Deletes rows that nothing in memory knows of."""
        self._rows += ((key, None) for key in keys)

    def swept(self, queue_id: str, epoch: int) -> None:
        """Notes that the rows of a deleted incarnation are gone."""
        queue = self.queues.get(queue_id)
        if queue is not None:
            queue.garbage_epochs = tuple(e for e in queue.garbage_epochs if e != epoch)
            queue.touch()
            return
        state = self.deleted[queue_id]
        left = tuple(e for e in state.garbage_epochs if e != epoch)
        state = replace(state, garbage_epochs=left)
        self.deleted[queue_id] = state
        self._rows.append((queue_state_key(queue_id), encode_queue_state(state)))

    def _next_revision(self) -> None:
        self.revision += 1
        self._rows.append((CONFIG_REVISION_KEY, encode_config_revision(self.revision)))

    # --- Routing ------------------------------------------------------------

    def assign(self, ranges: Sequence[Range], now_ms: int) -> list[bool]:
        """Applies the ranges that begin where their log's cursor is; tells which. May raise Needs.

        The caller has compared the revision, and every queue named exists.
        """
        cursors: dict[int, int] = {}
        fits = []
        for piece in ranges:
            here = cursors.get(piece.log, self.cursors.get(piece.log, 0))
            fits.append(piece.previous == here and piece.last > piece.previous)
            if fits[-1]:
                cursors[piece.log] = piece.last
        pieces = [piece for piece, applied in zip(ranges, fits, strict=True) if applied]
        self._check_slots(pieces, now_ms)
        for piece in pieces:
            for assignment in piece.assignments:
                self._add(assignment, now_ms)
        self.cursors.update(cursors)
        self._changed_cursors.update(cursors)
        return fits

    def _check_slots(self, pieces: Sequence[Range], now_ms: int) -> None:
        needs: dict[tuple[str, int, int], NeedsSlot] = {}
        for piece in pieces:
            for assignment in piece.assignments:
                queue = self.queues[assignment.queue_id]
                seen_until_ms = queue.seen_until(now_ms)
                for index, ms in enumerate(assignment.visible_at_ms):
                    if ms > seen_until_ms:
                        priorities = assignment.priorities
                        priority = priorities[index] if priorities else DEFAULT_PRIORITY
                        need = queue.needs_slot(priority, ms)
                        if need:
                            needs[queue.queue_id, priority, ms] = need
        if needs:
            raise Needs(list(needs.values()), ())

    def _add(self, assignment: Assignment, now_ms: int) -> None:
        queue = self.queues[assignment.queue_id]
        count = len(assignment.message_ids)
        seen_until_ms = queue.seen_until(now_ms)
        ready: dict[int, list[AvailableMessage]] = {}
        rows = zip(
            assignment.message_ids,
            assignment.priorities or (DEFAULT_PRIORITY,) * count,
            assignment.retention_deadlines_ms or (0,) * count,
            assignment.visible_at_ms or (0,) * count,
            strict=True,
        )
        for message_id, priority, deadline_ms, visible_at_ms in rows:
            if 0 < deadline_ms <= now_ms:
                queue.expired_count += 1
                continue
            item = AvailableMessage(message_id, priority, visible_at_ms, deadline_ms, 0)
            if visible_at_ms > seen_until_ms:
                queue.add_timed(priority, item)
            else:
                ready.setdefault(priority, []).append(item)
        for priority, items in ready.items():
            queue.add_ready(priority, items, now_ms)

    # --- Leases -------------------------------------------------------------

    def claim(
        self, queue: Queue, choose: Chooser, lease_ms: int, consumer: str, now_ms: int
    ) -> list[Lease]:
        """Moves the messages chosen to in flight. May raise NeedsLane."""
        leases = queue.claim(choose, self._tokens, lease_ms, consumer, now_ms)
        watched = None
        for lease in leases:
            self._leases[lease.token] = lease
            if lease.bucket is not watched:
                watched = lease.bucket
                self.deadlines.watch(watched, lease.deadline_ms)
        return leases

    def ack(self, tokens: Sequence[int], now_ms: int) -> list[Finish]:
        """Finishes leases: their messages are done."""
        results = []
        by_queue: dict[Queue, list[Lease]] = {}
        for token in tokens:
            lease = self._leases.pop(token, None)
            if lease is None:
                results.append(self._finished(token, LeaseOutcome.ACKED))
                continue
            by_queue.setdefault(lease.queue, []).append(lease)
            self.finished.add(token, LeaseOutcome.ACKED)
            results.append(Finish.OK)
        for queue, leases in by_queue.items():
            queue.ack(leases, now_ms)
        return results

    def nack(self, items: Sequence[Nack], now_ms: int) -> list[Finish]:
        """Finishes leases: their messages are available again, or failed. May raise Needs."""
        held = [(item, self._leases.get(item.token)) for item in items]
        returns = [(lease, item.delay_ms, item.release) for item, lease in held if lease]
        self._check_returns(returns, now_ms)
        results = []
        for item in items:
            lease = self._leases.pop(item.token, None)
            if lease is None:
                results.append(self._finished(item.token, LeaseOutcome.NACKED))
                continue
            if item.release:
                lease.attempts -= 1
                lease.queue.give_back(lease, item.delay_ms, now_ms)
            else:
                self._return(lease, f"nack: {item.reason}", item.delay_ms, now_ms)
            self.finished.add(item.token, LeaseOutcome.NACKED)
            results.append(Finish.OK)
        return results

    def extend(self, tokens: Sequence[int], lease_ms: int, now_ms: int) -> list[tuple[Finish, int]]:
        """Moves the ends of running leases to now + `lease_ms` (0: the claim's own length)."""
        results = []
        for token in tokens:
            lease = self._leases.get(token)
            if lease is None:
                known = self.finished.outcome(token) is not None
                results.append((Finish.ENDED if known else Finish.UNKNOWN, 0))
                continue
            length = min(lease_ms or lease.length_ms, lease.queue.settings.max_lease_ms)
            lease.queue.extended(lease, now_ms + length)
            self.deadlines.watch(lease.bucket, lease.deadline_ms)
            results.append((Finish.OK, lease.deadline_ms))
        return results

    def resumed(self, since_ms: int, now_ms: int) -> None:
        """After a standstill, gives the leases alive at `since_ms` the grace of a restart."""
        for lease in list(self._leases.values()):
            deadline_ms = now_ms + min(lease.length_ms, GRACE_MS)
            if since_ms < lease.deadline_ms < deadline_ms:
                lease.queue.extended(lease, deadline_ms)
                self.deadlines.watch(lease.bucket, deadline_ms)

    def expire(self, now_ms: int, limit: int) -> list[Queue]:
        """Ends about `limit` leases whose time has come; gives their queues. May raise Needs.

        A lease ends here and nowhere else: as long as this is not called, an ack is taken.
        """
        due = self.deadlines.ended(now_ms, limit)
        self._check_returns([(lease, 0, False) for lease in due], now_ms)
        queues: dict[str, Queue] = {}
        for lease in due:
            del self._leases[lease.token]
            self.finished.add(lease.token, LeaseOutcome.ENDED)
            self._return(lease, EXPIRED_LEASE, 0, now_ms)
            queues[lease.queue.queue_id] = lease.queue
        return list(queues.values())

    def fail(self, leases: Sequence[Lease], reason: str, now_ms: int) -> None:
        """Moves claimed messages that cannot be delivered to failed, whatever attempts are left."""
        for lease in leases:
            del self._leases[lease.token]
            lease.attempts -= 1  # nobody saw the message
            lease.queue.fail(lease, reason, now_ms)

    def release(self, leases: Sequence[Lease]) -> None:
        """Undoes claims that nobody was told of; leases that have ended are passed over."""
        by_queue: dict[Queue, list[Lease]] = {}
        for lease in leases:
            if self._leases.pop(lease.token, None) is lease:
                by_queue.setdefault(lease.queue, []).append(lease)
        for queue, held in by_queue.items():
            queue.release(held)

    def _finished(self, token: int, wanted: LeaseOutcome) -> Finish:
        outcome = self.finished.outcome(token)
        if outcome is None:
            return Finish.UNKNOWN
        return Finish.OK if outcome == wanted else Finish.ENDED

    # --- Failed attempts ----------------------------------------------------

    def _check_returns(self, returns: Sequence[tuple[Lease, int, bool]], now_ms: int) -> None:
        slots: dict[tuple[str, int, int], NeedsSlot] = {}
        attempts = []
        for lease, delay_ms, release in returns:
            queue = lease.queue
            key = (queue.queue_id, lease.message_id)
            if lease.attempts > 1 and not release and key not in self.attempts:
                attempts.append(key)
            later = delay_ms > 0 and now_ms + delay_ms > queue.seen_until(now_ms)
            if later and (release or lease.attempts < queue.settings.max_attempts):
                need = queue.needs_slot(lease.priority, now_ms + delay_ms)
                if need:
                    slots[queue.queue_id, lease.priority, delay_ms] = need
        if slots or attempts:
            raise Needs(list(slots.values()), attempts)

    def _return(self, lease: Lease, outcome: str, delay_ms: int, now_ms: int) -> None:
        queue = lease.queue
        key = (queue.queue_id, lease.message_id)
        failed = FailedAttempt(lease.consumer, lease.claimed_at_ms, outcome)
        if lease.attempts >= queue.settings.max_attempts:
            queue.fail(lease, outcome, now_ms)
        elif not queue.give_back(lease, delay_ms, now_ms):
            return
        self.attempts.add(key, failed)

    # --- Commits ------------------------------------------------------------

    @property
    def has_changes(self) -> bool:
        """Whether a drain now would give any rows: whatever else changes, one of these does."""
        return bool(self.notes.to_commit or self._rows or self._changed_cursors)

    def drain(self, now_ms: int) -> list[Row]:
        """The rows of everything that changed since the last drain; empty when nothing did."""
        rows, self._rows = self._rows, []
        written = Written(self._generation + 1)
        for queue in self.notes.to_commit:
            queue_rows, beyond = queue.drain(now_ms, written.generation)
            rows += queue_rows
            written.beyond += beyond
        self.notes.to_commit.clear()
        for log in self._changed_cursors:
            rows.append((routing_cursor_key(log), encode_routing_cursor(self.cursors[log])))
        self._changed_cursors.clear()
        for attempts, row in self.attempts.drain():
            rows.append(row)
            written.attempts.add(attempts)
        for slot, record in self.finished.drain():
            rows.append((finished_leases_key(slot), encode_finished_leases(record)))
        if rows:
            self._generation = written.generation
            self._undurable.append(written)
        return rows

    def durable(self) -> None:
        """Notes that the oldest drain which was not durable yet now is; memory may let go of it."""
        written = self._undurable.popleft()
        beyond, self._lingering = self._lingering + written.beyond, []
        for lane, orders in beyond:
            stay = lane.let_go(orders, written.generation)
            if stay is not None:
                self._lingering.append((lane, stay))
        self.attempts.shrink(set().union(*(later.attempts for later in self._undurable)))
