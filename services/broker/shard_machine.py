"""The state of one broker shard: all its queues, cursors, leases. Pure, like the queue machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from libs.storage.configs import encode_config
from libs.storage.keys import (
    config_key,
    queue_state_key,
)
from libs.storage.own_keys import (
    CONFIG_REVISION_KEY,
    finished_leases_key,
    routing_cursor_key,
)
from libs.storage.queues import (
    AvailableMessage,
)
from libs.storage.states import (
    FinishedLeasesRecord,
    QueueStateRecord,
    encode_config_revision,
    encode_finished_leases,
    encode_queue_state,
    encode_routing_cursor,
)
from services.broker.attempts import Key
from services.broker.available import Beyond
from services.broker.commands import Assignment, Finish, Nack, Needs, Purge, Range
from services.broker.delayed_journal import DelayedJournal
from services.broker.executed import Executed
from services.broker.outbox import Outbox
from services.broker.queue_lifecycle import creation_rows, deleted_state, new_state
from services.broker.queue_machine import NeedsSlot, Notes, Queue, Row
from services.broker.queue_settings import DEFAULT_PRIORITY, QueueSettings
from services.broker.redrives import Redrives
from services.broker.replays import Ranges, Replays
from services.broker.shard_leases import ShardLeases
from services.broker.waiting_buckets import Columns

__all__ = ["Assignment", "Finish", "Nack", "Needs", "Purge", "Range", "Shard"]


@dataclass(slots=True)
class Written:
    """What one drain put into a commit and memory keeps until that is durable."""

    generation: int
    beyond: list[Beyond] = field(default_factory=list)
    delayed: list[tuple[DelayedJournal, int]] = field(default_factory=list)
    attempts: set[Key] = field(default_factory=set)


class Shard(ShardLeases):
    """All state of a broker shard, as far as it is in memory."""

    def __init__(
        self,
        *,
        revision: int = 0,
        cursors: Mapping[int, int] | None = None,
        finished: Sequence[FinishedLeasesRecord] = (),
        blocks: Iterator[int] | None = None,
    ) -> None:
        super().__init__(finished, blocks)
        self.revision = revision
        self.cursors = dict(cursors or {})
        self.queues: dict[str, Queue] = {}
        self.notes = Notes()
        self.deleted: dict[str, QueueStateRecord] = {}
        self.outbox = Outbox()
        self.executed = Executed()
        self.replays = Replays()
        self.redrives = Redrives()
        self._changed_cursors: set[int] = set()
        self._rows: list[Row] = []  # of commands that are rare enough to encode at once
        self._generation = 0
        self._undurable: deque[Written] = deque()
        self._lingering: list[Beyond] = []  # of lanes that were being read

    # --- Start --------------------------------------------------------------

    def restore_queue(self, queue: Queue) -> None:
        """Takes in a queue as it was stored."""
        self.queues[queue.queue_id] = queue

    # --- Queues -------------------------------------------------------------

    def create_queue(self, queue_id: str, settings: QueueSettings, replay: Ranges = ()) -> Queue:
        """Makes a queue; it must not exist, and an epoch must be free (see `epoch_is_free`)."""
        self._next_revision()
        before = self.deleted.pop(queue_id, None)
        state = new_state(before, self.revision)
        settings = settings.changed(revision=self.revision)
        queue = Queue(queue_id, settings, state, self.notes)
        queue.delayed.begin(queue.lane_epoch)
        self.queues[queue_id] = queue
        self._rows += creation_rows(queue)
        self.replays.begin(queue_id, replay)
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
            self._running.remove(token)
        self.replays.drop(queue.queue_id)
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
        state = state._replace(garbage_epochs=left)
        self.deleted[queue_id] = state
        self._rows.append((queue_state_key(queue_id), encode_queue_state(state)))

    def _next_revision(self) -> None:
        self.revision += 1
        self._rows.append((CONFIG_REVISION_KEY, encode_config_revision(self.revision)))

    # --- What waits in a queue ----------------------------------------------

    def purge(self, queue: Queue, kinds: Collection[Purge]) -> int:
        """Empties lists of a queue in O(lanes and leases), and gives how many messages that were.

        For AVAILABLE an epoch must be free: see `Queue.can_purge_available`. Rows are left to the
        sweeper. Attempts records stay, as those of acked messages do.
        """
        count = 0
        if Purge.AVAILABLE in kinds:
            count += queue.purge_available()
        if Purge.IN_FLIGHT in kinds:
            count += self.purge_in_flight(queue)
        if Purge.DONE in kinds:
            count += queue.purge_finished(queue.done)
        if Purge.FAILED in kinds:
            count += queue.purge_finished(queue.failed)
        if Purge.ARCHIVED in kinds:
            count += queue.purge_finished(queue.archived)
        return count

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

    def backfill(self, queue: Queue, piece: Range, now_ms: int) -> bool:
        """Applies a piece of a queue's replay if it begins at the cursor; tells whether it did.

        The caller has compared the queue's revision and found the replay. May raise Needs.
        """
        replay = self.replays.range_of(queue.queue_id, piece.log)
        if replay is None or piece.previous != replay.cursor or piece.last > replay.end:
            return False
        self._check_slots([piece], now_ms)
        for assignment in piece.assignments:
            self._add(assignment, now_ms)
        self.replays.move(queue.queue_id, piece.log, piece.last)
        return True

    def _check_slots(self, pieces: Sequence[Range], now_ms: int) -> None:
        needs: dict[tuple[str, int, int], NeedsSlot] = {}
        for piece in pieces:
            for assignment in piece.assignments:
                if not assignment.visible_at_ms:
                    continue
                queue = self.queues[assignment.queue_id]
                seen_until_ms = queue.seen_until(now_ms)
                priorities = assignment.priorities
                deadlines_ms = assignment.retention_deadlines_ms
                for index, ms in enumerate(assignment.visible_at_ms):
                    if ms > seen_until_ms:
                        priority = priorities[index] if priorities else DEFAULT_PRIORITY
                        deadline_ms = deadlines_ms[index] if deadlines_ms else 0
                        need = queue.needs_slot(priority, ms, deadline_ms)
                        if need:
                            needs[queue.queue_id, priority, need.first_order] = need
        if needs:
            raise Needs(list(needs.values()), ())

    def _add(self, assignment: Assignment, now_ms: int) -> None:
        queue_id, ids, priorities, deadlines, visible = assignment
        queue = self.queues[queue_id]
        if not (priorities or visible) and (
            not deadlines or min(deadlines) > queue.seen_until(now_ms)
        ):
            queue.add_new(Columns(ids, DEFAULT_PRIORITY, deadlines), now_ms)
            return
        count = len(ids)
        seen_until_ms = queue.seen_until(now_ms)
        ready: dict[int, list[AvailableMessage]] = {}
        rows = zip(
            ids,
            priorities or (DEFAULT_PRIORITY,) * count,
            deadlines or (0,) * count,
            visible or (0,) * count,
            strict=True,
        )
        for message_id, priority, deadline_ms, visible_at_ms in rows:
            if 0 < deadline_ms <= seen_until_ms:
                queue.expired_count += 1
                continue
            item = AvailableMessage(message_id, priority, visible_at_ms, deadline_ms, 0)
            if visible_at_ms > seen_until_ms:
                queue.add_delayed(priority, item)
            else:
                ready.setdefault(priority, []).append(item)
        for priority, items in ready.items():
            queue.add_ready(priority, items, now_ms)

    # --- Records of others --------------------------------------------------

    def put(self, key: bytes, value: bytes) -> None:
        """Writes a record with the next commit: for what is rare enough to be encoded at once."""
        self._rows.append((key, value))

    def delete(self, key: bytes) -> None:
        """Deletes a record with the next commit."""
        self._rows.append((key, None))

    # --- Commits ------------------------------------------------------------

    @property
    def has_changes(self) -> bool:
        """Whether a drain now would give any rows: whatever else changes, one of these does."""
        others = (self.outbox, self.executed, self.replays, self.redrives)
        if any(one.has_changes for one in others):
            return True
        return bool(self.notes.to_commit or self._rows or self._changed_cursors)

    def drain(self, now_ms: int) -> list[Row]:
        """The rows of everything that changed since the last drain; empty when nothing did."""
        rows, self._rows = self._rows, []
        written = Written(self._generation + 1)
        for queue in self.notes.to_commit:
            written.beyond += queue.drain(now_ms, written.generation, rows)
            if queue.delayed.last_order > queue.delayed.durable_order:
                written.delayed.append((queue.delayed, queue.delayed.last_order))
        self.notes.to_commit.clear()
        for log in self._changed_cursors:
            rows.append((routing_cursor_key(log), encode_routing_cursor(self.cursors[log])))
        self._changed_cursors.clear()
        for attempts, row in self.attempts.drain():
            rows.append(row)
            written.attempts.add(attempts)
        for slot, record in self.finished.drain():
            rows.append((finished_leases_key(slot), encode_finished_leases(record)))
        rows += self.outbox.drain()
        rows += self.executed.drain(now_ms)
        rows += self.replays.drain()
        rows += self.redrives.drain()
        if rows:
            self._generation = written.generation
            self._undurable.append(written)
        return rows

    def durable(self) -> None:
        """Notes that the oldest drain which was not durable yet now is; memory may let go of it."""
        written = self._undurable.popleft()
        for journal, order in written.delayed:
            journal.durable_order = order
        beyond, self._lingering = self._lingering + written.beyond, []
        for lane, orders in beyond:
            stay = lane.let_go(orders, written.generation)
            if stay is not None:
                self._lingering.append((lane, stay))
        self.attempts.shrink(set().union(*(later.attempts for later in self._undurable)))
