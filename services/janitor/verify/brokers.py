"""One broker's database: queues, their lists and counts, leases, cursors, the outbox.

The rows of one kind come by queue, so memory holds what one queue has of it. First come the states,
which say what there must be; rows before a list's head or of another incarnation are garbage, which
the owner removes in time.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from libs.storage.database.queue_pairs import unpaired_queues
from libs.storage.errors import CorruptRecord
from libs.storage.layout.buckets import Bucket, BucketKind, split_bucket, split_order
from libs.storage.layout.keys import BucketKey, RecordType, config_range, queue_state_range
from libs.storage.layout.own_keys import CLOCK_KEY, move_range, outbox_counter_range
from libs.storage.layout.primitives import KeyRange
from libs.storage.records.configs import QueueConfigRecord, decode_config, partition_in
from libs.storage.records.event_records import EventCounterRecord
from libs.storage.records.execution_records import OutboxCounter, OutboxRecord, decode_outbox
from libs.storage.records.move_records import MoveRecord
from libs.storage.records.payloads import PayloadUri
from libs.storage.records.redrive_records import RedriveRecord, RedriveState
from libs.storage.records.replay_records import ReplayRange, decode_replay
from libs.storage.records.states import (
    ArchivedRecord,
    LaneRecord,
    OrderRange,
    PurgesRecord,
    QueueStateRecord,
    decode_queue_state,
)
from services.janitor.verify.events import EventNumbers
from services.janitor.verify.findings import Kind
from services.janitor.verify.ingests import NamedObject
from services.janitor.verify.walk import EVERYTHING, ReadRow, Walk, shown
from slatemq._counts import counted

LOST_REASONS: Final = frozenset({"payload gone", "payload damaged"})
"""Reasons of dead letters whose loss their broker has met and said."""

ATTEMPTS_KEPT: Final = 1000
"""Attempts in one record at most."""

_LOST_HALF: Final = (
    "restore the broker's database, or the file of its WAL that is gone, from a copy that has "
    "both. Until then the broker does not start, and nothing is removed that the queue may need"
)

_FIRST: Final = (
    config_range(),
    queue_state_range(),
    outbox_counter_range(),
    move_range(),
    KeyRange(CLOCK_KEY, CLOCK_KEY + b"\x00"),
)
"""What says how much there must be of the rest, and what is over."""

DAY_MS: Final = 86_400_000

CLOCKS_APART_MS: Final = 60_000
"""How far the clock of an ingest may be ahead, which removes messages whose retention is over."""


@dataclass
class NeededMessages:
    """Messages that a list of a queue needs, with payload: their IDs."""

    queue: str
    record: str
    ids: array[int] = field(default_factory=lambda: array("Q"))


@dataclass
class DayOfArchive:
    """Archived dead letters that failed on one day: their IDs, and when they failed."""

    message_ids: array[int] = field(default_factory=lambda: array("q"))
    failed_ms: array[int] = field(default_factory=lambda: array("q"))


@dataclass
class ArchivedMessages:
    """Archived dead letters of a queue, by the day of their failure, counted from 1970 on."""

    queue: str
    days: dict[int, DayOfArchive] = field(default_factory=dict)


@dataclass
class BrokerContents:
    """What other databases are compared with.

    Attributes:
        queues: The queues that exist, by name, with the index of their partition here; 0 for those
            that are not partitioned.
        leaving: The queues that are moving to other shards, or have: all that they had is still
            here.
        arriving: The queues that are moving to this shard.
        cursors: By ingest shard, the last message of its log that was routed.
        replays: By queue, the ranges of logs that it replays.
        counters: By ingest shard, where its outbox stands.
        clock_ms: The owner's time at the last commit.
    """

    name: str
    shard: int
    queues: dict[str, int] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    arriving: set[str] = field(default_factory=set)
    cursors: dict[int, int] = field(default_factory=dict)
    replays: dict[str, list[ReplayRange]] = field(default_factory=dict)
    counters: dict[int, OutboxCounter] = field(default_factory=dict)
    clock_ms: int = 0


@dataclass
class _Lists:
    """What was read of one kind of list of one queue."""

    queue: str
    state: QueueStateRecord
    waiting: Counter[tuple[int, BucketKind]] = field(default_factory=Counter)
    in_flight_count: int = 0
    count: int = 0
    needed: NeededMessages = field(init=False)
    archived: dict[int, DayOfArchive] = field(default_factory=lambda: defaultdict(DayOfArchive))
    seen: set[tuple[int, BucketKind]] = field(default_factory=set)

    @property
    def lane_epoch(self) -> int:
        return self.state.purges.lane_epoch if self.state.purges else self.state.epoch

    @property
    def lanes(self) -> Mapping[tuple[int, BucketKind], LaneRecord]:
        return {(lane.priority, lane.kind): lane for lane in self.state.lanes}


@dataclass
class BrokerCheck:
    """Verifies one broker's database, by the time of its last commit."""

    walk: Walk
    contents: BrokerContents = field(init=False)
    _states: dict[str, QueueStateRecord] = field(default_factory=dict, init=False)
    _configs: dict[str, QueueConfigRecord] = field(default_factory=dict, init=False)
    _is_unpaired: bool = field(default=False, init=False)
    _revision: int = field(default=0, init=False)
    _leases: set[int] = field(default_factory=set, init=False)
    _sequences: set[int] = field(default_factory=set, init=False)
    _outbox: dict[int, list[int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.contents = BrokerContents(self.walk.name, self.walk.shard)

    def _add(self, kind: Kind, record: str, key: str, wrong: str, **more: Any) -> None:
        self.walk.findings.add(kind, self.walk.name, record, key, wrong, **more)

    async def needs(self) -> AsyncIterator[NeededMessages | ArchivedMessages | NamedObject]:
        """Read the whole database; yields what it needs elsewhere, and the objects it names."""
        for span in _FIRST:
            async for row in self.walk.rows(span):
                self._take_first(row)
        self._pair_configs()
        lists: _Lists | None = None
        kind = 0
        events = EventNumbers(self.walk)
        for span in _between(_FIRST):
            async for row in self.walk.rows(span):
                if lists is not None and (row.key[1] != kind or _queue_of(row) != lists.queue):
                    for needed in self._finish(kind, lists):
                        yield needed
                    lists = None
                kind = row.key[1]
                if kind in _LISTS:
                    lists = lists or self._begin(row)
                    if lists is not None:
                        _LISTS[RecordType(kind)](self, row, lists)
                else:
                    for named in self._take(row, events):
                        yield named
        if lists is not None:
            for needed in self._finish(kind, lists):
                yield needed
        self._check_revisions()
        self._check_empty()
        self._check_outbox()
        events.check()
        if self._is_unpaired:
            # Its name is no leftover, nor is what was lost beside it.
            self.walk.findings.unreadable.add(self.walk.name)
        if not self.contents.clock_ms:
            self._add(Kind.ROW, "clock", "(the only one)", "every commit writes it, and it is gone")

    # --- Queues -------------------------------------------------------------

    def _take_first(self, row: ReadRow) -> None:
        match row.key[1]:
            case RecordType.CONFIG:
                self._configs[row.parsed] = row.value
            case RecordType.QUEUE_STATE:
                self._states[row.parsed] = row.value
            case RecordType.OUTBOX_COUNTER:
                self.contents.counters[row.parsed] = row.value
            case RecordType.CLOCK:
                self.contents.clock_ms = row.value
            case RecordType.MOVE if row.value.is_departure:
                self.contents.leaving.add(row.parsed)
            case RecordType.MOVE:
                self.contents.arriving.add(row.parsed)
                self._check_arriving(row)

    def _check_arriving(self, row: ReadRow) -> None:
        """The records decode that make the queue once its name is claimed for this shard."""
        move: MoveRecord = row.value
        try:
            decode_config(move.config)
            decode_queue_state(move.state)
            decode_replay(move.replay)
        except CorruptRecord as error:
            self._add(Kind.ROW, row.kind.name, shown(row.key), str(error), queue_id=row.parsed)

    def _index_of(self, queue: str) -> int:
        try:
            return partition_in(self._configs[queue]).index
        except CorruptRecord as error:
            self._add(Kind.REFERENCE, "queue config", f"queue {queue}", error.detail)
            return 0

    def _pair_configs(self) -> None:
        alive = {queue for queue, state in self._states.items() if not state.deleted}
        here = (alive & self._configs.keys()) - self.contents.leaving
        self.contents.queues = {queue: self._index_of(queue) for queue in here}
        if self.walk.name in self.walk.findings.unreadable:
            return
        for queue, has in sorted(unpaired_queues(self._configs, self._states).items()):
            self._is_unpaired = True
            wrong = f"it has {has}"
            self._add(Kind.REFERENCE, "queue", queue, wrong, queue_id=queue, advice=_LOST_HALF)
        for queue in sorted(self.contents.leaving - alive):
            wrong = "the queue is leaving for another shard, and has no state"
            self._add(Kind.REFERENCE, "move", f"queue {queue}", wrong, queue_id=queue)

    def _begin(self, row: ReadRow) -> _Lists | None:
        """The lists of a row's queue; None, and a finding, where there is no such queue."""
        queue = _queue_of(row)
        if queue in self.contents.arriving:
            return None  # All of it is on the shard that it leaves, too, until it has arrived.
        state = self._states.get(queue)
        if state is None:
            if self.walk.name not in self.walk.findings.unreadable:
                wrong = f"there is no queue {queue}, and none was deleted"
                self._add(Kind.REFERENCE, row.kind.name, shown(row.key), wrong)
            return None
        lists = _Lists(queue, state)
        lists.needed = NeededMessages(queue, row.kind.name)
        return lists

    def _is_live(
        self, row: ReadRow, lists: _Lists, order: int, epoch: int, garbage: set[int]
    ) -> bool:
        """Whether a row is of this incarnation; a finding where it is of none that is known."""
        found = split_order(order).epoch
        if not lists.state.deleted and found == epoch:
            return True
        if found not in garbage:
            wrong = f"it is of epoch {found}, and the queue names that neither as its own nor to go"
            self._add(Kind.ORDER, row.kind.name, shown(row.key), wrong, queue_id=lists.queue)
        return False

    def _garbage(self, lists: _Lists) -> set[int]:
        state = lists.state
        lanes = state.purges.garbage_lane_epochs if state.purges else ()
        return {*state.garbage_epochs, *lanes}

    # --- What waits and is in flight ----------------------------------------

    def _active(self, row: ReadRow, lists: _Lists) -> None:
        key: BucketKey = row.parsed
        available, in_flight = row.value
        if not key.bucket:  # written with the queue, and empty
            return
        try:
            bucket = split_bucket(key.bucket)
        except ValueError as error:
            self._add(Kind.ROW, row.kind.name, shown(row.key), str(error))
            return
        is_in_flight = bucket.kind is BucketKind.IN_FLIGHT
        epoch = lists.state.epoch if is_in_flight else lists.lane_epoch
        if not self._is_live(row, lists, bucket.order, epoch, self._garbage(lists)):
            return
        if (available and is_in_flight) or (in_flight and not is_in_flight):
            wrong = "it has messages of another kind than its bucket"
            self._add(Kind.ROW, row.kind.name, shown(row.key), wrong, queue_id=lists.queue)
        if is_in_flight:
            self._in_flight(row, lists, bucket, in_flight)
        else:
            self._waiting(row, lists, bucket, available)

    def _waiting(self, row: ReadRow, lists: _Lists, bucket: Bucket, available: list[Any]) -> None:
        name = (bucket.priority, bucket.kind)
        lane = lists.lanes.get(name)
        if lane is None or bucket.order < lane.head_order or not lane.waiting_count:
            return  # before the head: garbage
        if bucket.order > lane.tail_order:
            wrong = f"it is behind the tail of its lane, which is {lane.tail_order}"
            self._add(Kind.ORDER, row.kind.name, shown(row.key), wrong, queue_id=lists.queue)
        if name not in lists.seen and bucket.order == lane.head_order:
            available = available[lane.head_offset :]
        lists.seen.add(name)
        lists.waiting[name] += len(available)
        if any(one.priority != bucket.priority for one in available):
            wrong = "it has a message of another priority than its bucket"
            self._add(Kind.ROW, row.kind.name, shown(row.key), wrong, queue_id=lists.queue)
        now_ms = self.contents.clock_ms + CLOCKS_APART_MS
        lists.needed.ids.extend(
            one.message_id for one in available if not 0 < one.retention_deadline_ms <= now_ms
        )

    def _in_flight(self, row: ReadRow, lists: _Lists, bucket: Bucket, in_flight: list[Any]) -> None:
        state = lists.state
        if bucket.order < state.first_in_flight_order:
            wrong = f"a start reads from {state.first_in_flight_order} on, and would miss it"
            self._add(Kind.ORDER, row.kind.name, shown(row.key), wrong, queue_id=lists.queue)
        if bucket.order > state.last_order:
            wrong = f"the queue's last order is {state.last_order}"
            self._add(Kind.ORDER, row.kind.name, shown(row.key), wrong, queue_id=lists.queue)
        lists.in_flight_count += len(in_flight)
        for one in in_flight:
            if one.lease in self._leases:
                wrong = f"message {one.message_id} has a lease that another has, too"
                self._add(Kind.REFERENCE, row.kind.name, shown(row.key), wrong)
            self._leases.add(one.lease)
        lists.needed.ids.extend(one.message_id for one in in_flight)

    def _finish_active(self, lists: _Lists) -> None:
        key, state = f"queue {lists.queue}", lists.state
        if state.deleted or self.walk.name in self.walk.findings.unreadable:
            return
        for name, lane in lists.lanes.items():
            if lists.waiting[name] != lane.waiting_count:
                kind = name[1].name.lower()
                priority = f"of priority {name[0]}"
                said = counted(
                    lane.waiting_count,
                    f"message {priority} is {kind}",
                    f"messages {priority} are {kind}",
                )
                wrong = f"it says {said}, and its buckets hold {lists.waiting[name]}"
                self._add(Kind.COUNT, "queue state", key, wrong, queue_id=lists.queue)
        if lists.in_flight_count != state.in_flight_count:
            are_in_flight = counted(
                state.in_flight_count, "message is in flight", "messages are in flight"
            )
            wrong = f"it says {are_in_flight}, and its lease buckets hold {lists.in_flight_count}"
            self._add(Kind.COUNT, "queue state", key, wrong, queue_id=lists.queue)

    # --- What is done, failed or archived -----------------------------------

    def _done(self, row: ReadRow, lists: _Lists) -> None:
        state, purges = lists.state, lists.state.purges or PurgesRecord(0)
        oldest = state.oldest_done_order
        if self._is_listed(row, lists, oldest, purges.garbage_done):
            lists.count += len(row.value)

    def _failed(self, row: ReadRow, lists: _Lists) -> None:
        state, purges = lists.state, lists.state.purges or PurgesRecord(0)
        if self._is_listed(row, lists, state.oldest_failed_order, purges.garbage_failed):
            lists.count += len(row.value)
            kept = (one for one in row.value if one.reason not in LOST_REASONS)
            lists.needed.ids.extend(one.message_id for one in kept)

    def _archived(self, row: ReadRow, lists: _Lists) -> None:
        archived = lists.state.archived or ArchivedRecord()
        if self._is_listed(row, lists, archived.oldest_order, archived.garbage):
            lists.count += len(row.value)
            for one in row.value:
                day = lists.archived[one.failed_at_ms // DAY_MS]
                day.message_ids.append(one.message_id)
                day.failed_ms.append(one.failed_at_ms)

    def _is_listed(self, row: ReadRow, lists: _Lists, oldest: int, garbage: OrderRange) -> bool:
        """Whether a row of a list counts: it is neither garbage nor before the list's begin."""
        key: BucketKey = row.parsed
        order = key.bucket
        if not order or garbage.first <= order <= garbage.last:
            return False
        if not self._is_live(row, lists, order, lists.state.epoch, self._garbage(lists)):
            return False
        if not oldest or order < oldest:
            return False
        if order > lists.state.last_order:
            wrong = f"the queue's last order is {lists.state.last_order}"
            self._add(Kind.ORDER, row.kind.name, shown(row.key), wrong, queue_id=lists.queue)
        return True

    def _count_list(self, kind: RecordType, state: QueueStateRecord) -> int:
        if kind is RecordType.DONE:
            return state.done_count
        if kind is RecordType.FAILED:
            return state.failed_count
        return state.archived.messages_count if state.archived else 0

    def _finish(self, kind: int, lists: _Lists) -> Iterator[NeededMessages | ArchivedMessages]:
        """Compare what was read with the state."""
        self._read.add((kind, lists.queue))
        if kind == RecordType.ACTIVE:
            self._finish_active(lists)
        elif kind in _COUNTED and not lists.state.deleted:
            self._compare_count(RecordType(kind), lists.queue, lists.state, lists.count)
        if lists.needed.ids:
            yield lists.needed
        if lists.archived:
            yield ArchivedMessages(lists.queue, lists.archived)

    _read: set[tuple[int, str]] = field(default_factory=set, init=False)

    def _compare_count(
        self, kind: RecordType, queue: str, state: QueueStateRecord, count: int
    ) -> None:
        said = self._count_list(kind, state)
        if count != said and self.walk.name not in self.walk.findings.unreadable:
            what = kind.name.lower()
            messages = counted(said, f"message is {what}", f"messages are {what}")
            wrong = f"it says {messages}, and its rows hold {count}"
            self._add(Kind.COUNT, "queue state", f"queue {queue}", wrong, queue_id=queue)

    def _check_empty(self) -> None:
        """Compare the states of queues that have no row of a kind at all."""
        for queue, state in self._states.items():
            if state.deleted:
                continue
            if (RecordType.ACTIVE, queue) not in self._read:
                self._finish_active(_Lists(queue, state))
            for kind in _COUNTED:
                if (kind, queue) not in self._read:
                    self._compare_count(kind, queue, state, 0)

    # --- Attempts and delayed messages --------------------------------------

    def _attempts(self, row: ReadRow, lists: _Lists) -> None:
        if len(row.value) > ATTEMPTS_KEPT:
            wrong = f"it has {len(row.value)} attempts, {ATTEMPTS_KEPT} are kept"
            self._add(Kind.ROW, row.kind.name, shown(row.key), wrong, queue_id=lists.queue)

    def _delayed(self, row: ReadRow, lists: _Lists) -> None:
        key: BucketKey = row.parsed
        self._is_live(row, lists, key.bucket, lists.lane_epoch, self._garbage(lists))

    # --- Everything else ----------------------------------------------------

    def _take(self, row: ReadRow, events: EventNumbers) -> Iterable[NamedObject]:
        value: Any = row.value
        match row.key[1]:
            case RecordType.CONFIG_REVISION:
                self._revision = value
            case RecordType.ROUTING_CURSOR:
                self.contents.cursors[row.parsed] = value
            case RecordType.REPLAY:
                self.contents.replays[row.parsed] = value
                if row.parsed not in self.contents.queues.keys() | self.contents.leaving:
                    wrong = "there is no such queue"
                    self._add(Kind.REFERENCE, "replay", shown(row.key), wrong)
            case RecordType.REDRIVE:
                self._take_redrive(row)
            case RecordType.FORGOTTEN_REVISION if value > self._revision:
                wrong = f"changes up to {value} were forgotten, and the newest is {self._revision}"
                self._add(Kind.ORDER, row.kind.name, shown(row.key), wrong)
            case RecordType.FINISHED_LEASES:
                self._take_finished(row)
            case RecordType.EVENT_COUNTER:
                events.counter = EventCounterRecord(*value)
            case RecordType.EVENTS:
                events.take(row.parsed, value, row.key)
            case RecordType.OUTBOX:
                return self._take_outbox(row)
            case RecordType.REFUSED_PUSH:
                return self._take_refused(row)
        return ()

    def _check_revisions(self) -> None:
        if self.walk.name in self.walk.findings.unreadable:
            return
        for queue, state in self._states.items():
            if state.created_revision > self._revision:
                wrong = f"its revision is {state.created_revision}, the newest is {self._revision}"
                self._add(Kind.ORDER, "queue state", f"queue {queue}", wrong, queue_id=queue)

    def _take_redrive(self, row: ReadRow) -> None:
        """One that runs stays within the failed list of the queue that it was started on."""
        record: RedriveRecord = row.value
        state = self._states.get(record.queue_id)
        if record.state is not RedriveState.RUNNING or state is None or state.deleted:
            return
        if state.created_revision != record.queue_revision:
            return  # Its queue was deleted; it ends by itself.
        if not record.next_order - 1 <= record.end_order <= state.last_order:
            wrong = (
                f"it goes on at {record.next_order} and ends after {record.end_order}, and the "
                f"queue's last order is {state.last_order}"
            )
            self._add(Kind.ORDER, row.kind.name, shown(row.key), wrong, queue_id=record.queue_id)

    def _take_finished(self, row: ReadRow) -> None:
        record = row.value
        if record.sequence in self._sequences:
            wrong = f"another slot has the sequence {record.sequence}, too"
            self._add(Kind.ORDER, row.kind.name, shown(row.key), wrong)
        self._sequences.add(record.sequence)
        if not self._leases.isdisjoint(record.leases):
            wrong = "a lease is finished, and still in flight"
            self._add(Kind.REFERENCE, row.kind.name, shown(row.key), wrong)

    def _take_outbox(self, row: ReadRow) -> Iterable[NamedObject]:
        ingest_shard, number = row.parsed
        counter = self.contents.counters.get(ingest_shard)
        if counter is None or not counter.first_waiting <= number <= counter.last_number:
            said = "there is none" if counter is None else f"it says {counter}"
            wrong = f"its counter does not count it: {said}"
            self._add(Kind.COUNT, row.kind.name, shown(row.key), wrong)
            # It may have been sent: then its object may have gone with its message.
            uncounted = row.value._replace(payload_bytes=-1)
            return _object_of(uncounted, self.walk.name, row)
        found = self._outbox.setdefault(ingest_shard, [0, 0])
        found[0] += 1
        found[1] += row.value_bytes
        return _object_of(row.value, self.walk.name, row)

    def _take_refused(self, row: ReadRow) -> Iterable[NamedObject]:
        try:
            push = decode_outbox(row.value.outbox)
        except CorruptRecord as error:
            self._add(Kind.ROW, row.kind.name, shown(row.key), error.detail)
            self.walk.findings.unreadable.add(self.walk.name)  # It may name any object.
            return ()
        return _object_of(push, self.walk.name, row)

    def _check_outbox(self) -> None:
        for ingest_shard, counter in self.contents.counters.items():
            waiting = counter.last_number + 1 - counter.first_waiting
            count, size_bytes = self._outbox.get(ingest_shard, [0, 0])
            if self.walk.name in self.walk.findings.unreadable:
                continue
            if (count, size_bytes) != (waiting, counter.waiting_bytes):
                wrong = (
                    f"it says that {counted(waiting, 'row')} with {counter.waiting_bytes:,} bytes "
                    f"{'waits' if waiting == 1 else 'wait'}, and there "
                    f"{'is' if count == 1 else 'are'} {count} with {size_bytes:,}"
                )
                self._add(Kind.COUNT, "outbox counter", f"ingest {ingest_shard}", wrong)


def _object_of(push: OutboxRecord, shard: str, row: ReadRow) -> Iterable[NamedObject]:
    if not isinstance(push.payload, PayloadUri):
        return ()
    uri, size_bytes = push.payload.uri, push.payload_bytes
    return (NamedObject(uri, size_bytes, shard, row.kind.name, row.key, shown(row.key)),)


def _queue_of(row: ReadRow) -> str:
    parsed = row.parsed
    return str(parsed[0]) if isinstance(parsed, tuple) else str(parsed)


def _between(spans: Iterable[KeyRange]) -> list[KeyRange]:
    """Everything that is in none of these ranges."""
    ends = sorted(spans)
    points = [KeyRange(b"", EVERYTHING.start), *ends, KeyRange(EVERYTHING.end, b"")]
    return [KeyRange(before.end, after.start) for before, after in pairwise(points)]


_LISTS: Final = {
    RecordType.ACTIVE: BrokerCheck._active,
    RecordType.DONE: BrokerCheck._done,
    RecordType.FAILED: BrokerCheck._failed,
    RecordType.ARCHIVED: BrokerCheck._archived,
    RecordType.ATTEMPTS: BrokerCheck._attempts,
    RecordType.DELAYED: BrokerCheck._delayed,
}
_COUNTED: Final = (RecordType.DONE, RecordType.FAILED, RecordType.ARCHIVED)
