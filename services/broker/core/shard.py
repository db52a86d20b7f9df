"""The state of one broker shard: all its queues, cursors, leases; and how ranges are applied to it.

Pure, like the queue machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from libs.storage.errors import encoding
from libs.storage.layout.keys import config_key, queue_state_key
from libs.storage.layout.own_keys import (
    CONFIG_REVISION_KEY,
    finished_leases_key,
    routing_cursor_key,
)
from libs.storage.layout.primitives import RowChange
from libs.storage.records.move_records import MoveRecord
from libs.storage.records.replay_records import OPEN_END, ReplayRange
from libs.storage.records.states import (
    FinishedLeasesRecord,
    QueueStateRecord,
    encode_config_revision,
    encode_finished_leases,
    encode_queue_state,
    encode_routing_cursor,
)
from services.broker.core.changes import ShardEvents
from services.broker.core.commands import Assignment, Finish, Nack, Needs, Purge, Range
from services.broker.core.config_log import ConfigChange
from services.broker.core.lease_table import LeaseTable
from services.broker.core.lifecycle import (
    config_row,
    creation_rows,
    deleted_state,
    forget_surplus,
    new_state,
)
from services.broker.core.lists.attempts import Attempts
from services.broker.core.lists.executed import Executed
from services.broker.core.lists.outbox import Outbox
from services.broker.core.lists.replays import Counts, Ranges, Replays
from services.broker.core.lists.storable import storable
from services.broker.core.moves import Moves, moving
from services.broker.core.owned_queues import OwnedQueues
from services.broker.core.queue import NEVER, Notes, Queue
from services.broker.core.redrives import Redrives
from services.broker.core.settings import QueueSettings
from services.broker.core.waiting import lane_budget
from services.broker.core.waiting.available import Beyond
from services.broker.core.waiting.delayed_journal import DelayedJournal
from services.broker.core.waiting.lane import READY_BUCKET_MAX
from services.broker.core.waiting.scan import AttemptsKey
from slatemq.errors import NotFound, SlateMQError, Unavailable

__all__ = ["Assignment", "Finish", "Nack", "Needs", "Purge", "Range", "Shard"]

STEP_MATCHES: Final = 4 * READY_BUCKET_MAX
"""Messages that one step adds to queues at most: some 6 ms if each has its own priority."""

BEING_MOVED: Final = "moved here; routing catches up"
"""The reason of the quarantine in which a queue begins that came from another shard."""

STEP_QUEUES: Final = 64
"""Queues that one step changes at most: some 6 ms, with their records."""


@dataclass(slots=True)
class DrainedChanges:
    """What one drain put into a commit, and memory keeps until that is durable."""

    generation: int
    beyond: list[Beyond] = field(default_factory=list)
    delayed: list[tuple[DelayedJournal, int]] = field(default_factory=list)
    attempts: set[AttemptsKey] = field(default_factory=set)


class RangeApplication:
    """What is left of a range of a log, or of a piece of a replay, to be added to queues.

    begin: refusals; replays, cursor ──► step ──► step ──► … ──► done ──► a commit may begin

    The cursor moves first, so commands between two steps see the range as routed: a queue created
    then begins behind it, and a quarantine leaves to a replay what comes behind it. What was begun
    must be finished, since no commit may have a part of it: see `ShardOwner.apply`.

    After each step but the last the records of its queues are encoded (`Shard.drain_early`): for
    ten thousand queues that takes as long as adding their messages did.
    """

    def __init__(self, queues: Mapping[str, Queue], assignments: Iterable[Assignment]) -> None:
        """Apply these to the queues that exist now, except those deleted meanwhile.

        `queues` are those of the shard, by ID; each step looks at them again.
        """
        self._queues = queues
        self._left = deque((queues[one.queue_id], one) for one in assignments)

    @property
    def is_done(self) -> bool:
        return not self._left

    def step(self, now_ms: int) -> list[Queue]:
        """Adds at most STEP_MATCHES messages to STEP_QUEUES queues; returns these queues."""
        left = self._left
        room, changed = STEP_MATCHES, dict[Queue, None]()
        while left and room and len(changed) < STEP_QUEUES:
            queue, assignment = left.popleft()
            if self._queues.get(queue.queue_id) is not queue:
                continue
            now, later = assignment.split(room)
            queue.waiting.assign(*now[1:], now_ms)
            changed[queue] = None
            room -= len(now.message_ids)
            if later is not None:
                left.appendleft((queue, later))
        return list(changed)


class Shard:
    def __init__(
        self,
        *,
        revision: int = 0,
        forgotten_revision: int = 0,
        cursors: Mapping[int, int] | None = None,
        finished: Sequence[FinishedLeasesRecord] = (),
        blocks: Iterator[int] | None = None,
    ) -> None:
        self.is_draining = False
        """It takes no new queues."""
        self.is_leaving = False
        """It is being removed: no command may leave anything behind."""
        self.attempts = Attempts()
        self.leases = LeaseTable(self.attempts, finished, blocks)
        self.revision = revision
        self.forgotten_revision = forgotten_revision
        """Some queues deleted up to this revision have no row any more."""
        self.cursors = dict(cursors or {})
        self.queues: dict[str, Queue] = {}
        self.owned = OwnedQueues()
        self.notes = Notes(forget=self._forget)
        self.deleted: dict[str, QueueStateRecord] = {}
        self.outbox = Outbox()
        self.executed = Executed()
        self.replays = Replays()
        self.redrives = Redrives()
        self.moves = Moves()
        self.events = ShardEvents()
        self._config_changes: list[ConfigChange] = []
        # Queues whose live routing began since the start, with the revisions, which ascend.
        self._starting_in_the_past: dict[str, int] = {}
        self._changed_cursors: set[int] = set()
        self._rows: list[RowChange] = []  # of commands that are rare enough to encode at once
        self.lanes = lane_budget.LaneBudget(lane_budget.BYTES_MAX)
        self._written = DrainedChanges(1)
        self._undurable: deque[DrainedChanges] = deque()
        self._lingering: list[Beyond] = []  # of lanes that were being read

    # --- Start --------------------------------------------------------------

    def restore_queue(self, queue: Queue) -> None:
        self.queues[queue.queue_id] = queue
        self.owned.add(queue.settings)

    # --- Queues -------------------------------------------------------------

    def create_queue(
        self, queue_id: str, settings: QueueSettings, replay: Ranges | None = None
    ) -> Queue:
        """Creates a queue; it must not exist, and an epoch must be free (see `epoch_is_free`).

        `replay` is what it has to catch up on; None: it begins with its creation.
        """
        revision = self.revision + 1
        state = new_state(self.deleted.get(queue_id), revision)
        queue = Queue(queue_id, settings.changed(revision=revision), state, self.notes)
        rows = creation_rows(queue)
        if replay is not None:
            self.replays.begin(queue_id, replay)
            self._starting_in_the_past[queue_id] = revision
        self._next_revision()
        self.deleted.pop(queue_id, None)
        queue.waiting.delayed.begin(queue.waiting.epoch)
        self.queues[queue_id] = queue
        self.owned.add(queue.settings)
        self._rows += rows
        self._note_config(queue)
        queue.touch()
        return queue

    def epoch_is_free(self, queue_id: str) -> bool:
        """Whether a queue of this name may be created: sweeping a deleted one may lag."""
        before = self.deleted.get(queue_id)
        return before is None or before.epoch not in before.garbage_epochs

    def update_queue(self, queue: Queue, settings: QueueSettings) -> None:
        self._take_settings(queue, *self._config_of(queue, settings))

    def _config_of(self, queue: Queue, settings: QueueSettings) -> tuple[QueueSettings, RowChange]:
        """The settings at the next revision, and their row; changes nothing."""
        settings = settings.changed(revision=self.revision + 1)
        return settings, config_row(queue.queue_id, settings)

    def _take_settings(self, queue: Queue, settings: QueueSettings, row: RowChange) -> None:
        self._next_revision()
        before, queue.settings = queue.settings, settings
        self.owned.remove(before)
        self.owned.add(settings)
        if queue.settings.routing != before.routing:
            queue.routing_revision = self.revision
        self._note_config(queue)
        self._rows.append(row)

    def quarantine(self, queue: Queue, reason: str, now_ms: int) -> None:
        """Leaves a queue out of live routing: its messages wait in the logs until it is lifted."""
        settings = queue.settings.changed(quarantine=reason, quarantined_at_ms=now_ms)
        config = self._config_of(queue, settings)
        self.replays.open(queue.queue_id, self.cursors)
        self._starting_in_the_past.pop(queue.queue_id, None)
        self._take_settings(queue, *config)
        queue.live_revision = NEVER

    def lift_quarantine(self, queue: Queue, settings: QueueSettings) -> None:
        """Routes a queue live again, with these settings; what waits in the logs is replayed.

        Raises Unavailable (QUEUE_MOVING) where its former shard was further than this one is.
        """
        if not self.replays.can_close(queue.queue_id, self.cursors):
            raise moving(queue.queue_id)
        config = self._config_of(queue, settings.changed(quarantine="", quarantined_at_ms=0))
        self.replays.close(queue.queue_id, self.cursors)
        self._take_settings(queue, *config)
        queue.live_revision = self.revision
        self._starting_in_the_past[queue.queue_id] = self.revision

    def delete_queue(self, queue: Queue) -> None:
        """Removes a queue in O(leases): its rows are left to the sweeper."""
        state = deleted_state(queue, self.revision + 1)
        value = storable(f"state of queue {queue.queue_id!r}", encode_queue_state, state)
        self.leases.forget(queue)
        self.replays.drop(queue.queue_id)
        self._withdraw(queue)
        self._put_deleted(queue.queue_id, state, value)

    def _withdraw(self, queue: Queue) -> None:
        """Takes a queue out of service, at the next revision."""
        self._next_revision()
        self._starting_in_the_past.pop(queue.queue_id, None)
        self.lanes.forget(queue.waiting.by_name.values())
        del self.queues[queue.queue_id]
        self.owned.remove(queue.settings)
        self.notes.to_commit.pop(queue, None)
        self._note_gone(queue.queue_id)

    def _note_gone(self, queue_id: str) -> None:
        self._config_changes.append(ConfigChange(queue_id, self.revision, None, self.revision))

    def _put_deleted(self, queue_id: str, state: QueueStateRecord, value: bytes) -> None:
        self.deleted[queue_id] = state
        self._rows += ((config_key(queue_id), None), (queue_state_key(queue_id), value))

    # --- Moves between shards -----------------------------------------------

    def depart(self, queue: Queue, record: MoveRecord, now_ms: int) -> None:
        """Takes a queue out of service that moves to another shard.

        No lease of it may run, no range be half applied, and no row wait for the sweeper. Its rows
        stay, and its replay says what of the logs is left to the other shard.
        """
        record = record._replace(revision=self.revision + 1)
        if not queue.settings.quarantine:
            self.replays.open(queue.queue_id, self.cursors)
        self.drain_early([queue], now_ms)
        self._withdraw(queue)
        self.moves.leave(queue, record)

    def admit_moved(
        self,
        queue_id: str,
        settings: QueueSettings,
        state: QueueStateRecord,
        ranges: Ranges,
        now_ms: int,
    ) -> Queue:
        """Takes in a queue that has come from another shard, or does not leave this one after all.

        `ranges` have open ends. It begins in quarantine: see `settle`. Its revision is above all
        that it ever had.
        """
        self.revision = max(self.revision, settings.revision)
        revision = self.revision + 1
        settings = settings.changed(revision=revision)
        if not settings.quarantine:
            settings = settings.changed(quarantine=BEING_MOVED, quarantined_at_ms=now_ms)
        queue = Queue(queue_id, settings, state._replace(created_revision=revision), self.notes)
        rows = creation_rows(queue)
        opened = {one.ingest_shard for one in ranges if one.end == OPEN_END}
        unknown = (ReplayRange(log, 0, 0, OPEN_END) for log in self.cursors.keys() - opened)
        self.replays.begin(queue_id, tuple(sorted((*ranges, *unknown))))
        self._next_revision()
        self.deleted.pop(queue_id, None)
        self.moves.end(queue_id)
        self.moves.arrive(queue_id, now_ms)
        self.queues[queue_id] = queue
        self.owned.add(settings)
        self._rows += rows
        self._note_config(queue)
        queue.touch()
        return queue

    def settle(self, queue: Queue) -> bool:
        """Ends the quarantine in which a moved queue began, or returns False: it is too early.

        What this shard's live routing has not judged yet may have come along: until its cursors are
        as far as those of the former shard were, it would be judged twice.
        """
        if queue.settings.quarantine != BEING_MOVED:
            return True
        if not self.replays.can_close(queue.queue_id, self.cursors):
            return False
        self.lift_quarantine(queue, queue.settings)
        return True

    def forget_departed(self, queue_id: str) -> None:
        """Leaves the rows of a queue that has arrived on another shard to the sweeper."""
        queue, record = self.moves.departures[queue_id]
        state = deleted_state(queue, record.revision)
        value = storable(f"state of queue {queue_id!r}", encode_queue_state, state)
        self.replays.drop(queue_id)
        self.moves.forget_departed(queue_id)
        self._put_deleted(queue_id, state, value)

    def drop_arrival(self, queue_id: str, came: Queue) -> None:
        """Leaves the rows to the sweeper that came of a queue which stays where it was.

        `came` is the queue as it was to be.
        """
        state = deleted_state(came, self.revision + 1)
        value = storable(f"state of queue {queue_id!r}", encode_queue_state, state)
        self._next_revision()
        self._note_gone(queue_id)
        self.moves.end(queue_id)
        self._put_deleted(queue_id, state, value)

    def gone_since(self, queue_id: str) -> int | None:
        """The revision at which a queue that is not here was deleted, or left; None: never."""
        departure = self.moves.departures.get(queue_id)
        if departure is not None:
            return departure.record.revision
        state = self.deleted.get(queue_id)
        return None if state is None else state.created_revision

    def absence(self, queue_id: str) -> SlateMQError:
        """The error about a queue that is not here: NotFound, or Unavailable while it moves."""
        if self.moves.has(queue_id):
            return moving(queue_id)
        return NotFound("queue", queue_id)

    def check_stays(self) -> None:
        """Raises Unavailable while the shard is being removed."""
        if self.is_leaving:
            raise Unavailable("the broker shard is being removed", reason="SHARD_LEAVING")

    def write_rows(self, rows: Iterable[RowChange]) -> None:
        """Writes rows with the next commit; those without a value are deleted."""
        self._rows += rows

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
        self.forgotten_revision, rows = forget_surplus(self.deleted, self.forgotten_revision)
        self._rows += rows

    def _next_revision(self) -> None:
        self.revision += 1
        self._rows.append((CONFIG_REVISION_KEY, encode_config_revision(self.revision)))

    def _note_config(self, queue: Queue) -> None:
        self._config_changes.append(
            ConfigChange(queue.queue_id, self.revision, queue.settings, queue.routing_revision)
        )

    def take_config_changes(self) -> list[ConfigChange]:
        """What changed since the last call: it becomes durable with the next drain."""
        taken, self._config_changes = self._config_changes, []
        return taken

    def stored_configs(self) -> list[ConfigChange]:
        """The newest change of each queue, right after the start: all of them are durable.

        When a queue's part in routing last changed is not stored: it counts as new. A queue with a
        replay under way comes last, as the end of its replay may have moved since.
        """
        changes = [
            ConfigChange(
                queue.queue_id,
                self.revision if self.replays.is_running(queue.queue_id) else revision,
                queue.settings,
                queue.routing_revision,
            )
            for queue in self.queues.values()
            for revision in (queue.settings.revision,)
        ]
        gone = {one: state.created_revision for one, state in self.deleted.items()}
        gone |= {one: left.record.revision for one, left in self.moves.departures.items()}
        for queue_id, revision in gone.items():
            changes.append(ConfigChange(queue_id, revision, None, revision))
        return changes

    # --- What waits in a queue ----------------------------------------------

    def purge(self, queue: Queue, kinds: Collection[Purge]) -> int:
        """Empties lists of a queue in O(lanes and leases); returns how many messages they had.

        For AVAILABLE an epoch must be free: see `Queue.can_purge_available`. Rows are left to the
        sweeper. Attempts records stay, as those of acked messages do.
        """
        count = 0
        if Purge.AVAILABLE in kinds:
            self.lanes.forget(queue.waiting.by_name.values())
            count += queue.purge_available()
        if Purge.IN_FLIGHT in kinds:
            count += self.leases.purge(queue)
        if Purge.DONE in kinds:
            count += queue.done.purge()
        if Purge.FAILED in kinds:
            count += queue.failed.purge()
        if Purge.ARCHIVED in kinds:
            count += queue.archived.purge()
        return count

    # --- Routing ------------------------------------------------------------

    def begin(self, piece: Range) -> RangeApplication | None:
        """Begins to apply a range; None if it does not begin at its log's cursor.

        The caller has checked that it was judged by configs that are new enough. Changes of queues
        after the range's revision do not matter to it: matches for a queue that was deleted or
        created since are dropped, and one that starts in the past leaves the range to its replay.
        """
        log, last = piece.log, piece.last
        if piece.previous != self.cursors.get(log, 0) or last <= piece.previous:
            return None
        known = self._without_newer(piece)
        # First what may fail because it cannot be stored.
        if log not in self.cursors:
            # All of a log that appeared during quarantines is left to their replays.
            waiting = [one.queue_id for one in self.queues.values() if one.settings.quarantine]
            for queue_id in (*waiting, *self.moves.departures):
                if not self.replays.is_open(queue_id, log):
                    self.replays.open(queue_id, {log: 0})
        self._leave_to_replays(piece)
        application = RangeApplication(self.queues, known)
        self.cursors[log] = last
        self._changed_cursors.add(log)
        return application

    def _without_newer(self, piece: Range) -> Sequence[Assignment]:
        """The matches of a range for queues that were routed live at its revision."""
        if piece.revision >= self.revision:
            return piece.assignments
        queues = self.queues
        return [
            assignment
            for assignment in piece.assignments
            if (queue := queues.get(assignment.queue_id)) is not None
            and queue.live_revision <= piece.revision
        ]

    def _leave_to_replays(self, piece: Range) -> None:
        queue_ids = list(self._started_after(piece.revision))
        self.replays.extend(queue_ids, piece.log, piece.previous, piece.last)
        for queue_id in queue_ids:
            self._next_revision()  # Routers see it as a change.
            self._note_config(self.queues[queue_id])

    def _started_after(self, revision: int) -> Iterator[str]:
        for queue_id, created in reversed(self._starting_in_the_past.items()):
            if created <= revision:
                return
            yield queue_id

    def begin_backfill(self, queue: Queue, piece: Range, counts: Counts) -> RangeApplication | None:
        """Begins to apply a piece of a queue's replay; None if it does not begin at the cursor.

        The caller has compared the queue's revision and found the replay.
        """
        replay = self.replays.range_of(queue.queue_id, piece.log)
        if replay is None or piece.previous != replay.cursor or piece.last > replay.end:
            return None
        application = RangeApplication(self.queues, piece.assignments)
        self.replays.move(queue.queue_id, piece.log, piece.last, counts)
        return application

    def forget_log(self, log: int) -> None:
        """Forgets a log that is gone, since its ingest shard was removed."""
        if self.cursors.pop(log, None) is not None:
            self._changed_cursors.discard(log)
            self._rows.append((routing_cursor_key(log), None))
        self.replays.forget_log(log)

    # --- Records of others --------------------------------------------------

    def _forget(self, queue: Queue, message_id: int) -> None:
        self._rows += ((key, None) for key in self.attempts.forget(queue, message_id))

    # --- Commits ------------------------------------------------------------

    @property
    def has_changes(self) -> bool:
        """Whether a drain would return rows: every other change comes with one of these."""
        others = (self.outbox, self.executed, self.replays, self.redrives, self.moves)
        if any(one.has_changes for one in others):
            return True
        return bool(self.notes.to_commit or self._rows or self._changed_cursors)

    def drain(self, now_ms: int) -> list[RowChange]:
        """The rows of everything that changed since the last drain."""
        self.drain_early(list(self.notes.to_commit), now_ms)
        rows, self._rows = self._rows, []
        written = self._written
        for log in self._changed_cursors:
            with encoding(f"the routing cursor of log {log}"):
                rows.append((routing_cursor_key(log), encode_routing_cursor(self.cursors[log])))
        self._changed_cursors.clear()
        with encoding("failed attempts"):
            for attempts, row in self.attempts.drain():
                rows.append(row)
                written.attempts.add(attempts)
        with encoding("finished leases"):
            for slot, record in self.leases.finished.drain():
                value = None if record is None else encode_finished_leases(record)
                rows.append((finished_leases_key(slot), value))
        with encoding("the outbox"):
            rows += self.outbox.drain()
        with encoding("executed request IDs"):
            rows += self.executed.drain(now_ms)
        rows += self.replays.drain()
        rows += self.redrives.drain()
        rows += self.moves.drain()
        rows += self.events.take_rows()
        if rows:
            self._written = DrainedChanges(written.generation + 1)
            self._undurable.append(written)
        return rows

    def drain_early(self, queues: Sequence[Queue], now_ms: int) -> None:
        """Encodes what changed in these queues, for the next drain to return.

        A queue that changes again before is encoded again: of a key's rows the last one counts.
        """
        written = self._written
        self.events.collect(queues)
        for queue in queues:
            if queue not in self.notes.to_commit:
                continue  # deleted meanwhile
            self.lanes.note(queue.waiting.by_name.values())
            with encoding(f"a record of queue {queue.queue_id!r}"):
                written.beyond += queue.drain(now_ms, written.generation, self._rows)
            delayed = queue.waiting.delayed
            if delayed.last_order > delayed.durable_order:
                written.delayed.append((delayed, delayed.last_order))
            del self.notes.to_commit[queue]

    def durable(self) -> None:
        """Notes that the oldest drain not yet durable now is; memory drops what it held for it."""
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
