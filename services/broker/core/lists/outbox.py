"""Pushes on their way to the ingests: numbered here, stored with the commands that make them.

    push ──► row <ingest shard, number> in the broker's own batch ──durable──► sender ──► ingest
                   │                             ▲                                          │
         set aside if refused permanently        └── deleted when ingest says it is durable ┘

The numbers for one ingest shard have no gaps and never restart: ingest keeps the last one that it
stored, and skips what is sent again. A row that ingest refuses permanently becomes a refused push,
which waits for an operator; PUT_ASIDE takes its place, whose number is sent like any other.
Pure: no I/O, no clock, no asyncio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from libs.storage.errors import CorruptRecord
from libs.storage.layout.own_keys import outbox_counter_key, outbox_key, refused_push_key
from libs.storage.layout.primitives import RowChange
from libs.storage.records.execution_records import (
    OutboxCounter,
    OutboxRecord,
    RefusedPushRecord,
    decode_outbox,
    encode_outbox,
    encode_outbox_counter,
    encode_refused_push,
)
from services.broker.core.lists.storable import storable
from slatemq.errors import ResourceExhausted

ROWS_MAX = 1_000_000
"""Rows that may wait unless set otherwise: an hour without ingest at some 300 pushes a second."""

BYTES_MAX = 1 << 30
"""Bytes that may wait unless set otherwise; they are in the database, not in memory."""

FULL_RETRY_MS = 1000

REFUSED_MAX = 1000
"""Refused pushes set aside at most: beyond, the outbox halts, which shows the cause better."""

REASON_CHARACTERS_MAX = 1000

PUT_ASIDE = encode_outbox(OutboxRecord(0, "", b"", 0, {}))
"""The value of a row whose push was set aside."""

_EMPTY = OutboxCounter(last_number=0, first_waiting=1, waiting_bytes=0)


class RefusedPush(NamedTuple):
    """What memory holds of a push that an ingest refused; no queue: its row is damaged."""

    queue_id: str
    payload_bytes: int
    pushed_at_ms: int
    refused_at_ms: int
    reason: str

    @classmethod
    def of(cls, record: RefusedPushRecord) -> RefusedPush:
        try:
            push = decode_outbox(record.outbox)
        except CorruptRecord:
            push = OutboxRecord(0, "", b"", 0, {})
        return cls(
            push.queue_id,
            push.payload_bytes,
            push.pushed_at_ms,
            record.refused_at_ms,
            record.reason,
        )


class Outbox:
    """The waiting pushes of one broker shard, by ingest shard; memory holds only their numbers."""

    def __init__(
        self,
        counters: Mapping[int, OutboxCounter] | None = None,
        refused: Mapping[tuple[int, int], RefusedPush] | None = None,
    ) -> None:
        """Go on at these stored counters, with these pushes set aside."""
        self.rows_max = ROWS_MAX
        self.bytes_max = BYTES_MAX
        self.on_push: Callable[[int], None] = lambda ingest_shard: None
        """Called for every push, with its ingest shard; the push is not durable yet."""
        self.refused = dict(refused or {})
        """The pushes set aside, by the ingest shard that refused them and their number."""
        self.halts: dict[int, str] = {}
        """By ingest shard, why nothing is sent there until an operator acts."""
        self._counters = dict(counters or {})
        self._oldest_ms: dict[int, int] = {}
        self._changed: set[int] = set()
        self._rows: list[RowChange] = []

    @property
    def ingest_shards(self) -> list[int]:
        """The ingest shards that any push went to."""
        return list(self._counters)

    def counter(self, ingest_shard: int) -> OutboxCounter:
        return self._counters.get(ingest_shard, _EMPTY)

    def waiting_count(self, ingest_shard: int) -> int:
        counter = self.counter(ingest_shard)
        return counter.last_number + 1 - counter.first_waiting

    def oldest_ms(self, ingest_shard: int) -> int | None:
        """When the oldest waiting push was made; None: none waits, or it was not read yet."""
        return self._oldest_ms.get(ingest_shard)

    def check_capacity(self, count: int, size_bytes: int) -> None:
        """Raises ResourceExhausted if it cannot take `count` more pushes; empty, it takes all."""
        rows, waiting_bytes = self._waiting()
        if rows and (rows + count > self.rows_max or waiting_bytes + size_bytes > self.bytes_max):
            raise ResourceExhausted(
                f"the outbox is full: {rows} of {self.rows_max} pushes wait, with {waiting_bytes} "
                f"of {self.bytes_max} bytes; retry later",
                reason="OUTBOX_FULL",
                retry_after_ms=FULL_RETRY_MS,
            )

    def room(self, push_bytes: int) -> int:
        """How many more pushes of this size it takes; empty, it takes one of any size."""
        rows, waiting_bytes = self._waiting()
        room = min(self.rows_max - rows, (self.bytes_max - waiting_bytes) // push_bytes)
        return max(room, 0 if rows else 1)

    def _waiting(self) -> tuple[int, int]:
        """How many pushes wait, and their bytes."""
        rows = sum(map(self.waiting_count, self._counters))
        return rows, sum(counter.waiting_bytes for counter in self._counters.values())

    def push(self, ingest_shard: int, value: bytes, now_ms: int) -> int:
        """Adds a row of `encode_outbox`, after `check_capacity`; returns its number."""
        before = self.counter(ingest_shard)
        number = before.last_number + 1
        if before.first_waiting == number:
            self._oldest_ms[ingest_shard] = now_ms
        self._counters[ingest_shard] = before._replace(
            last_number=number, waiting_bytes=before.waiting_bytes + len(value)
        )
        self._rows.append((outbox_key(ingest_shard, number), value))
        self._changed.add(ingest_shard)
        self.on_push(ingest_shard)
        return number

    def seen(self, ingest_shard: int, pushed_at_ms: int) -> None:
        """Notes when the oldest waiting push was made, according to its row."""
        self._oldest_ms[ingest_shard] = pushed_at_ms

    def sent(self, ingest_shard: int, count: int, size_bytes: int) -> None:
        """Removes the oldest rows, which are durable at ingest; `size_bytes` is of their values."""
        before = self.counter(ingest_shard)
        first = before.first_waiting
        after = before._replace(
            first_waiting=first + count, waiting_bytes=before.waiting_bytes - size_bytes
        )
        self._counters[ingest_shard] = after
        if after.first_waiting > after.last_number:
            self._oldest_ms.pop(ingest_shard, None)
        numbers = range(first, first + count)
        self._rows += ((outbox_key(ingest_shard, number), None) for number in numbers)
        self._changed.add(ingest_shard)

    # --- What ingest refuses ------------------------------------------------

    def set_aside(self, ingest_shard: int, value: bytes, reason: str, now_ms: int) -> None:
        """Sets the push of the oldest row aside, whose value this is; its number stays."""
        before = self.counter(ingest_shard)
        place = (ingest_shard, before.first_waiting)
        record = RefusedPushRecord(now_ms, reason[:REASON_CHARACTERS_MAX], value)
        refused = storable(f"refused push {place[1]}", encode_refused_push, record)
        self.refused[place] = RefusedPush.of(record)
        self._rows.append((refused_push_key(*place), refused))
        self._rows.append((outbox_key(*place), PUT_ASIDE))
        waiting_bytes = before.waiting_bytes - len(value) + len(PUT_ASIDE)
        self._counters[ingest_shard] = before._replace(waiting_bytes=waiting_bytes)
        self._changed.add(ingest_shard)

    def forget(self, place: tuple[int, int]) -> bool:
        """Removes a refused push; False if there is none at this place."""
        if self.refused.pop(place, None) is None:
            return False
        self._rows.append((refused_push_key(*place), None))
        return True

    def renumber(self, ingest_shard: int, last_number: int) -> None:
        """Renumbers what waits to follow this number, the last one that ingest has."""
        before = self.counter(ingest_shard)
        offset = last_number + 1 - before.first_waiting
        self._counters[ingest_shard] = before._replace(offset=offset)
        self._changed.add(ingest_shard)

    # --- Records ------------------------------------------------------------

    @property
    def has_changes(self) -> bool:
        return bool(self._changed or self._rows)

    def drain(self) -> Iterator[RowChange]:
        rows, self._rows = self._rows, []
        changed, self._changed = self._changed, set()
        yield from rows
        for ingest_shard in changed:
            counter = encode_outbox_counter(self._counters[ingest_shard])
            yield outbox_counter_key(ingest_shard), counter
