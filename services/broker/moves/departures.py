"""Queues that leave for another shard: what the source does.

    serving ──MoveQueue──► leaving ──rows copied──► the name claimed ──► arrived ──► deleted, swept
                              └──────cancelled: the name claimed for this shard──► serving

Once a queue has left, durably, its departure goes on by itself, after a restart too. What it does
next follows from the claim of the queue's name: that of the move's number, the rows are still to be
copied; a newer one for this shard, the move was cancelled; any other, the queue is to arrive, or
has been on its target, if that was removed since. A target that was given up meanwhile, or was set
back to an older copy of its database, loses it to this shard, which has all of it. From its arrival
on, which is durable, too, no claim matters: only the ingests are to be asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from libs.serving.requests.partitions import named_partition
from libs.storage.database.slate import Database
from libs.storage.errors import CorruptRecord, DamagedStore, StorageError
from libs.storage.objects.queue_names import NameClaim, QueueNames, named_shards
from libs.storage.records.move_records import MoveRecord, MoveStage
from libs.storage.records.states import decode_queue_state
from services.broker.core.moves import moving
from services.broker.core.queue import Queue
from services.broker.delivery.dispatcher import Dispatcher
from services.broker.moves.arrivals import has_partition
from services.broker.moves.arrived import ArrivedQueues
from services.broker.moves.copies import REFUSALS, RETRY_S, Copy, CopyTurns
from services.broker.moves.rows import header_of
from services.broker.moves.targets import ArrivalTargets
from services.broker.shard.locations import Locations
from services.broker.shard.owner import ShardOwner, check_partition
from slatemq.errors import FailedPrecondition, InvalidArgument, SlateMQError, Unavailable
from slatemq.v1.move_pb2 import ArriveResponse

log = logging.getLogger(__name__)

LEASES_AT_ONCE: Final = 1000
"""Leases of a queue that is about to leave ended in one go: some milliseconds."""

BEHIND_S: Final = 5.0
"""How long a target has time to get what this shard had from the logs when it was first asked."""

EDITS_S: Final = 3.0
"""How long a queue that is about to leave waits for the edits of its messages that run: most take a
commit of an ingest. New claims and edits are refused meanwhile."""

LOOK_S: Final = 0.1

CANCELLED_KEPT: Final = 100
"""Cancelled moves that are still listed; older ones are forgotten."""


class Progress(NamedTuple):
    """How far a move is, for operators."""

    shard: int
    partition: int | None = None
    copied_rows_count: int = 0
    is_claimed: bool = False
    problem: str = ""
    is_cancelled: bool = False


@dataclass(eq=False)
class Departures:
    _shard: int
    _owner: ShardOwner
    _database: Database
    _delivery: Dispatcher
    _names: QueueNames
    _locations: Locations
    _targets: ArrivalTargets
    _arrived: ArrivedQueues
    _turns: CopyTurns = field(default_factory=CopyTurns, init=False)
    _progress: dict[str, Progress] = field(default_factory=dict, init=False)
    _beginning: set[str] = field(default_factory=set, init=False)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _calls: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def progress(self) -> Mapping[str, Progress]:
        """By queue, the moves under way, and those that were cancelled."""
        departures = self._owner.shard.moves.departures
        leaving = {
            queue_id: _begun(one.queue, one.record)
            for queue_id, one in departures.items()
            if not one.has_arrived
        }
        return dict(sorted((leaving | self._progress).items()))

    # --- The beginning ------------------------------------------------------

    async def begin(self, queue_id: str, target: int) -> Progress:
        """Has a queue leave; returns once it has, durably. Raises what MoveQueue does."""
        departure = self._owner.shard.moves.departures.get(queue_id)
        is_leaving = departure is not None and not departure.has_arrived
        if departure is not None and is_leaving and departure.record.shard == target:
            check_partition(departure.queue, named_partition(queue_id))
            await self._owner.durable()
            return self.progress()[queue_id]
        queue = await self._owner.find(queue_id)
        if target == self._shard:
            raise InvalidArgument("to_broker_shard", "is the shard that has the queue")
        if queue_id in self._beginning:
            raise moving(queue_id)
        self._beginning.add(queue_id)
        try:
            await self._owner.run(lambda _: self._check(queue))
            number = await self._number_of(queue, target)
            await self._check_target(target, queue_id)
            await self._turns.take_free(queue_id)
            await self._leave(queue, MoveRecord(MoveStage.LEAVING, number, target))
        finally:
            self._beginning.discard(queue_id)
            if not self._owner.shard.moves.is_leaving(queue_id):
                self._turns.end(queue_id)
        return self.progress()[queue_id]

    def _check(self, queue: Queue) -> None:
        """Raises unless the queue can leave now."""
        shard, queue_id = self._owner.shard, queue.queue_id
        if not self._owner.owns(queue):
            raise shard.absence(queue_id)
        redrives = (shard.redrives.get(number) for number in shard.redrives.running())
        if any(one is not None and one.queue_id == queue_id for one in redrives):
            raise FailedPrecondition(
                "REDRIVE_RUNNING",
                f"a redrive of queue {queue_id!r} is running: wait for its end, or cancel it",
                subject=queue_id,
            )
        lists = (queue.done, queue.failed, queue.archived)
        if (
            queue.garbage_epochs
            or queue.waiting.garbage_epochs
            or any(one.garbage.last for one in lists)
        ):
            raise Unavailable(
                f"rows of an earlier purge of queue {queue_id!r} are still being deleted",
                reason="QUEUE_BEING_REMOVED",
            )
        if not shard.settle(queue):
            raise moving(queue_id)  # It has only just come.

    async def _number_of(self, queue: Queue, target: int) -> int:
        """The number of the claim by which the queue is here; the target must have none of it."""
        queue_id, partition = queue.queue_id, partition_of(queue)
        try:
            claim = await self._names.get(queue_id)
        except CorruptRecord as error:
            raise FailedPrecondition("NAME_DIFFERS", str(error), subject=queue_id) from error
        place = claim.place_of(partition)
        if place.shard != self._shard:
            raise FailedPrecondition(
                "NAME_DIFFERS",
                f"the name {queue_id!r} is claimed for {named_shards(claim.broker_shards)}: run "
                "`slatemq verify`",
                subject=queue_id,
            )
        _check_beside(queue_id, claim, target)
        return place.number

    async def _check_target(self, target: int, queue_id: str) -> None:
        """Raises what the target refuses with.

        Where nothing matches, ranges of the logs come a second late: the target may be a little
        behind, and the queue waits for it then, but not for the log of an ingest that is down.
        """
        cursors, until_s = self._owner.durable_cursors, time.monotonic() + BEHIND_S
        while True:
            try:
                await self._targets.check(target, queue_id, cursors)
            except Unavailable as error:
                if error.reason != "TARGET_BEHIND" or time.monotonic() > until_s:
                    raise
            else:
                return
            await asyncio.sleep(LOOK_S)

    async def _leave(self, queue: Queue, record: MoveRecord) -> None:
        queue.is_leaving = True
        leases = self._owner.shard.leases
        try:
            # What has begun since the first look; nothing does that from here on.
            await self._owner.run(lambda _: self._check(queue))
            await self._wait_for_edits(queue)
            self._delivery.refuse_waiters(queue, moving(queue.queue_id))
            while queue.leases.count and self._owner.owns(queue):
                await self._owner.run(partial(leases.take_back, queue, LEASES_AT_ONCE))
                await asyncio.sleep(0)

            def depart(now_ms: int) -> None:
                self._check(queue)
                if queue.leases.count:
                    raise moving(queue.queue_id)
                self._owner.shard.depart(queue, record, now_ms)
                self._progress[queue.queue_id] = _begun(queue, record)
                self._wake.set()  # Here, since the caller may be cancelled while it waits.

            await self._owner.run_alone(depart)
            await self._owner.durable()
        finally:
            queue.is_leaving = False
        log.info("queue %s leaves for broker %d", queue.queue_id, record.shard)

    async def _wait_for_edits(self, queue: Queue) -> None:
        """Waits until no message of a queue is being edited; no edit begins while it leaves."""
        queue_id, until_s = queue.queue_id, time.monotonic() + EDITS_S
        while self._delivery.keeps_back(queue_id):
            if time.monotonic() >= until_s:
                raise Unavailable(
                    f"a message of queue {queue_id!r} is being edited: it can move after that",
                    reason="QUEUE_MOVING",
                )
            await asyncio.sleep(LOOK_S)

    # --- What follows -------------------------------------------------------

    async def run(self) -> None:
        """Carries departures out up to their arrivals; runs until cancelled."""
        try:
            while True:
                self._wake.clear()
                for queue_id, one in list(self._owner.shard.moves.departures.items()):
                    if queue_id not in self._tasks and not one.has_arrived:
                        queue, record = one
                        self._progress.setdefault(queue_id, _begun(queue, record))
                        task = asyncio.create_task(self._carry_out(queue_id, record))
                        self._tasks[queue_id] = task
                        task.add_done_callback(lambda _: self._wake.set())
                await self._wake.wait()
                for queue_id, task in list(self._tasks.items()):
                    if task.done():
                        del self._tasks[queue_id]
                        task.result()
        finally:
            for task in (*self._tasks.values(), *self._calls):
                task.cancel()

    async def _carry_out(self, queue_id: str, record: MoveRecord) -> None:
        """One departure, until the queue has arrived or stays."""
        await self._owner.durable()  # What is copied must be all, and not change any more.
        report = partial(self._report_copied, queue_id)
        copy = Copy(self._database, self._targets, queue_id, record, report)
        while self._is_under_way(queue_id, record):
            why = ""
            try:
                await self._go_on(queue_id, record, copy)
                continue
            except (SlateMQError, StorageError) as error:
                why = self._note_failure(queue_id, copy, error)
            if why:
                try:
                    await self._cancel(queue_id, record, why)
                except (SlateMQError, StorageError) as error:
                    log.warning("the move of queue %s cannot be cancelled: %s", queue_id, error)
            if self._is_under_way(queue_id, record):
                await asyncio.sleep(RETRY_S)

    def _is_under_way(self, queue_id: str, record: MoveRecord) -> bool:
        """Whether this move is not over yet; the queue may be in another one by now."""
        departure = self._owner.shard.moves.departures.get(queue_id)
        if departure is None or departure.has_arrived:
            return False
        return departure.record.revision == record.revision  # Each has one of its own.

    def _note(self, queue_id: str, **changes: object) -> None:
        self._progress[queue_id] = self._progress[queue_id]._replace(**changes)  # type: ignore[arg-type]

    def _report_copied(self, queue_id: str, rows_count: int, problem: str) -> None:
        self._note(queue_id, copied_rows_count=rows_count, problem=problem)

    def _note_failure(self, queue_id: str, copy: Copy, error: SlateMQError | StorageError) -> str:
        """Why the move is to be cancelled; empty: it goes on."""
        text = error.message if isinstance(error, SlateMQError) else str(error)
        if not isinstance(error, REFUSALS):
            log.warning("the move of queue %s waits: %s", queue_id, error)
        progress = self._progress.get(queue_id)
        if progress is None:
            return ""  # It has arrived.
        self._note(queue_id, problem=text)
        if progress.is_claimed:
            return ""
        if isinstance(error, (SlateMQError, CorruptRecord, DamagedStore)) or copy.gives_up():
            return text  # The target has had the time that it has for a page, or never will.
        return ""

    async def _go_on(self, queue_id: str, record: MoveRecord, copy: Copy) -> None:
        """What is next: until the queue has arrived, by the claim of the name."""
        departure = self._owner.shard.moves.departures[queue_id]
        partition = partition_of(departure.queue)
        claim = await self._names.get(queue_id)
        if claim.place_of(partition).number <= record.number:
            _check_beside(queue_id, claim, record.shard)
            await self._turns.take(queue_id)
            # Whatever the target has, this shard knows that the queue has left.
            await self._database.outlast_wal_store()
            await copy.run()
            claim = await self._claim(queue_id, record, record.shard)
        if claim.place_of(partition).shard == self._shard:
            await self._stay(queue_id, "it was cancelled before the broker was started again")
            return
        is_there = claim.place_of(partition).shard == record.shard
        if is_there and await self._targets.is_given_up(record.shard):
            await self._take_back(queue_id, claim, f"broker {record.shard} was given up")
            return
        self._turns.end(queue_id)
        self._locations.note(queue_id, claim.broker_shards, time.monotonic())
        self._note(queue_id, is_claimed=True, problem="")
        found = await self._look_for(queue_id, record, is_there=is_there)
        if is_there and found.lost:
            why = f"broker {record.shard} has lost what came of it"
            await self._take_back(queue_id, claim, why)
            return
        if not found.arrived:
            raise moving(queue_id)
        # Durable before anything that may take long: what is claimed later is about others.
        await self._owner.run(partial(self._owner.shard.moves.arrived_elsewhere, queue_id))
        await self._owner.durable()
        self._progress.pop(queue_id, None)
        self._arrived.came()
        log.info("queue %s is on broker %d now", queue_id, record.shard)

    async def _take_back(self, queue_id: str, claim: NameClaim, why: str) -> None:
        """Has a queue stay that was claimed for a target which never said that it had the queue."""
        partition = partition_of(self._owner.shard.moves.departures[queue_id].queue)
        if not await self._names.place(queue_id, partition, self._shard, claim):
            return  # Another partition moved first.
        shards = list(claim.broker_shards)
        shards[partition] = self._shard
        self._locations.note(queue_id, tuple(shards), time.monotonic())
        await self._stay(queue_id, why)

    async def _look_for(
        self, queue_id: str, record: MoveRecord, *, is_there: bool
    ) -> ArriveResponse:
        """Whether a queue that was claimed for the target is there, or has been, or was lost.

        `is_there`: the claim has it there still. Raises as ArrivalTargets.
        """
        try:
            return await self._targets.arrive(record.shard, queue_id, record.number)
        except Unavailable:
            # A shard is not removed while a queue arrives, nor while it has one: so it took this
            # one in, and that was moved on or deleted since.
            if not await self._targets.is_removed(record.shard):
                raise
            if is_there and await self._targets.is_given_up(record.shard):
                raise  # Meanwhile: it is taken back next.
            return ArriveResponse(arrived=True)

    async def _claim(self, queue_id: str, record: MoveRecord, shard: int) -> NameClaim:
        """Claims the name as the move's end, unless that was done; returns the claim that holds."""
        partition = partition_of(self._owner.shard.moves.departures[queue_id].queue)
        while (claim := await self._names.get(queue_id)).place_of(
            partition
        ).number <= record.number:
            if shard != self._shard:
                _check_beside(queue_id, claim, shard)
            # False where another partition moved first.
            await self._names.place(queue_id, partition, shard, claim)
        return claim

    async def _cancel(self, queue_id: str, record: MoveRecord, why: str) -> None:
        partition = partition_of(self._owner.shard.moves.departures[queue_id].queue)
        claim = await self._claim(queue_id, record, self._shard)
        if claim.place_of(partition).shard == self._shard:
            await self._stay(queue_id, why)
            # The target may be down, and the queue leave for another one meanwhile.
            call = asyncio.create_task(self._report_cancelled(queue_id, record))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _report_cancelled(self, queue_id: str, record: MoveRecord) -> None:
        try:
            await self._targets.arrive(record.shard, queue_id, record.number)
        except SlateMQError as error:
            # It finds out by itself, once it has heard nothing for a while.
            log.info("broker %d does not know yet: %s", record.shard, error)

    async def _stay(self, queue_id: str, why: str) -> None:
        """Takes the queue into service again: its move was cancelled."""
        departure = self._owner.shard.moves.departures[queue_id]
        header = await header_of(self._database, queue_id)
        state = decode_queue_state(header.state)
        self._turns.end(queue_id)  # Before it may begin to move again.

        def stay(now_ms: int) -> None:
            shard = self._owner.shard
            if queue_id not in shard.moves.departures:
                return
            settings, ranges = departure.queue.settings, shard.replays.of(queue_id)
            shard.settle(shard.admit_moved(queue_id, settings, state, ranges, now_ms))
            self._note_cancelled(queue_id, why)

        await self._owner.run(stay)
        await self._owner.durable()
        log.warning("the move of queue %s was cancelled: %s", queue_id, why)

    def _note_cancelled(self, queue_id: str, why: str) -> None:
        cancelled = self._progress.pop(queue_id)
        self._progress[queue_id] = cancelled._replace(is_cancelled=True, problem=why)
        all_cancelled = [one for one, at in self._progress.items() if at.is_cancelled]
        for one in all_cancelled[:-CANCELLED_KEPT]:
            del self._progress[one]


def _begun(queue: Queue, record: MoveRecord) -> Progress:
    partition = queue.settings.partition
    return Progress(record.shard, None if partition is None else partition.index)


def partition_of(queue: Queue) -> int:
    """Which partition of its queue this is; 0 where it is all of it."""
    return queue.settings.partition.index if queue.settings.partition else 0


def _check_beside(queue_id: str, claim: NameClaim, target: int) -> None:
    """Raises where another partition is on the shard that one is to move to, or will be."""
    if target in claim.broker_shards:
        raise has_partition(queue_id, target, claim.broker_shards.index(target))
