"""The shard in its process: runs commands on the pure state, commits what they change, ends leases.

command ──► memory ──► (answer waits) ──► group commit ──► durable ──► answer
▲ NeedsLane, Needs: read from the database, run again
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Final, NamedTuple, TypeVar

from libs.serving.requests.partitions import named_partition
from libs.storage.database.clocks import Clock
from libs.storage.database.commits import GroupCommit
from libs.storage.database.pace import Pace
from libs.storage.database.slate import Batch, Database
from libs.storage.errors import StoreFailed, StoreUnavailable
from libs.storage.layout.buckets import BucketKind, order_in_time, split_order
from libs.storage.layout.primitives import RowChange
from services.broker.core.config_log import ConfigChange, ConfigLog
from services.broker.core.lease_table import LeaseGrace
from services.broker.core.leases import Lease
from services.broker.core.lists.replays import Ranges
from services.broker.core.moves import moving
from services.broker.core.queue import NeedsLane, Queue
from services.broker.core.shard import Needs, RangeApplication, Shard
from services.broker.shard.loading import Loader
from services.broker.shard.lost_time import HOLD_MS, Lost, LostTime
from slatemq.errors import WRONG_SHARD, NotFound, ResourceExhausted, SlateMQError

log = logging.getLogger(__name__)

T = TypeVar("T")

EXPIRE_AT_ONCE = 1000
"""Leases ended in one go at most: some milliseconds, during which nothing else runs."""

TICK_MAX_MS = 100
"""How late a lease may end: the loop looks at least this often."""

DRAIN_AT_ONCE = 256
"""Queues whose records are encoded in one go at most: a few milliseconds."""

LOOK_AT_ONCE = 2000
"""Messages that fell due looked at in one go at most: a few milliseconds."""

LOOK_EVERY_S = 1.0
"""How often what fell due is counted, and what is past its retention dropped."""

OVERDUE_MS = 1000
"""While a commit takes longer than this no lease ends: no consumer could have acked in time."""

SPARE: Final = 100
"""Entries beyond twice the live ones after which stale entries are cleaned up."""


class _Reportable(NamedTuple):
    """What routers and watchers learn of a commit, once it is durable."""

    revision: int
    cursors: Mapping[int, int]
    replays: Mapping[str, Ranges]
    configs: Sequence[ConfigChange]


class ShardOwner:
    """Owns the shard's state and its database. One event loop, no locks."""

    def __init__(
        self,
        database: Database,
        shard: Shard,
        clock: Clock,
        *,
        pace: Pace,
        bytes_max: int,
        held_ms: int | None = None,
    ) -> None:
        """Own this state; refuse more when `bytes_max` are not yet committed (see `admit`).

        Leases that were alive at `held_ms` do not end before `lost_time.go_on`.
        """
        self.shard = shard
        self.clock = clock
        self.commits = GroupCommit(database, clock, self, pace)
        self.commits.on_durable(self._durable)
        self.on_change: Callable[[Iterable[Queue]], None] = lambda queues: None
        """Called with the queues that may now have messages for a waiting claim."""
        self.durable_revision = shard.revision
        self.durable_cursors: Mapping[int, int] = dict(shard.cursors)
        self.durable_replays = shard.replays.by_queue
        self.durable_configs = ConfigLog(
            shard.stored_configs(), forgotten_revision=shard.forgotten_revision
        )
        self.on_revision: list[Callable[[], None]] = []
        """Called when a change of the queues' configs is durable."""
        self.lost_time = LostTime(clock, held_ms)
        self._database = database
        self._loader = Loader(database, shard)
        self._due = DueQueues(shard.queues.values(), self.owns)
        self._bytes_max = bytes_max
        self._is_applying = False  # a range, of which a part is in memory
        self._pending: dict[int, _Reportable] = {}

    # --- Commands -----------------------------------------------------------

    async def run(self, command: Callable[[int], T], size_bytes: int = 0) -> T:
        """Runs a command with the time, once all that it needs is in memory.

        Its changes are in memory when this returns; await `durable` before you report them.
        `size_bytes` is about what it adds to the next commit. An error of the command is raised
        once it is confirmed.
        """
        while True:
            try:
                # Not the time of the first try: a read may take long, and leases and retention
                # are judged. So what a command needs must not depend on when it runs again.
                result = command(self.clock.now_ms())
            except (NeedsLane, Needs) as need:
                self._note_changes(0)
                await self._loader.answer(need)
                continue
            except SlateMQError as error:
                self._note_changes(0)
                await self.confirm(error)
                raise
            self._note_changes(size_bytes)
            return result

    async def run_alone(self, command: Callable[[int], T]) -> T:
        """Runs a command while no range is half applied; it must need nothing that is not here.

        An error of the command is raised as by `run`.
        """
        try:
            async with self.commits.hold:
                result = command(self.clock.now_ms())
                self._note_changes(0)
                return result
        except SlateMQError:
            self._note_changes(0)
            await self.durable()
            raise

    async def apply(
        self,
        begin: Callable[[int], RangeApplication | None],
        on_step: Callable[[Sequence[Queue], int], None],
        size_bytes: int,
    ) -> bool:
        """Applies a range in steps, between which others run; False if it was not to be applied.

        All of it goes into one commit, even if the caller is cancelled meanwhile: that ends it
        after the last step. `on_step` gets the queues that a step has changed, and may claim from
        them.
        """
        try:
            async with self.commits.hold:
                application = begin(self.clock.now_ms())
                if application is None:
                    return False
                self._is_applying = True
                self._note_changes(size_bytes)
                is_cancelled = False
                self._step(application, on_step)
                while not application.is_done:
                    try:
                        await asyncio.sleep(0)
                    except asyncio.CancelledError:
                        is_cancelled = True  # The rest takes as many steps as it would have.
                    self._step(application, on_step)
                # Not if a step has failed: what is half applied is never committed.
                self._is_applying = False
                if is_cancelled:
                    raise asyncio.CancelledError
                return True
        except SlateMQError as error:
            await self.confirm(error)
            raise

    def _step(
        self,
        application: RangeApplication,
        on_step: Callable[[Sequence[Queue], int], None],
    ) -> None:
        now_ms = self.clock.now_ms()
        changed = application.step(now_ms)
        on_step(changed, now_ms)
        if not application.is_done:  # A range of one step, as most are, costs no more.
            self._note_due(changed)
            self.shard.drain_early(changed, now_ms)
        self._note_changes(0)

    def _note_changes(self, size_bytes: int) -> None:
        if self.shard.has_changes:
            self.commits.mark_dirty(size_bytes + self.shard.attempts.take_new_bytes())
        if not self.shard.notes.to_serve:
            return
        served, self.shard.notes.to_serve = self.shard.notes.to_serve, {}
        self.on_change(served)

    def write_rows(self, rows: Iterable[RowChange]) -> None:
        """As `Shard.write_rows`, without a command."""
        self.shard.write_rows(rows)
        self._note_changes(0)

    async def durable(self) -> None:
        """Waits for the newest commit that may hold anything seen so far."""
        await self.commits.durable()

    async def confirm(self, error: SlateMQError) -> None:
        """Wait until an error may be answered: all that it may depend on is durable.

        What is not here may be at a process that has the shard by now: NotFound waits for the proof
        that there is none, one commit for all that wait for it.
        """
        await (self.commits.prove_ownership() if isinstance(error, NotFound) else self.durable())

    @property
    def is_full(self) -> bool:
        """Whether as much waits to be stored as may."""
        return self.commits.uncommitted_bytes > self._bytes_max

    def admit(self) -> None:
        if self.is_full:
            raise ResourceExhausted(
                "too much waits to be stored", reason="UNCOMMITTED_BYTES", retry_after_ms=200
            )

    def queue(self, queue_id: str) -> Queue:
        """The queue of this ID; raises NotFound, or Unavailable (QUEUE_MOVING).

        NotFound also where the call names another partition of it. For commands only: others use
        `find`.
        """
        named, queue = named_partition(queue_id), self.shard.queues.get(queue_id)
        if queue is None:
            raise self.shard.absence(queue_id)
        check_partition(queue, named)
        return queue

    def staying(self, queue_id: str) -> Queue:
        """Like `queue`, for what would keep it here; raises Unavailable for one that leaves."""
        queue = self.queue(queue_id)
        if queue.is_leaving:
            raise moving(queue_id)
        return queue

    async def find(self, queue_id: str) -> Queue:
        """The queue of this ID; raises as `queue`, once it is confirmed that it is not here."""
        named, queue = named_partition(queue_id), self.shard.queues.get(queue_id)
        if queue is None:
            absence = self.shard.absence(queue_id)
            await self.confirm(absence)
            raise absence
        check_partition(queue, named)
        return queue

    def owns(self, queue: Queue) -> bool:
        """Whether this queue still exists: a deleted one must not be changed."""
        return self.shard.queues.get(queue.queue_id) is queue

    # --- Commits ------------------------------------------------------------

    async def drain(self, batch: Batch) -> None:
        """Puts what changed since the last commit (see libs.storage.database.commits.Source)."""
        if self._is_applying:
            raise StoreFailed("a range was left half applied")
        changed = list(self.shard.notes.to_commit)
        for start in range(0, len(changed) - DRAIN_AT_ONCE, DRAIN_AT_ONCE):
            self._drain_early(changed[start : start + DRAIN_AT_ONCE])
            await asyncio.sleep(0)
        await self._lengthen_held()
        self._note_due(self.shard.notes.to_commit)
        batch.put_all(self.shard.drain(self.clock.now_ms()))
        if len(batch):
            shard = self.shard
            self._pending[batch.commit] = _Reportable(
                shard.revision,
                dict(shard.cursors),
                shard.replays.by_queue,
                shard.take_config_changes(),
            )

    def _drain_early(self, queues: Sequence[Queue]) -> None:
        self._note_due(queues)
        self.shard.drain_early(queues, self.clock.now_ms())

    def _note_due(self, queues: Iterable[Queue]) -> None:
        for queue in queues:
            if queue.waiting.has_timed:  # Most have none, and there may be ten thousand.
                self._due.note(queue)

    def _durable(self, commit: int) -> None:
        self.shard.durable()
        revision, self.durable_cursors, self.durable_replays, changes = self._pending.pop(commit)
        self.durable_configs.add(changes)
        if revision != self.durable_revision:
            self.durable_revision = revision
            for item in self.on_revision:
                item()

    # --- Time ---------------------------------------------------------------

    async def end_leases(self) -> None:
        """Ends leases at their deadlines; runs until cancelled."""
        while True:
            try:
                await self.end_leases_once()
            except StoreUnavailable as error:
                # Their attempts records cannot be read now: the leases last a little longer.
                log.warning("leases cannot be ended now: %s", error)
            next_ms = self.shard.leases.deadlines.next_ms()
            if next_ms is None or self.lost_time.held_ms is not None:
                next_ms = self.clock.now_ms() + TICK_MAX_MS
            wait_ms = next_ms - self.clock.now_ms()
            await asyncio.sleep(min(max(wait_ms, 1), TICK_MAX_MS) / 1000)

    async def end_leases_once(self) -> None:
        """Ends the leases whose time has come, unless they are held or the disk is behind."""
        while self.commits.overdue_ms() < OVERDUE_MS:
            until_ms = self.clock.now_ms()
            while (lost := self.lost_time.take()) is not None:
                await self._give_grace(lost)
            if self.lost_time.held_ms is not None:
                return
            next_ms = self.shard.leases.deadlines.next_ms()
            if next_ms is None or next_ms > until_ms:
                return
            leases = self.shard.leases.deadlines.ended(until_ms, EXPIRE_AT_ONCE)
            # Backoffs count from here, however long the reads take.
            await self.run(partial(self._expire, leases, until_ms))
            # Not faster than it is stored, and others run in between.
            await (self.durable() if self.shard.has_changes else asyncio.sleep(0))

    async def _lengthen_held(self) -> None:
        """Gives held leases that are about to end some time, within a commit.

        A start ends what was over by the time of the last commit: so each commit has an end of
        them that is later than itself.
        """
        next_ms, now_ms = self.shard.leases.deadlines.next_ms(), self.clock.now_ms()
        if next_ms is None or not self.lost_time.must_look(next_ms, now_ms):
            return
        assert self.lost_time.held_ms is not None, "they are held"
        queues = self.shard.queues.values()
        grace = LeaseGrace(queues, self.lost_time.held_ms, now_ms, HOLD_MS)
        while not grace.is_done:
            self._drain_early(grace.step())
            await asyncio.sleep(0)

    async def _give_grace(self, lost: Lost) -> None:
        """Gives the leases alive when time was lost that of a restart, in steps.

        No lease ends meanwhile. If more is lost between two steps it starts over: leases that had
        the grace lost it then, and none has ended since.
        """
        queues = self.shard.queues.values()
        grace = LeaseGrace(queues, *lost)
        while not grace.is_done:
            self._drain_early(grace.step())
            self._note_changes(0)
            await asyncio.sleep(0)
            if (more := self.lost_time.take()) is not None:
                lost = Lost(min(lost.since_ms, more.since_ms), more.until_ms)
                grace = LeaseGrace(queues, *lost)

    def _expire(self, leases: list[Lease], until_ms: int, _: int) -> None:
        if not self.lost_time.look():  # also not while their attempts were read
            self.shard.leases.expire(leases, until_ms)

    async def watch_due(self) -> None:
        """Looks at delayed messages when they fall due; runs until cancelled."""
        while True:
            try:
                await self.look_at_due()
            except StoreUnavailable as error:
                log.warning("cannot check delayed messages now: %s", error)
            await asyncio.sleep(LOOK_EVERY_S)

    async def look_at_due(self) -> None:
        """Counts what fell due in each queue; drops what is past its retention, claimed or not."""
        due = self._due.take(self.clock.now_ms())
        try:
            for queue in due:
                until_ms = self.clock.now_ms()
                while self.owns(queue) and queue.waiting.has_due(until_ms):
                    await self.run(partial(self._look, queue, until_ms))
                    # Not faster than it is stored, and others run in between.
                    await (self.durable() if self.shard.has_changes else asyncio.sleep(0))
        finally:
            for queue in due:
                self._due.note(queue)

    def _look(self, queue: Queue, until_ms: int, _: int) -> None:
        if self.owns(queue):
            queue.waiting.drop_expired(until_ms, LOOK_AT_ONCE)


class DueQueues:
    """Queues by the time at which something falls due that was not counted, or a lower bound."""

    def __init__(self, queues: Iterable[Queue], owns: Callable[[Queue], bool]) -> None:
        """Start with these; queues that are not owned any more are forgotten."""
        self._owns = owns
        self._at_ms: dict[Queue, int] = {}
        self._places: list[tuple[int, int, Queue]] = []
        self._numbers = count()  # so that queues are never compared
        self._clean_up_at = SPARE
        for queue in queues:
            self.note(queue)

    def note(self, queue: Queue) -> None:
        """Notes that the queue has changed."""
        at_ms = _next_ms(queue)
        if at_ms is None or at_ms >= self._at_ms.get(queue, at_ms + 1):
            return
        self._at_ms[queue] = at_ms
        heapq.heappush(self._places, (at_ms, next(self._numbers), queue))
        if len(self._places) > self._clean_up_at:
            self._clean_up()

    def take(self, now_ms: int) -> list[Queue]:
        """Removes and returns the queues whose time has come; note them again afterwards."""
        due = []
        while self._places and self._places[0][0] <= now_ms:
            at_ms, _, queue = heapq.heappop(self._places)
            if self._at_ms.get(queue) == at_ms:
                del self._at_ms[queue]
                due.append(queue)
        return [queue for queue in due if self._owns(queue)]

    def _clean_up(self) -> None:
        # The messages of a queue that was deleted may be due in a hundred years.
        self._at_ms = {queue: at_ms for queue, at_ms in self._at_ms.items() if self._owns(queue)}
        self._places = [place for place in self._places if self._at_ms.get(place[2]) == place[0]]
        heapq.heapify(self._places)
        self._clean_up_at = 2 * len(self._places) + SPARE


def _next_ms(queue: Queue) -> int | None:
    orders = [
        max(lane.earliest, lane.due_until + 1)
        for lane in queue.waiting.timed_lanes()
        if lane.count and lane.earliest is not None
    ]
    return split_order(order_in_time(BucketKind.TIMED, min(orders))).ms if orders else None


def check_partition(queue: Queue, named: int | None) -> None:
    """Raises NotFound (WRONG_SHARD) where another partition of the queue is named.

    It was here, or will be: partitions move.
    """
    partition = queue.settings.partition
    index = 0 if partition is None else partition.index
    if named is not None and named != index:
        raise NotFound(
            "queue",
            queue.queue_id,
            f"partition {named} of queue {queue.queue_id!r} is not here, but partition {index}",
            reason=WRONG_SHARD,
        )
