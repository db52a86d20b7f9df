"""Queues that arrive from another shard: what the target does.

    ReceiveRows ──► copying ──the last page──► copied ──the claim names this shard──► a queue
                       └───────────────────────────┴──it names another──► swept

A queue that was copied is taken in when the source says so, and also without it: the source may
never come back. Only the claim of the queue's name decides. A shard that was set back to an older
copy of its database may have nothing of a queue that is claimed for it: then it says so, and never
that the queue has arrived, since the source would remove it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from libs.storage.database.formats import FORMAT
from libs.storage.database.slate import Database
from libs.storage.errors import CorruptRecord, StorageError
from libs.storage.objects.queue_names import NameClaim, QueueNames
from libs.storage.records.configs import decode_config
from libs.storage.records.move_records import MoveRecord, MoveStage
from libs.storage.records.replay_records import ReplayRange, decode_replay
from libs.storage.records.states import QueueStateRecord, decode_queue_state
from services.broker.core.moves import moving
from services.broker.core.queue import Notes, Queue
from services.broker.core.settings import QueueSettings
from services.broker.core.shard import BEING_MOVED
from services.broker.moves.rows import is_taken_along
from services.broker.shard.drain import Drain
from services.broker.shard.locations import Locations
from services.broker.shard.owner import ShardOwner
from services.broker.shard.sweeper import Sweeper
from services.broker.shard.unique_names import UniqueNames
from slatemq.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    SlateMQError,
    Unavailable,
)
from slatemq.v1.move_pb2 import ArrivalHeader, StoredRow
from slatemq.v1.queue_name_pb2 import NameUse

log = logging.getLogger(__name__)

LOOK_S: Final = 0.2
"""How often a queue that has arrived is looked at until its routing has caught up."""

SILENT_S: Final = 5.0
"""A source that has sent nothing for so long may be gone: then the claim is read without it."""


class Arrival(NamedTuple):
    """The records of a queue that arrives, decoded."""

    settings: QueueSettings
    state: QueueStateRecord
    ranges: Sequence[ReplayRange]

    @property
    def partition(self) -> int:
        """Which partition of the queue comes; 0 for a queue without any."""
        return self.settings.partition.index if self.settings.partition else 0

    @classmethod
    def of(cls, header: ArrivalHeader | MoveRecord) -> Arrival:
        """Raises CorruptRecord."""
        settings = QueueSettings.from_record(decode_config(header.config))
        return cls(settings, decode_queue_state(header.state), decode_replay(header.replay))


class Presence(NamedTuple):
    """Whether a queue is on this shard, or has been; or was lost, though it is claimed for it."""

    has_arrived: bool
    is_lost: bool = False


@dataclass(eq=False)
class Arrivals:
    _shard: int
    _owner: ShardOwner
    _database: Database
    _sweeper: Sweeper
    _drain: Drain
    _names: QueueNames
    _unique: UniqueNames
    _locations: Locations
    _heard: dict[str, float] = field(default_factory=dict, init=False)
    _lost: dict[str, MoveRecord] = field(default_factory=dict, init=False)
    """What came of queues that are claimed for this shard, and were not all there."""
    _unsettled: dict[str, None] = field(default_factory=dict, init=False)
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(
        default_factory=WeakValueDictionary, init=False
    )

    def __post_init__(self) -> None:
        for queue_id, queue in self._owner.shard.queues.items():
            if queue.settings.quarantine == BEING_MOVED:
                self._unsettled[queue_id] = None

    async def check(self, queue_id: str, cursors: Mapping[int, int], format_number: int) -> None:
        """Raises what the proto says where the queue cannot come now."""
        if format_number != FORMAT:
            raise FailedPrecondition(
                "OTHER_FORMAT",
                f"broker {self._shard} stores records of format {FORMAT}, not {format_number}: "
                "update all brokers to one version first",
                subject=queue_id,
            )
        if queue_id in self._owner.shard.moves.arrivals:
            await self._judge(queue_id)  # It may be left of a move that was cancelled.
        await self._owner.run(lambda _: self._check_free(queue_id))
        here = self._owner.durable_cursors
        behind = [log for log, cursor in cursors.items() if here.get(log, 0) < cursor]
        if behind:
            raise Unavailable(
                f"broker {self._shard} is still behind in the logs of ingests "
                f"{', '.join(map(str, behind))}",
                reason="TARGET_BEHIND",
            )

    def _check_free(self, queue_id: str) -> None:
        """Raises unless the queue could begin to arrive."""
        shard = self._owner.shard
        shard.check_stays()
        self._drain.check_open()
        queue = shard.queues.get(queue_id)
        if queue is not None and queue.settings.partition is not None:
            raise has_partition(queue_id, self._shard, queue.settings.partition.index)
        if queue is not None:
            raise AlreadyExists("queue", queue_id)
        if shard.moves.has(queue_id):
            raise moving(queue_id)
        if not self._sweeper.is_done_with(queue_id):
            raise Unavailable(
                f"the last queue of the name {queue_id!r} is still being removed",
                reason="QUEUE_BEING_REMOVED",
            )

    async def receive(
        self,
        queue_id: str,
        begun: MoveRecord,
        rows: Sequence[StoredRow],
        *,
        has_header: bool,
        is_last: bool,
    ) -> None:
        """Stores a page; `begun` is the record with which the queue's arrival begins.

        Its number and its shard name the move: of the partitions that are placed by one claim, each
        has a shard of its own.
        """
        try:
            came = Arrival.of(begun) if has_header else None
        except CorruptRecord as error:
            raise InvalidArgument("header", str(error)) from error
        for place, row in enumerate(rows):
            if not is_taken_along(row.key, queue_id):
                raise InvalidArgument(f"rows[{place}].key", "is not a row key of this queue")
        self._owner.admit()
        known = self._owner.shard.moves.arrivals.get(queue_id)
        if known is not None and not _is_same(known, begun.number, begun.shard):
            await self._judge(queue_id)  # It may be left of a move that was cancelled.

        def receive(_: int) -> None:
            shard = self._owner.shard
            known = shard.moves.arrivals.get(queue_id)
            if known is None or not _is_same(known, begun.number, begun.shard):
                if came is None:
                    raise _over(queue_id, begun.number)
                self._check_free(queue_id)
                shard.moves.expect(queue_id, begun)
            shard.write_rows((row.key, row.value) for row in rows)
            if is_last:
                copied = shard.moves.arrivals[queue_id]._replace(stage=MoveStage.COPIED)
                shard.moves.expect(queue_id, copied)

        size_bytes = sum(len(row.key) + len(row.value) for row in rows)
        # Nothing is taken in from the look at the claim on.
        async with self._locks.setdefault(queue_id, asyncio.Lock()):
            known = self._owner.shard.moves.arrivals.get(queue_id)
            is_new = known is None or not _is_same(known, begun.number, begun.shard)
            if came is not None and is_new:
                await self._check_claim(queue_id, begun, came.partition)
            await self._owner.run(receive, size_bytes)
        self._heard[queue_id] = time.monotonic()
        await self._owner.durable()
        if is_last:
            # Before the name is claimed: from then on this is where the queue is.
            await self._database.outlast_wal_store()

    async def _check_claim(self, queue_id: str, begun: MoveRecord, partition: int) -> None:
        """Raises unless the claim is that by which the move began.

        The process that sent the header may have stood still, and another one ended the move.
        """
        claim = await self._claim_of(queue_id)
        if claim.place_of(partition) != (begun.shard, begun.number):
            raise _over(queue_id, begun.number)

    async def _claim_of(self, queue_id: str) -> NameClaim:
        """Raises Unavailable."""
        try:
            return await self._names.get(queue_id)
        except StorageError as error:
            raise Unavailable(f"queue {queue_id!r} cannot arrive now: {error}") from error

    async def arrive(self, queue_id: str, number: int, source: int) -> Presence:
        """Does what the claim says. Raises Unavailable."""
        shard = self._owner.shard
        known = shard.moves.arrivals.get(queue_id)
        if known is None or not _is_same(known, number, source):
            return await self._look(queue_id, number, source)
        self._heard[queue_id] = time.monotonic()
        await self._judge(queue_id)
        return Presence(queue_id in shard.queues)

    async def _look(self, queue_id: str, number: int, source: int) -> Presence:
        """Whether a queue without a record of its move came here, and may have gone on."""
        claim = await self._claim_of(queue_id)
        # Another process may have the shard by now, and know more.
        use = (await self._unique.use(queue_id)).use
        shard = self._owner.shard
        if queue_id in shard.queues or shard.moves.has_record(queue_id):
            return Presence(has_arrived=True)
        if self._shard not in claim.broker_shards:
            return Presence(has_arrived=True)  # What has its name now was claimed after it.
        if use != NameUse.NAME_USE_NONE:
            raise moving(queue_id)
        lost = self._lost.get(queue_id)
        if queue_id not in shard.deleted or (lost and _is_same(lost, number, source)):
            log.error("queue %s was to be here, and this database has nothing of it", queue_id)
            return Presence(has_arrived=False, is_lost=True)
        raise Unavailable(
            f"broker {self._shard} may have deleted queue {queue_id!r}, or lost it with an older "
            "copy of its database. If it was deleted, create a queue of this name on broker "
            f"{self._shard}, and delete that; else restore the database from a newer copy",
            reason="QUEUE_UNKNOWN",
        )

    async def _judge(self, queue_id: str) -> None:
        """Takes a queue in, or drops what came of it, if the claim of its name says so.

        Durable. Raises Unavailable.
        """
        async with self._locks.setdefault(queue_id, asyncio.Lock()):
            record = self._owner.shard.moves.arrivals.get(queue_id)
            if record is None:
                return
            claim = await self._claim_of(queue_id)
            try:
                came = Arrival.of(record)
            except CorruptRecord as error:
                raise Unavailable(f"queue {queue_id!r} cannot arrive now: {error}") from error
            place = claim.place_of(came.partition)
            if place.number <= record.number:
                return
            is_mine = place.shard == self._shard and record.stage is MoveStage.COPIED

            def decide(now_ms: int) -> None:
                if self._owner.shard.moves.arrivals.get(queue_id) != record:
                    return  # Another page came meanwhile: it is judged again.
                if is_mine:
                    self._take_in(queue_id, came, now_ms)
                else:
                    log.info("queue %s does not come: dropping what came of it", queue_id)
                    if place.shard == self._shard:
                        # It was claimed for this shard after the last page, which is not here.
                        self._lost[queue_id] = record
                    former = Queue(queue_id, came.settings, came.state, Notes())
                    self._owner.shard.drop_arrival(queue_id, former)
                    self._sweeper.deleted(queue_id)

            await self._owner.run(decide)
            await self._owner.durable()
            self._locations.note(queue_id, claim.broker_shards, time.monotonic())

    def _take_in(self, queue_id: str, came: Arrival, now_ms: int) -> None:
        shard = self._owner.shard
        ranges = tuple(came.ranges)
        queue = shard.admit_moved(queue_id, came.settings, came.state, ranges, now_ms)
        if not shard.settle(queue):
            self._unsettled[queue_id] = None
        log.info("queue %s has arrived", queue_id)

    async def run(self) -> None:
        """Goes on with what does not need the sources; runs until cancelled."""
        while True:
            await self._settle()
            moves = self._owner.shard.moves
            now = time.monotonic()
            self._heard = {one: at for one, at in self._heard.items() if one in moves.arrivals}
            for queue_id in list(moves.arrivals):
                if now - self._heard.get(queue_id, 0.0) < SILENT_S:
                    continue
                self._heard[queue_id] = now
                try:
                    await self._judge(queue_id)
                except SlateMQError as error:
                    log.warning("%s", error)
            await asyncio.sleep(LOOK_S)

    async def _settle(self) -> None:
        """Ends the quarantine of queues that have arrived, once routing has caught up."""
        for queue_id in list(self._unsettled):

            def settle(_: int, queue_id: str = queue_id) -> None:
                queue = self._owner.shard.queues.get(queue_id)
                if queue is None or self._owner.shard.settle(queue):
                    self._unsettled.pop(queue_id, None)

            await self._owner.run(settle)


def _is_same(known: MoveRecord, number: int, source: int) -> bool:
    return (known.number, known.shard) == (number, source)


def has_partition(queue_id: str, shard: int, partition: int) -> FailedPrecondition:
    return FailedPrecondition(
        "SHARD_HAS_PARTITION",
        f"broker shard {shard} has partition {partition} of queue {queue_id!r}: a shard has one "
        "partition of a queue, so choose another shard, or add one",
        subject=queue_id,
    )


def _over(queue_id: str, number: int) -> FailedPrecondition:
    return FailedPrecondition(
        "MOVE_OVER",
        f"move {number} of queue {queue_id!r} is over: it has arrived, was cancelled, or another "
        "has begun",
        subject=queue_id,
    )
