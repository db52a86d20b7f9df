"""Events of changes as rows of the shard's own database, in the batches of the changes.

::

    command ──▶ record ──▶ rows ──in one batch with the change──▶ durable ──▶ relay ──▶ backend
                                                                    ▲                     │
                                              rows are deleted, a second later at most ◀──┘

A row that is left is an event that is owed: after any kill it is published, and again
where it was published and its row is still there. Events are numbered in the order in which they
were recorded; number and stream, both stored, give each its ID.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Final, NamedTuple

import msgspec
from opentelemetry import trace

from libs.events.relay import BATCH_EVENTS, EventBatch
from libs.storage.database.slate import Database
from libs.storage.errors import CorruptRecord
from libs.storage.layout.own_keys import (
    EVENT_COUNTER_KEY,
    events_key,
    events_range,
    parse_events_key,
)
from libs.storage.layout.primitives import UTF8_MAX_BYTES, RowChange
from libs.storage.records.event_records import (
    EventCounterRecord,
    EventsRecord,
    decode_event_counter,
    decode_events,
    encode_event_counter,
    encode_events,
)
from slatemq.events.catalogue import EventData
from slatemq.events.envelope import Event, derive_event_id, format_timestamp

log = logging.getLogger(__name__)

ROWS_AT_ONCE: Final = 32
"""Rows read at once: of dead letters with the longest reasons they have some 5 MB."""

DELETE_S: Final = 1.0
"""How long rows of published events may stay: their events come again after a crash, and where each
commit is a paid request, an idle shard makes one per period."""

REQUEST_ID_MAX: Final = UTF8_MAX_BYTES // 4
"""Characters of a request ID in a row."""


class Happening(NamedTuple):
    """An event's content, and its time in ms since the Unix epoch."""

    at_ms: int
    data: EventData


def current_request() -> str:
    """The trace ID of the call being served; empty where it has none."""
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


class EventOutbox:
    """Makes the rows of events. Pure: the caller commits the rows with the change.

    Attributes:
        last_number: Of the newest event.
        recorded: Set when there is a new one.
    """

    def __init__(self, counter: EventCounterRecord) -> None:
        self.last_number = counter.last_number
        self.recorded = asyncio.Event()
        self.stream = counter.stream
        self._rows: list[RowChange] = []

    def record(
        self, happenings: Sequence[Happening], request_id: str = "", *, after: int = 0
    ) -> None:
        """Add events of one type to the rows to be committed.

        `after` is the last message ID of the log, where the shard has one.
        """
        if not happenings:
            return
        for start in range(0, len(happenings), BATCH_EVENTS):
            some = happenings[start : start + BATCH_EVENTS]
            row = EventsRecord(
                after,
                len(some),
                some[0].data.event_type,
                request_id[:REQUEST_ID_MAX],
                msgspec.json.encode(some),
            )
            self._rows.append((events_key(self.last_number + 1), encode_events(row)))
            self.last_number += len(some)
        self.recorded.set()

    def take_rows(self) -> list[RowChange]:
        """The rows of events recorded since the last call, for the batch of their changes."""
        if not self._rows:
            return []
        rows, self._rows = self._rows, []
        counter = EventCounterRecord(self.stream, self.last_number)
        return [*rows, (EVENT_COUNTER_KEY, encode_event_counter(counter))]


class _Row(NamedTuple):
    key: bytes
    last_number: int
    after: int
    events: list[Event]
    began_ms: int


class PlacedBatch(NamedTuple):
    """A batch, and the last message of the log before it."""

    batch: EventBatch
    after: int


class OutboxEvents:
    """The events of an outbox, as a relay's source (libs.events.relay.EventSource).

    Attributes:
        outbox: Makes the rows.
        position: The number of the last event that is published.
        lost_count: Always 0: rows wait for as long as it takes.
    """

    lost_count: Final = 0

    def __init__(
        self,
        outbox: EventOutbox,
        position: int,
        source: str,
        database: Database,
        durable: Callable[[], Awaitable[None]],
        write: Callable[[Sequence[RowChange]], None],
    ) -> None:
        """Begin behind `position`.

        Args:
            outbox: Makes the rows.
            position: Of the last event that has no row any more.
            source: The name of this process, in its events.
            database: Has the rows.
            durable: Waits for the newest commit that may have rows.
            write: Writes rows with the next commit; those without a value are deleted.
        """
        self.outbox = outbox
        self.position = position
        self._source = source
        self._database = database
        self._durable = durable
        self._write = write
        self._read: deque[tuple[int, bytes]] = deque()
        self._published: list[bytes] = []
        self._skipped = 0
        self._deleting: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls,
        source: str,
        database: Database,
        durable: Callable[[], Awaitable[None]],
        write: Callable[[Sequence[RowChange]], None],
        *,
        from_end: bool,
    ) -> OutboxEvents:
        """Begin at the first row, or at the end. Raises the errors of libs.storage."""
        stored = await database.get(EVENT_COUNTER_KEY)
        if stored is None:
            counter = EventCounterRecord(secrets.randbits(64))
        else:
            counter = decode_event_counter(stored)
        position = counter.last_number
        async for rows in database.scan(*events_range(0), limit=1):
            position = parse_events_key(rows[0][0]) - 1
        events = cls(EventOutbox(counter), position, source, database, durable, write)
        if from_end:
            events.skip_to_end()
        return events

    @property
    def end(self) -> int:
        """The number of the newest event."""
        return self.outbox.last_number

    @property
    def waits(self) -> bool:
        """Whether there are rows, or will be with the next commit."""
        return self.outbox.last_number > self.position

    @property
    def lag(self) -> int:
        return self.outbox.last_number - max(self.position, self._skipped)

    def save(self) -> None:
        """Delete the rows that were published with the commit that gathers."""
        if self._deleting is not None:
            self._deleting.cancel()
            self._deleting = None
        published, self._published = self._published, []
        if published:
            self._write([(key, None) for key in published])

    # --- For the relay --------------------------------------------------------

    async def batches(self) -> AsyncGenerator[EventBatch, None]:
        async with aclosing(self.batches_after()) as found:
            async for placed in found:
                yield placed.batch

    async def batches_after(self) -> AsyncGenerator[PlacedBatch, None]:
        """The batches with their places. The next is made when the last is done."""
        while True:
            self.outbox.recorded.clear()
            if not self.waits:
                await self.outbox.recorded.wait()
            last = self.outbox.last_number
            await self._durable()
            while self.position < last:
                rows = await self._rows(self.position + 1, last)
                self._read = deque((row.last_number, row.key) for row in rows)
                for some in _together(rows):
                    events = [event for row in some for event in row.events]
                    batch = EventBatch(events, some[-1].last_number, some[0].began_ms)
                    yield PlacedBatch(batch, some[0].after)
                if not rows:
                    # A damaged row counts as one event, and may have stood for more.
                    log.error("no events %d to %d: no row has them", self.position + 1, last)
                    yield PlacedBatch(EventBatch([], last, 0), 0)

    def done(self, position: int) -> None:
        self.position = position
        while self._read and self._read[0][0] <= position:
            self._published.append(self._read.popleft()[1])
        if self._deleting is None:
            self._deleting = asyncio.get_running_loop().call_later(DELETE_S, self.save)

    def skip_to_end(self) -> int:
        """Deletes the rows as it reads them."""
        count = self.lag
        self._skipped = self.outbox.last_number
        return count

    # --- Rows -----------------------------------------------------------------

    async def _rows(self, first_number: int, last_number: int) -> list[_Row]:
        span = events_range(first_number, last_number)
        found: list[_Row] = []
        async for rows in self._database.scan(*span, limit=ROWS_AT_ONCE):
            for key, value in rows:
                found.append(self._row(key, value))
                await asyncio.sleep(0)  # A row of BATCH_EVENTS takes some 3 ms.
        return found

    def _row(self, key: bytes, value: bytes) -> _Row:
        number = parse_events_key(key)
        try:
            record = decode_events(value)
            happened: list[tuple[int, dict[str, Any]]] = msgspec.json.decode(
                record.encoded, type=list[tuple[int, dict[str, Any]]]
            )
        except (CorruptRecord, msgspec.DecodeError) as error:
            log.error("no event %d: %s", number, error)
            return _Row(key, number, 0, [], 0)
        last_number = number + record.events_count - 1
        if last_number <= self._skipped:
            return _Row(key, last_number, record.after, [], 0)
        events = [
            Event(
                id=derive_event_id(at_ms, self.outbox.stream, record.event_type, place),
                type=record.event_type,
                timestamp=format_timestamp(at_ms),
                source=self._source,
                request_id=record.request_id,
                data=data,
            )
            for place, (at_ms, data) in enumerate(happened, number)
        ]
        return _Row(key, last_number, record.after, events, happened[0][0] if happened else 0)


def _together(rows: Sequence[_Row]) -> Iterator[list[_Row]]:
    """Group rows into batches of at most BATCH_EVENTS, each of one place in the log."""
    some: list[_Row] = []
    count = 0
    for row in rows:
        if some and (row.after != some[0].after or count + len(row.events) > BATCH_EVENTS):
            yield some
            some, count = [], 0
        some.append(row)
        count += len(row.events)
    if some:
        yield some
