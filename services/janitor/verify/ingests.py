"""One ingest's database: the log, the payloads beside it, and what belongs to both.

The log, the payload records and the packs are read side by side, all in the order of the message
IDs, so that memory holds one log entry at a time:

    log       [entry 1..40]            [entry 41..42]   …
    payloads          [17]                   [42]       …   every message has one of these two
    packs     [1..16]       [25..40]   …
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from libs.storage.layout.ids import MAX_MESSAGE_ID, SeqBlock, message_id, sequence_of, shard_of
from libs.storage.layout.keys import (
    LAST_NUMBER,
    RecordType,
    key_head,
    log_range,
    payload_key,
    payload_range,
)
from libs.storage.layout.primitives import KeyRange
from libs.storage.records.catalogue import KINDS
from libs.storage.records.event_records import EventCounterRecord
from libs.storage.records.log_bounds import GAPS_MAX, LogBoundsRecord, LogGap
from libs.storage.records.metadata import MessageMetadata
from libs.storage.records.payload_packs import PACK_MESSAGES, pack_key, pack_of, pack_range
from libs.storage.records.payloads import PayloadUri
from libs.storage.records.states import RequestIdRecord
from libs.storage.records.task_records import AppliedTask, WaitingTask
from services.janitor.verify.dedupe_pairs import DedupePairs
from services.janitor.verify.events import EventNumbers
from services.janitor.verify.findings import Findings, Kind
from services.janitor.verify.message_ids import IdRuns
from services.janitor.verify.walk import ReadRow, Walk, shown
from slatemq._admin.task_ids import task_id_of
from slatemq._counts import counted

_REST: Final = (
    KeyRange(key_head(RecordType.PAYLOAD)[:1], key_head(RecordType.PAYLOAD)),
    KeyRange(key_head(RecordType.ACTIVE), pack_range().start),
    KeyRange(pack_range().end, b"\xff"),
)
"""Everything but payloads, log and packs."""

REQUESTS_MAX: Final = 100_000
"""Request IDs of tasks that are compared with their tasks, some 400 bytes each; a task is kept for
a week, and a read of each at its own place would take days."""

_LOST_ENTRY: Final = (
    "a message's rows come and go in one commit, so its log entry is lost: restore the ingest's "
    "database from a copy that has it. Otherwise a queue that has the message makes it a dead "
    "letter when it is claimed; where it was not routed, no queue gets it"
)

_UNREAD: Final = (
    "restore the file that is named beside it: these messages wait until then, and others are "
    "delivered"
)

IDS_NAMED: Final = 10
"""Message IDs that a finding names."""


@dataclass(frozen=True)
class NamedObject:
    """An object that a record names, and how many bytes its payload is said to have; -1: none.

    `row` is the key of the record, `key` that for people.
    """

    uri: str
    size_bytes: int
    shard: str
    record: str
    row: bytes
    key: str
    message_ids: tuple[int, ...] = ()


@dataclass
class IngestContents:
    """What other databases are compared with.

    Attributes:
        messages: The IDs of those in the log.
        end: The last ID that the log has had.
        block: Of the IDs that may be in use; an ingest that starts goes on behind it.
        outbox_progress: By broker shard, the last number of its outbox that is stored here.
        waiting_tasks: The ULIDs of tasks that are to be applied, and whose bodies are objects.
    """

    name: str
    shard: int
    messages: IdRuns = field(default_factory=IdRuns)
    end: int = 0
    block: SeqBlock | None = None
    outbox_progress: dict[int, int] = field(default_factory=dict)
    waiting_tasks: set[bytes] = field(default_factory=set)
    clock_ms: int = 0


class _Payloads:
    """The payloads of messages, in the order of their IDs."""

    def __init__(self, rows: AsyncIterator[ReadRow]) -> None:
        self._rows = rows
        self._next: ReadRow | None = None
        self._begun = False

    async def up_to(self, last_id: int) -> list[ReadRow]:
        """The rows not returned yet that begin with this ID at the latest."""
        found: list[ReadRow] = []
        while (row := await self._peek()) is not None and row.parsed <= last_id:
            found.append(row)
            self._next = await anext(self._rows, None)
        return found

    async def _peek(self) -> ReadRow | None:
        if not self._begun:
            self._begun = True
            self._next = await anext(self._rows, None)
        return self._next


class AppliedRequests:
    """The tasks that were applied for each request ID; of very many a sample, by their digests."""

    def __init__(self) -> None:
        self._tasks: dict[bytes, set[bytes]] = {}
        self._shift = 32
        """Digests whose first 32 bits are 0 behind this shift are in the sample."""

    def add(self, digest: bytes, ulid: bytes) -> None:
        """Note a task; an empty digest is of no request ID."""
        if not digest or not self._is_in_sample(digest):
            return
        self._tasks.setdefault(digest, set()).add(ulid)
        while len(self._tasks) > REQUESTS_MAX:
            self._shift -= 1
            kept = filter(self._is_in_sample, self._tasks)
            self._tasks = {one: self._tasks[one] for one in kept}

    def fits(self, digest: bytes, ulid: bytes) -> bool:
        """Whether this task was applied for this request ID, as far as is known."""
        return not self._is_in_sample(digest) or ulid in self._tasks.get(digest, ())

    def _is_in_sample(self, digest: bytes) -> bool:
        return int.from_bytes(digest[:4], "big") >> self._shift == 0


@dataclass
class IngestCheck:
    """Verifies one ingest's database; `named` are the objects that its records name."""

    walk: Walk
    contents: IngestContents = field(init=False)
    _bounds: LogBoundsRecord = field(default=LogBoundsRecord(), init=False)
    _has_bounds: bool = field(default=False, init=False)
    _gaps: list[LogGap] = field(default_factory=list, init=False)
    _named_ids: dict[str, int] = field(default_factory=dict, init=False)
    """By the kind of record, the last message that one names."""
    _applied: AppliedRequests = field(default_factory=AppliedRequests, init=False)
    _dedupe: DedupePairs = field(default_factory=DedupePairs, init=False)

    def __post_init__(self) -> None:
        self.contents = IngestContents(self.walk.name, self.walk.shard)

    @property
    def _findings(self) -> Findings:
        return self.walk.findings

    def _add(self, kind: Kind, record: str, key: str, wrong: str, **more: Any) -> None:
        self._findings.add(kind, self.walk.name, record, key, wrong, **more)

    async def objects(self) -> AsyncIterator[NamedObject]:
        """Read the whole database; yields the objects that its records name."""
        await self._read_rest()
        async for named in self._read_log():
            yield named
        self._check_ends()

    # --- Single records -----------------------------------------------------

    async def _read_rest(self) -> None:
        events = EventNumbers(self.walk)
        for span in _REST:
            async for row in self.walk.rows(span):
                if row.kind is KINDS[RecordType.EVENTS]:
                    events.take(row.parsed, row.value, row.key)
                else:
                    self._take(row, events)
        events.check()
        self._check_dedupe()
        if not self.contents.clock_ms:
            self._add(Kind.ROW, "clock", "(the only one)", "every commit writes it, and it is gone")

    def _take(self, row: ReadRow, events: EventNumbers) -> None:
        value: Any = row.value
        match row.key[1]:
            case RecordType.CLOCK:
                self.contents.clock_ms = value
            case RecordType.ID_BLOCK:
                self.contents.block = value
            case RecordType.LOG_BOUNDS:
                self._bounds, self._has_bounds = value, True
            case RecordType.LOG_GAPS:
                self._gaps = value
            case RecordType.OUTBOX_PROGRESS:
                self.contents.outbox_progress[row.parsed] = value
            case RecordType.EVENT_CURSOR:
                self._named_ids["event cursor"] = value.message_id
            case RecordType.EVENT_COUNTER:
                events.counter = EventCounterRecord(*value)
            case RecordType.REQUEST_IDS:
                self._check_first(row, value)
                for request in value:
                    self._take_published(row, request)
            case RecordType.DEDUPE_KEY:
                self._take_named(row, value.message_id)
                self._dedupe.take_key(row.parsed, value)
            case RecordType.DEDUPE_END:
                self._dedupe.take_ends(row.parsed[0], value)
            case RecordType.TASK if isinstance(value, AppliedTask):
                self._take_published(row, value)
                self._applied.add(value.request, row.parsed)
            case RecordType.TASK_REQUEST:
                self._check_request(row)
            case RecordType.TASK if isinstance(value, WaitingTask) and not value.has_failed:
                self.contents.waiting_tasks.add(row.parsed)

    def _check_first(self, row: ReadRow, requests: list[RequestIdRecord]) -> None:
        """A row is named by its first message; without a new one, by a number above all IDs."""
        place, first = row.parsed.first_sequence, requests[0].first_message_id if requests else 0
        if place != first and (first or place <= MAX_MESSAGE_ID):
            wrong = f"it begins with message {first}: a repeat of the publish would not find it"
            self._add(Kind.REFERENCE, row.kind.name, shown(row.key), wrong)

    def _check_dedupe(self) -> None:
        if self.walk.name in self._findings.unreadable:
            return
        for key in self._dedupe.unnamed(self.contents.clock_ms):
            wrong = "no row of the keys that end in its minute names it, so it would stay for ever"
            self._add(Kind.REFERENCE, "dedupe key", key, wrong)
        for key in self._dedupe.lost(self.contents.clock_ms):
            wrong = f"it names the key {key}, which is gone: its message could be stored twice"
            self._add(Kind.REFERENCE, "dedupe ends", "", wrong)

    def _check_request(self, row: ReadRow) -> None:
        """The task that it names was applied for it: both rows are of one commit.

        Tasks come before requests.
        """
        if self.walk.name in self._findings.unreadable:
            return  # The task may be among what cannot be read.
        if not self._applied.fits(row.parsed, row.value.ulid):
            wrong = f"task {task_id_of(row.value.ulid)} was not applied for this request ID"
            self._add(Kind.REFERENCE, row.kind.name, shown(row.key), wrong)

    def _take_published(self, row: ReadRow, answer: RequestIdRecord | AppliedTask) -> None:
        """The messages of an answered publish."""
        new_count = answer.message_count - len(answer.duplicates)
        self._take_named(row, answer.first_message_id, answer.first_message_id + new_count - 1)
        for _, message in answer.duplicates:
            self._take_named(row, message)

    def _take_named(self, row: ReadRow, first: int, last: int = 0) -> None:
        """Messages that a record names; 0: none."""
        if not first:
            return
        if shard_of(first) != self.walk.shard:
            wrong = f"message {first} is of shard {shard_of(first)}"
            self._add(Kind.REFERENCE, row.kind.name, shown(row.key), wrong)
            return
        known = self._named_ids.get(row.kind.name, 0)
        self._named_ids[row.kind.name] = max(known, first, last)

    # --- The log and the payloads -------------------------------------------

    async def _read_log(self) -> AsyncIterator[NamedObject]:
        async with (
            aclosing(self.walk.rows(log_range(0))) as entries,
            aclosing(self.walk.rows(payload_range())) as records,
            aclosing(self.walk.rows(pack_range())) as packs,
        ):
            payloads, packed = _Payloads(records), _Payloads(packs)
            async for entry in entries:
                messages: list[MessageMetadata] = entry.value
                if not self._is_in_order(entry.parsed, messages):
                    continue
                last_id = messages[-1].message_id
                found = self._sizes(await packed.up_to(last_id))
                for named in self._record_sizes(await payloads.up_to(last_id), messages, found):
                    yield named
                if self.walk.name in self._findings.unreadable:
                    alone = await self._read_alone(entry.parsed, messages, found)
                    for named in self._record_sizes(alone, messages, found):
                        yield named
                self._compare(entry.parsed, messages, found)
            for pack in await packed.up_to(LAST_NUMBER):
                self._name_unlogged("payload pack", [pack.parsed + place for place in pack.value])
            for row in await payloads.up_to(LAST_NUMBER):
                self._name_unlogged("payload", [row.parsed])
                if isinstance(row.value, PayloadUri):
                    yield self._object(row, -1)

    def _is_in_order(self, sequence: int, messages: list[MessageMetadata]) -> bool:
        """Whether the entry comes after the last one, and holds messages of this shard."""
        key, contents = f"sequence {sequence}", self.contents
        if not messages:
            self._add(Kind.ROW, "log entry", key, "it has no messages")
            return False
        ids = [one.message_id for one in messages]
        previous = contents.messages.last
        if ids[0] < sequence or any(b <= a for a, b in pairwise(ids)):
            self._add(Kind.ORDER, "log entry", key, "its messages do not ascend from its sequence")
            return False
        if ids[0] <= previous:
            self._add(Kind.ORDER, "log entry", key, f"message {ids[0]} comes after {previous}")
            return False
        if shard_of(ids[0]) != self.walk.shard or shard_of(ids[-1]) != self.walk.shard:
            self._add(Kind.REFERENCE, "log entry", key, f"message {ids[-1]} is of another shard")
            return False
        if sequence < self._bounds.first_sequence:
            self._add(
                Kind.ORDER,
                "log entry",
                key,
                f"the log begins with {self._bounds.first_sequence} by its bounds",
            )
        self._check_gap(previous, sequence, key)
        for one in ids:
            contents.messages.add(one)
        self._findings.counts["messages"] += len(ids)
        return True

    def _check_gap(self, previous: int, sequence: int, key: str) -> None:
        """Between two entries nothing is missing, while no message was ever removed."""
        before = previous or message_id(self.walk.shard, 1) - 1
        may_jump = self._has_bounds or len(self._gaps) >= GAPS_MAX
        if may_jump or self.walk.name in self._findings.unreadable or sequence == before + 1:
            return
        if LogGap(before, sequence) not in self._gaps:
            wrong = f"messages {before + 1} to {sequence - 1} are missing, and none was removed"
            self._add(Kind.MESSAGE, "log entry", key, wrong)

    def _sizes(self, packs: list[ReadRow]) -> dict[int, int]:
        """The sizes of the payloads in these packs, by message ID."""
        found: dict[int, int] = {}
        for pack in packs:
            if len(pack.value) > PACK_MESSAGES:
                wrong = f"it has {len(pack.value)} payloads, at most {PACK_MESSAGES} fit"
                self._add(Kind.ROW, "payload pack", shown(pack.key), wrong)
            for place, payload in pack.value.items():
                found[pack.parsed + place] = len(payload)
        return found

    async def _read_alone(
        self, sequence: int, messages: list[MessageMetadata], found: dict[int, int]
    ) -> list[ReadRow]:
        """The payload records of the messages that are not found, by their keys, as far as allowed.

        Their packs are added to what is found. An ingest reads by key, too: what lies beside damage
        in a range that cannot be read is not lost.
        """
        packs: set[int] = set()
        records: list[ReadRow] = []
        for one in (message.message_id for message in messages):
            first = pack_of(sequence, one)
            if one in found or not self.walk.may_read_alone:
                continue
            if first not in packs:
                packs.add(first)
                pack = await self.walk.row_at(pack_key(first))
                found |= self._sizes([] if pack is None else [pack])
            if one not in found and (row := await self.walk.row_at(payload_key(one))) is not None:
                records.append(row)
        return records

    def _record_sizes(
        self, rows: list[ReadRow], messages: list[MessageMetadata], found: dict[int, int]
    ) -> Iterator[NamedObject]:
        """Add the sizes of payloads with records of their own; yields those that are objects."""
        said = {one.message_id: one.payload_bytes for one in messages}
        for row in rows:
            one = row.parsed
            if one in found:
                wrong = "it has a record, and is in a pack, too"
                self._add(Kind.REFERENCE, "payload", f"message {one}", wrong)
            if isinstance(row.value, PayloadUri):
                found[one] = said.get(one, -1)
                yield self._object(row, found[one])
            else:
                found[one] = len(row.value)

    def _object(self, row: ReadRow, size_bytes: int) -> NamedObject:
        """The object that a payload's record names."""
        one = row.parsed
        key = f"message {one}"
        return NamedObject(
            row.value.uri, size_bytes, self.walk.name, "payload", row.key, key, (one,)
        )

    def _compare(
        self, sequence: int, messages: list[MessageMetadata], found: dict[int, int]
    ) -> None:
        """Each message of an entry has its payload, and there is no other."""
        missing: list[int] = []
        for message in messages:
            size_bytes = found.pop(message.message_id, None)
            if size_bytes is None:
                missing.append(message.message_id)
            elif size_bytes != message.payload_bytes:
                size = counted(size_bytes, "byte")
                wrong = f"it has {size}, and {message.payload_bytes:,} by the log"
                self._add(
                    Kind.PAYLOAD,
                    "payload",
                    f"message {message.message_id}",
                    wrong,
                    message_ids=(message.message_id,),
                )
        if missing:
            is_unread = self.walk.name in self._findings.unreadable
            what = "cannot be read" if is_unread else "are not stored"
            self._add(
                Kind.PAYLOAD,
                "log entry",
                f"sequence {sequence}",
                f"the payloads of {len(missing)} of its messages {what}: {named_ids(missing)}",
                advice=_UNREAD if is_unread else "",
                message_ids=missing[:IDS_NAMED],
            )
        self._name_unlogged("payload", sorted(found))

    def _name_unlogged(self, record: str, ids: list[int]) -> None:
        """Messages that have payloads, and no log entry: that is lost."""
        if ids and self.walk.name not in self._findings.unreadable:
            at, wrong = f"message {ids[0]}", f"the log has no message {named_ids(ids)}"
            self._add(
                Kind.MESSAGE, record, at, wrong, advice=_LOST_ENTRY, message_ids=ids[:IDS_NAMED]
            )

    # --- Where the log ends -------------------------------------------------

    def _check_ends(self) -> None:
        contents, bounds = self.contents, self._bounds
        contents.end = max(contents.messages.last, bounds.last_message_id)
        block = contents.block
        if contents.end and (block is None or sequence_of(contents.end) >= block.end):
            said = "there is none" if block is None else f"it ends before {block.end}"
            wrong = f"message {contents.end} is in use, and {said}: an ID could be used twice"
            self._add(Kind.REFERENCE, "ID block", "(the only one)", wrong)
        for name, last in self._named_ids.items():
            if last > contents.end and self.walk.name not in self._findings.unreadable:
                wrong = f"it names message {last}, and the log ends with {contents.end}"
                self._add(Kind.REFERENCE, name, "", wrong)


def named_ids(ids: list[int]) -> str:
    """The first IDs, and how many more there are."""
    words = ", ".join(map(str, ids[:IDS_NAMED]))
    more = len(ids) - IDS_NAMED
    return f"{words} and {more:,} more" if more > 0 else words
