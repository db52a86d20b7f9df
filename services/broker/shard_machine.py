"""The state of one broker shard: all its queues, cursors, leases. Pure, like the queue machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

from libs.storage.configs import encode_config
from libs.storage.errors import Unstorable
from libs.storage.keys import config_key, queue_state_key
from libs.storage.own_keys import CONFIG_REVISION_KEY, finished_leases_key, routing_cursor_key
from libs.storage.queues import AvailableMessage
from libs.storage.states import (
    FinishedLeasesRecord,
    QueueStateRecord,
    encode_config_revision,
    encode_finished_leases,
    encode_queue_state,
    encode_routing_cursor,
)
from services.broker import lane_budget
from services.broker.attempts import Key
from services.broker.available import Beyond
from services.broker.commands import Assignment, Finish, Nack, Needs, Purge, Range
from services.broker.config_log import ConfigChange
from services.broker.delayed_journal import DelayedJournal
from services.broker.executed import Executed
from services.broker.outbox import Outbox
from services.broker.queue_entries import NEVER
from services.broker.queue_lifecycle import creation_rows, deleted_state, new_state, swept_surplus
from services.broker.queue_machine import Notes, Queue, Row
from services.broker.queue_settings import DEFAULT_PRIORITY, QueueSettings
from services.broker.redrives import Redrives
from services.broker.replays import Counts, Ranges, Replays
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
        self._config_changes: list[ConfigChange] = []
        # Those that began to be routed live since the start, with the revisions, which ascend.
        self._starting_in_the_past: dict[str, int] = {}
        self._changed_cursors: set[int] = set()
        self._rows: list[Row] = []  # of commands that are rare enough to encode at once
        self.lanes = lane_budget.LaneBudget(lane_budget.BYTES_MAX)
        self._generation = 0
        self._undurable: deque[Written] = deque()
        self._lingering: list[Beyond] = []  # of lanes that were being read

    # --- Start --------------------------------------------------------------

    def restore_queue(self, queue: Queue) -> None:
        """Takes in a queue as it was stored."""
        self.queues[queue.queue_id] = queue

    # --- Queues -------------------------------------------------------------

    def create_queue(
        self, queue_id: str, settings: QueueSettings, replay: Ranges | None = None
    ) -> Queue:
        """Makes a queue; it must not exist, and an epoch must be free (see `epoch_is_free`).

        `replay` is what it has to catch up on; None: it begins with its creation.
        """
        self._next_revision()
        before = self.deleted.pop(queue_id, None)
        state = new_state(before, self.revision)
        settings = settings.changed(revision=self.revision)
        queue = Queue(queue_id, settings, state, self.notes)
        queue.delayed.begin(queue.lane_epoch)
        self.queues[queue_id] = queue
        self._rows += creation_rows(queue)
        if replay is not None:
            self.replays.begin(queue_id, replay)
            self._starting_in_the_past[queue_id] = self.revision
        self._note_config(queue)
        queue.touch()
        return queue

    def epoch_is_free(self, queue_id: str) -> bool:
        """Whether a queue of this name may be created now: the cleaning of an old one may lag."""
        before = self.deleted.get(queue_id)
        return before is None or before.epoch not in before.garbage_epochs

    def update_queue(self, queue: Queue, settings: QueueSettings) -> None:
        """Gives a queue other settings."""
        self._next_revision()
        before, queue.settings = queue.settings, settings.changed(revision=self.revision)
        if queue.settings.routing != before.routing:
            queue.routing_revision = self.revision
        self._note_config(queue)
        self._rows.append((config_key(queue.queue_id), encode_config(queue.settings.record())))

    def quarantine(self, queue: Queue, reason: str, now_ms: int) -> None:
        """Leaves a queue out of live routing: what comes waits in the logs until that is lifted."""
        self.replays.open(queue.queue_id, self.cursors)
        self._starting_in_the_past.pop(queue.queue_id, None)
        self.update_queue(
            queue, queue.settings.changed(quarantine=reason, quarantined_at_ms=now_ms)
        )
        queue.live_revision = NEVER

    def lift_quarantine(self, queue: Queue, settings: QueueSettings) -> None:
        """Takes a queue into live routing again, with these settings; what waits is replayed."""
        self.replays.close(queue.queue_id, self.cursors)
        self.update_queue(queue, settings.changed(quarantine="", quarantined_at_ms=0))
        queue.live_revision = self.revision
        self._starting_in_the_past[queue.queue_id] = self.revision

    def delete_queue(self, queue: Queue) -> None:
        """Removes a queue in O(leases): its rows are left to the sweeper."""
        self._next_revision()
        for token in queue.in_flight.clear():
            self._running.remove(token)
        self.replays.drop(queue.queue_id)
        self._starting_in_the_past.pop(queue.queue_id, None)
        self.lanes.forget(queue.available.by_name.values())
        del self.queues[queue.queue_id]
        self.notes.to_commit.pop(queue, None)
        self.deleted[queue.queue_id] = state = deleted_state(queue, self.revision)
        gone = queue.queue_id, self.revision, None, self.revision
        self._config_changes.append(ConfigChange(*gone))
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
        self.deleted[queue_id] = state = state._replace(garbage_epochs=left)
        self._rows.append((queue_state_key(queue_id), encode_queue_state(state)))
        for forgotten in swept_surplus(self.deleted):
            del self.deleted[forgotten]
            self._rows.append((queue_state_key(forgotten), None))

    def _next_revision(self) -> None:
        self.revision += 1
        self._rows.append((CONFIG_REVISION_KEY, encode_config_revision(self.revision)))

    def _note_config(self, queue: Queue) -> None:
        self._config_changes.append(
            ConfigChange(queue.queue_id, self.revision, queue.settings, queue.routing_revision)
        )

    def take_config_changes(self) -> list[ConfigChange]:
        """What changed since this was last called: with each drain, these become durable."""
        taken, self._config_changes = self._config_changes, []
        return taken

    def stored_configs(self) -> list[ConfigChange]:
        """The newest change of each queue, right after the start: all of it is durable.

        A queue's part in routing counts as new: when that last changed is not stored. One with a
        replay under way comes last, as the end of its replay may have moved since it changed.
        """
        changes = [
            ConfigChange(
                queue.queue_id,
                self.revision if self.replays.is_under_way(queue.queue_id) else revision,
                queue.settings,
                queue.routing_revision,
            )
            for queue in self.queues.values()
            for revision in (queue.settings.revision,)
        ]
        for queue_id, state in self.deleted.items():
            revision = state.created_revision
            changes.append(ConfigChange(queue_id, revision, None, revision))
        return changes

    # --- What waits in a queue ----------------------------------------------

    def purge(self, queue: Queue, kinds: Collection[Purge]) -> int:
        """Empties lists of a queue in O(lanes and leases), and gives how many messages that were.

        For AVAILABLE an epoch must be free: see `Queue.can_purge_available`. Rows are left to the
        sweeper. Attempts records stay, as those of acked messages do.
        """
        count = 0
        if Purge.AVAILABLE in kinds:
            self.lanes.forget(queue.available.by_name.values())
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
        """Applies the ranges that begin where their log's cursor is; gives which.

        The caller has seen to it that each was judged by configs that are new enough. What queues
        became after a range's revision is not its matter: matches for one that is gone, or was
        created since, are dropped, and one that starts in the past leaves the range to its replay.
        """
        cursors: dict[int, int] = {}
        fits = []
        for piece in ranges:
            here = cursors.get(piece.log, self.cursors.get(piece.log, 0))
            fits.append(piece.previous == here and piece.last > piece.previous)
            if fits[-1]:
                cursors[piece.log] = piece.last
        pieces = [self._without_newer(piece) for piece in compress(ranges, fits)]
        for piece in pieces:
            for assignment in piece.assignments:
                self._add(assignment, now_ms)
            self._leave_to_replays(piece)
        if new := cursors.keys() - self.cursors.keys():
            self._leave_out_quarantined(new)
        self.cursors.update(cursors)
        self._changed_cursors.update(cursors)
        return fits

    def _leave_out_quarantined(self, new_logs: Iterable[int]) -> None:
        """All of logs that were not there when it began is left to replays, too."""
        for queue in self.queues.values():
            if queue.settings.quarantine:
                self.replays.open(queue.queue_id, dict.fromkeys(new_logs, 0))

    def _without_newer(self, piece: Range) -> Range:
        """The range without matches for queues that live routing did not judge for by then."""
        if piece.revision >= self.revision:
            return piece
        queues = self.queues
        known = [
            assignment
            for assignment in piece.assignments
            if (queue := queues.get(assignment.queue_id)) is not None
            and queue.live_revision <= piece.revision
        ]
        return replace(piece, assignments=known)

    def _leave_to_replays(self, piece: Range) -> None:
        for queue_id in list(self._started_after(piece.revision)):
            self.replays.extend(queue_id, piece.log, piece.previous, piece.last)
            self._next_revision()  # Routers learn of it like of a change.
            self._note_config(self.queues[queue_id])

    def _started_after(self, revision: int) -> Iterator[str]:
        for queue_id, created in reversed(self._starting_in_the_past.items()):
            if created <= revision:
                return
            yield queue_id

    def backfill(self, queue: Queue, piece: Range, counts: Counts, now_ms: int) -> bool:
        """Applies a piece of a queue's replay if it begins at the cursor; tells whether it did.

        The caller has compared the queue's revision and found the replay.
        """
        replay = self.replays.range_of(queue.queue_id, piece.log)
        if replay is None or piece.previous != replay.cursor or piece.last > replay.end:
            return False
        for assignment in piece.assignments:
            self._add(assignment, now_ms)
        self.replays.move(queue.queue_id, piece.log, piece.last, counts)
        return True

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
            self.lanes.note(queue.available.by_name.values())
            try:
                written.beyond += queue.drain(now_ms, written.generation, rows)
            except ValueError as error:
                raise Unstorable(f"a record of queue {queue.queue_id!r}: {error}") from error
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
        self.lanes.durable(written.generation)
        self.attempts.shrink(set().union(*(later.attempts for later in self._undurable)))
