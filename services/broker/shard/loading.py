"""Reads the broker's database: all state at start, and cold buckets when a command needs them."""

from __future__ import annotations

import asyncio
from bisect import bisect_right, insort
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from libs.storage.database.queue_pairs import refuse_unpaired
from libs.storage.layout.buckets import (
    BucketKind,
    bucket_number,
    lane_order,
    last_lane_order,
    last_order,
    order_of,
    split_bucket,
)
from libs.storage.layout.ids import MAX_MESSAGE_ID
from libs.storage.layout.keys import (
    active_range,
    attempts_key,
    attempts_range,
    config_range,
    parse_active_key,
    parse_config_key,
    parse_queue_state_key,
    parse_waiting_key,
    queue_state_range,
    waiting_range,
)
from libs.storage.layout.own_keys import (
    CLOCK_KEY,
    CONFIG_REVISION_KEY,
    DRAINING_KEY,
    FORGOTTEN_REVISION_KEY,
    LEAVING_KEY,
    MINUTE_MS,
    executed_range,
    finished_leases_range,
    move_range,
    outbox_counter_range,
    parse_executed_key,
    parse_move_key,
    parse_outbox_counter_key,
    parse_redrive_key,
    parse_refused_push_key,
    parse_replay_key,
    parse_routing_cursor_key,
    redrive_range,
    refused_push_range,
    replay_range,
    routing_cursor_range,
)
from libs.storage.layout.primitives import KeyRange
from libs.storage.records.configs import decode_config
from libs.storage.records.execution_records import (
    decode_executed,
    decode_outbox_counter,
    decode_refused_push,
)
from libs.storage.records.move_records import decode_move
from libs.storage.records.queues import FailedAttempt, decode_active, decode_attempts
from libs.storage.records.redrive_records import decode_redrive
from libs.storage.records.replay_records import decode_replay
from libs.storage.records.states import (
    QueueStateRecord,
    decode_clock,
    decode_config_revision,
    decode_finished_leases,
    decode_forgotten_revision,
    decode_queue_state,
    decode_routing_cursor,
)
from services.broker.core.leases import Lease
from services.broker.core.lists.attempts import Attempts, attempts_at
from services.broker.core.lists.executed import WINDOW_MINUTES, Executed
from services.broker.core.lists.outbox import Outbox, RefusedPush
from services.broker.core.lists.replays import Replays
from services.broker.core.queue import NeedsLane, Notes, Queue
from services.broker.core.redrives import Redrives
from services.broker.core.settings import QueueSettings
from services.broker.core.shard import Needs, Shard
from services.broker.core.waiting.lane import COMPLETE, Lane
from services.broker.core.waiting.scan import AttemptsKey, LaneOwner, NeedsRows, StoredBucket

LOAD_MESSAGES = 4000
"""Messages read in one go when a lane continues in the database."""

READ_AT_ONCE = 100
"""Records read at the same time for one command: some ten milliseconds of the event loop."""

LOAD_ROWS = 500
"""Buckets read in one go: some 3 ms if each has one message."""

FIRST_ROWS = 8
"""Buckets of the first read: 500 of a thousand messages each would be 13 MB, mostly wasted."""

FEW = 4
"""This many records are read one by one: a scan costs no less."""

SCANNED_MAX = 200
"""Rows read in a scan for READ_AT_ONCE of them: others may lie in between."""

K = TypeVar("K")
T = TypeVar("T")

R = TypeVar("R")


class Store(Protocol):
    """What is needed of a database: `libs.storage.database.slate.Database` has it."""

    async def get(self, key: bytes) -> bytes | None:
        """The value of a key."""

    def scan(
        self, start: bytes, end: bytes, limit: int | None = None
    ) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """Rows with start ≤ key < end in key order, at most `limit`, in lists."""


async def read_attempts(
    database: Store, keys: Iterable[AttemptsKey]
) -> dict[AttemptsKey, list[FailedAttempt]]:
    """The records of these keys; empty where there is none."""
    records: dict[AttemptsKey, list[FailedAttempt]] = {}
    async for part in read_attempts_in_parts(database, keys):
        records.update(part)
    return records


async def read_attempts_in_parts(
    database: Store, keys: Iterable[AttemptsKey]
) -> AsyncIterator[dict[AttemptsKey, list[FailedAttempt]]]:
    """The records of these keys, some at a time; empty where there is none.

    Most commands that need many records are about messages that came together and never failed:
    reading a record that does not exist costs as much as reading one that does.
    """
    by_queue: dict[tuple[str, int], set[AttemptsKey]] = {}
    for key in keys:
        by_queue.setdefault(key[:2], set()).add(key)
    for wanted in map(sorted, by_queue.values()):
        for start in range(0, len(wanted), READ_AT_ONCE):
            part = wanted[start : start + READ_AT_ONCE]
            values = await _scanned(database, part) if len(part) > FEW else {}
            part = [key for key in part if key not in values]
            got = await asyncio.gather(*(database.get(_row_key(key)) for key in part))
            values.update(zip(part, got, strict=True))
            yield {key: decode_attempts(value) if value else [] for key, value in values.items()}


async def _scanned(database: Store, part: Sequence[AttemptsKey]) -> dict[AttemptsKey, bytes | None]:
    """The values of the first of these keys, which are sorted and of one queue: maybe of all."""
    (queue_id, _, first), (_, _, last) = part[0], part[-1]
    span = attempts_range(queue_id, first, last)
    rows: dict[bytes, bytes] = {}
    async for some in database.scan(span.start, span.end, limit=SCANNED_MAX):
        rows.update(some)
    known_until = span.end if len(rows) < SCANNED_MAX else max(rows)
    return {key: rows.get(_row_key(key)) for key in part if _row_key(key) <= known_until}


class Histories:
    """Which messages of a queue have records of attempts: few, so most looks need no read."""

    def __init__(self, database: Store, attempts: Attempts, queue: Queue) -> None:
        """Look in this database, and at what is in memory."""
        self._database = database
        self._attempts = attempts
        self._queue = queue
        self._end = attempts_range(queue.queue_id, 0, MAX_MESSAGE_ID).end
        self._gaps: list[KeyRange] = []
        """In order, where no record is stored; of two that overlap, both have the same end."""

    async def of(self, message_ids: Sequence[int]) -> set[int]:
        """Those of these messages that have a record."""
        queue = self._queue
        found = {one for one in message_ids if self._attempts.get(attempts_at(queue, one))}
        wanted = {attempts_key(queue.queue_id, one): one for one in message_ids}
        left = [key for key in sorted(wanted) if not self._is_in_gap(key)]
        while left:
            span = KeyRange(left[0], self._end)
            stored = [key async for key, _ in _rows(self._database, span, READ_AT_ONCE)]
            is_end = len(stored) < READ_AT_ONCE
            # The next read begins at the next one wanted: all dead letters may lie in between.
            count = len(left) if is_end else bisect_right(left, stored[-1])
            known, left = left[:count], left[count:]
            found.update(wanted[key] for key in set(known).intersection(stored))
            before = bisect_right(stored, known[-1])
            first = stored[before - 1] + b"\x00" if before else known[0]
            beyond = self._end if is_end else first
            insort(self._gaps, KeyRange(first, stored[before] if stored[before:] else beyond))
        return found

    def _is_in_gap(self, key: bytes) -> bool:
        place = bisect_right(self._gaps, (key, self._end))
        return place > 0 and key < self._gaps[place - 1].end


def _row_key(key: AttemptsKey) -> bytes:
    queue_id, _, message_id = key
    return attempts_key(queue_id, message_id)


async def last_clock_ms(database: Store) -> int:
    """The time of the last commit; 0 in a new database."""
    value = await database.get(CLOCK_KEY)
    return decode_clock(value) if value else 0


async def load_shard(database: Store, last_ms: int) -> Shard:
    """The shard as the last commit left it; `last_ms` is the time of that commit.

    Leases have the ends that they had then: see `LostTime`.

    Raises CorruptRecord, DamagedStore.
    """
    revision = await database.get(CONFIG_REVISION_KEY)
    forgotten = await database.get(FORGOTTEN_REVISION_KEY)
    cursors = await _table(
        database, routing_cursor_range(), parse_routing_cursor_key, decode_routing_cursor
    )
    finished = [
        decode_finished_leases(value) async for _, value in _rows(database, finished_leases_range())
    ]
    shard = Shard(
        revision=decode_config_revision(revision) if revision else 0,
        forgotten_revision=decode_forgotten_revision(forgotten) if forgotten else 0,
        cursors=cursors,
        finished=finished,
    )
    shard.is_draining = await database.get(DRAINING_KEY) is not None
    shard.is_leaving = await database.get(LEAVING_KEY) is not None
    counters = await _table(
        database, outbox_counter_range(), parse_outbox_counter_key, decode_outbox_counter
    )
    refused = await _table(
        database, refused_push_range(), parse_refused_push_key, decode_refused_push
    )
    shard.outbox = Outbox(counters, {at: RefusedPush.of(one) for at, one in refused.items()})
    shard.executed = await _load_executed(database, last_ms)
    replays = await _table(database, replay_range(), parse_replay_key, decode_replay)
    shard.replays = Replays(replays)
    redrives = await _table(database, redrive_range(), parse_redrive_key, decode_redrive)
    shard.redrives = Redrives(redrives)
    states = await _table(database, queue_state_range(), parse_queue_state_key, decode_queue_state)
    moves = await _table(database, move_range(), parse_move_key, decode_move)
    leaving = {one for one, move in moves.items() if move.is_departure}
    configs = await _table(database, config_range(), parse_config_key, decode_config)
    refuse_unpaired(configs, states)
    departed: dict[str, Queue] = {}
    for queue_id, config in configs.items():
        settings = QueueSettings.from_record(config)
        if queue_id in leaving:  # It does not change any more.
            departed[queue_id] = Queue(queue_id, settings, states[queue_id], Notes())
        else:
            shard.restore_queue(Queue(queue_id, settings, states[queue_id], shard.notes))
    for queue_id, move in moves.items():
        shard.moves.restore(departed.get(queue_id), queue_id, move)
    gone = [(queue_id, state) for queue_id, state in states.items() if state.deleted]
    # In the order of their deletion: a deleted queue's revision is that of it.
    shard.deleted = dict(sorted(gone, key=lambda pair: pair[1].created_revision))
    busy = [one for one in shard.queues.values() if states[one.queue_id].in_flight_count]
    await _in_turns(lambda one: _load_leases(database, shard, one, states[one.queue_id]), busy)
    return shard


async def _table(
    database: Store, span: KeyRange, parse_key: Callable[[bytes], K], decode: Callable[[bytes], R]
) -> dict[K, R]:
    """All records of a kind, by what their keys say."""
    return {parse_key(key): decode(value) async for key, value in _rows(database, span)}


async def _load_executed(database: Store, last_ms: int) -> Executed:
    # What was older at the last commit is deleted, or will be: skip its tombstones.
    first = max(last_ms // MINUTE_MS - WINDOW_MINUTES - 3, 0)
    return Executed(
        [
            (*parse_executed_key(key), decode_executed(value))
            async for key, value in _rows(database, executed_range(first, (1 << 32) - 1))
        ]
    )


async def _load_leases(
    database: Store, shard: Shard, queue: Queue, state: QueueStateRecord
) -> None:
    first = bucket_number(0, BucketKind.IN_FLIGHT, state.first_in_flight_order)
    last = bucket_number(0, BucketKind.IN_FLIGHT, last_order(state.epoch))
    async for key, value in _rows(database, active_range(queue.queue_id, first, last)):
        order = split_bucket(parse_active_key(key).bucket).order
        for stored in decode_active(value)[1]:
            shard.leases.restore(queue, order, Lease.restore(stored, queue))


@dataclass(eq=False)
class Loader:
    """Reads what commands need that is not in memory."""

    _database: Store
    _shard: Shard
    _lanes: dict[Lane, asyncio.Task[None]] = field(default_factory=dict, init=False)

    async def answer(self, need: NeedsLane | Needs) -> None:
        """Reads what is needed into memory; then the command can run again."""
        if isinstance(need, NeedsLane):
            await self._load_lane(need)
            return
        attempts = self._shard.attempts
        attempts.begin_read(need.attempts)
        for slot in need.slots:
            slot.lane.begin_read(slot.first_order, slot.last_order)
        try:
            found = await _in_turns(self._buckets, need.slots)
            # What was read stays, also if this is cancelled: a repeat needs only the rest.
            async for records in read_attempts_in_parts(self._database, need.attempts):
                for key, record in records.items():
                    attempts.offer(key, record)
        finally:
            attempts.end_read(need.attempts)
            for slot in need.slots:
                slot.lane.end_read(slot.first_order, slot.last_order)
        # Offered together, so that nothing can happen between the first and the last.
        for slot, (rows, through) in zip(need.slots, found, strict=True):
            slot.offer(rows, through)

    async def _load_lane(self, need: NeedsLane) -> None:
        task = self._lanes.get(need.lane)
        if task is None:
            if need.lane.complete:
                return  # another command had it read meanwhile
            need.lane.loading = True
            task = asyncio.create_task(self._read_lane(need.available, need.lane))
            self._lanes[need.lane] = task
            task.add_done_callback(lambda _: self._lanes.pop(need.lane))
        await asyncio.shield(task)

    async def _read_lane(self, available: LaneOwner, lane: Lane) -> None:
        if lane.complete:
            lane.loading = False  # the last of it was taken before this began
            return
        first_unknown = lane.first_unknown
        first = max(first_unknown, lane_order(lane.kind, order_of(lane.epoch, 0, 0)))
        last = last_lane_order(lane.kind, last_order(lane.epoch))
        try:
            rows, through = await read_buckets(
                self._database, available.queue_id, lane, (first, last), in_parts=True
            )
        finally:
            lane.loading = False
        lane.loaded(first_unknown, rows, COMPLETE if through == last else through)
        if available.by_name.get((lane.priority, lane.kind)) is lane:
            self._shard.lanes.was_read(lane, available.by_name.values())

    async def _buckets(self, need: NeedsRows) -> tuple[list[StoredBucket], int]:
        orders = (need.first_order, need.last_order)
        queue_id = need.available.queue_id
        return await read_buckets(
            self._database, queue_id, need.lane, orders, in_parts=need.in_parts
        )


async def _in_turns(read: Callable[[T], Awaitable[R]], wanted: Sequence[T]) -> list[R]:
    """Reads in parts, and yields the event loop in between."""
    found: list[R] = []
    for start in range(0, len(wanted), READ_AT_ONCE):
        found += await asyncio.gather(*map(read, wanted[start : start + READ_AT_ONCE]))
    return found


async def read_buckets(
    database: Store, queue_id: str, lane: Lane, orders: tuple[int, int], *, in_parts: bool
) -> tuple[list[StoredBucket], int]:
    """The stored buckets of a lane between two orders, both included, or `in_parts` the first ones.

    Also returns the order up to which these are all.
    """
    first, last = orders
    rows: list[StoredBucket] = []
    count = 0
    limit = FIRST_ROWS if in_parts else None
    while True:
        span = waiting_range(queue_id, lane.priority, lane.kind, first, last)
        before = len(rows)
        async for key, value in _rows(database, span, limit=limit):
            items = decode_active(value)[0]
            rows.append((parse_waiting_key(key), items))
            count += len(items)
            if in_parts and (count >= LOAD_MESSAGES or len(rows) >= LOAD_ROWS):
                return rows, rows[-1][0]
        if limit is None or len(rows) - before < limit or rows[-1][0] == last:
            return rows, last
        first = rows[-1][0] + 1
        # As many as are needed if the next ones are like these.
        wanted = -(-LOAD_MESSAGES * len(rows) // max(count, 1))
        limit = min(wanted, LOAD_ROWS) - len(rows)


async def _rows(
    database: Store, span: KeyRange, limit: int | None = None
) -> AsyncIterator[tuple[bytes, bytes]]:
    async for rows in database.scan(span.start, span.end, limit=limit):
        for row in rows:
            yield row
