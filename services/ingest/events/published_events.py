"""The events `message.published` of a shard: its metadata log, read behind a durable cursor.

The log has what is committed, and nothing else. So an event stands for a message that is durable,
and each message's event comes, in the order of the log, whatever ends this process when: the cursor
only follows. The ID of an event is derived from its message, and so is the same when it comes
again.

With the backend `slatemq`, messages that carry its events or tasks are passed over: each event
would make another. With other backends these headers mean nothing.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import aclosing
from typing import Final, NamedTuple

from libs.events.relay import BATCH_EVENTS, EventBatch
from libs.events.slatemq.headers import BACKEND_HEADERS
from libs.storage.errors import CorruptRecord
from libs.storage.layout.ids import message_id
from libs.storage.layout.own_keys import EVENT_CURSOR_KEY
from libs.storage.records.event_records import (
    EventCursorRecord,
    decode_event_cursor,
    encode_event_cursor,
)
from libs.storage.records.log_bounds import LogIds
from libs.storage.records.metadata import read_log_runs
from services.ingest.shard import Shard
from slatemq.events.catalogue import MessagePublished, make_event
from slatemq.events.envelope import Event, derive_event_id, format_timestamp

log = logging.getLogger(__name__)

CURSOR_S: Final = 1.0
"""How long the cursor may stay behind: so much comes again after a crash, and where each commit is
a paid request, an idle shard makes one in so long."""

STEP_EVENTS: Final = 16
"""Events made in one step of the event loop, 0.3 ms: publishes are answered between them."""

HEADERS_BYTES_MAX: Final = 128 << 10
"""Headers in an event: escaped as JSON they may take six times as much, and Kafka's brokers take
1 MiB."""

_TRACE: Final = re.compile("[0-9a-f]{2}-([0-9a-f]{32})-", re.ASCII)
"""A trace context as W3C writes it, up to the ID of the trace."""


class _Logged(NamedTuple):
    message_id: int
    received_at_ms: int
    visible_at_ms: int
    headers: dict[str, str]
    payload_bytes: int


class PublishedEvents:
    """What a relay publishes of one shard.

    Attributes:
        lost_count: Messages purged before their events were published, since the first cursor.
    """

    def __init__(
        self,
        shard: Shard,
        number: int,
        source: str,
        cursor: EventCursorRecord,
        own_headers: Collection[str],
    ) -> None:
        """Go on behind this cursor, in the log of shard `number`."""
        self.lost_count = cursor.lost_count
        self._shard = shard
        self._first_id = message_id(number, 1)
        self._source = source
        self._own_headers = own_headers
        self._stream = cursor.stream
        self.position = cursor.message_id
        self._saved = cursor
        self._saving: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls, shard: Shard, number: int, source: str, backend: str, *, from_end: bool
    ) -> PublishedEvents:
        """Where the cursor stands; at the end of the log for the first time, or when asked to.

        `backend` is the name of the one that gets the events.
        Durable on return, so that the first event has its ID for ever. Raises the errors of
        libs.storage.
        """
        stored = await shard.database.get(EVENT_CURSOR_KEY)
        end = shard.log.end.last_message_id
        if stored is None:
            cursor = EventCursorRecord(secrets.randbits(64), end)
        else:
            cursor = decode_event_cursor(stored)
            if from_end:
                cursor = cursor._replace(message_id=end)
        own_headers = BACKEND_HEADERS if backend == "slatemq" else ()
        events = cls(shard, number, source, cursor, own_headers)
        events._put(cursor)
        await shard.publisher.commits.durable()
        return events

    @property
    def end(self) -> int:
        return self._shard.log.end.last_message_id

    @property
    def lag(self) -> int:
        """How many messages of the log are behind it."""
        ids = LogIds(self._first_id, self._shard.gaps.gaps)
        return ids.count(self.position, self._shard.log.end.last_message_id)

    def lose(self, count: int) -> None:
        """Messages that have no event yet are purged."""
        self.lost_count += count
        log.warning(
            "%d messages were purged before their events could be published: the backend was down "
            "for longer than events_hold_s",
            count,
        )
        self._save_soon()

    def save(self) -> None:
        """Put the cursor into the commit that gathers, if it has moved."""
        if self._saving is not None:
            self._saving.cancel()
            self._saving = None
        cursor = EventCursorRecord(self._stream, self.position, self.lost_count)
        if cursor != self._saved:
            self._put(cursor)

    # --- For the relay --------------------------------------------------------

    async def batches(self) -> AsyncGenerator[EventBatch, None]:
        """See EventSource. Raises Unavailable once the log is closed, and as MetadataLog.tail."""
        async with aclosing(self._shard.log.tail(self.position)) as updates:
            async for update in updates:
                for sequence, value in update.entries:
                    async with aclosing(self._batches_of(sequence, value)) as batches:
                        async for batch in batches:
                            yield batch
                if not update.entries and self.position < update.durable_sequence:
                    # What stood there is gone.
                    yield EventBatch([], update.durable_sequence, 0)

    def done(self, position: int) -> None:
        self.position = position
        self._save_soon()

    def skip_to_end(self) -> int:
        count = self.lag
        self.done(self._shard.log.end.last_message_id)
        return count

    # --- Making events --------------------------------------------------------

    async def _batches_of(self, sequence: int, value: bytes) -> AsyncGenerator[EventBatch, None]:
        events: list[Event] = []
        began_ms = last = 0
        try:
            for logged in _messages_of(value):
                last = logged.message_id
                if last <= self.position or self._is_of_backend(logged.headers):
                    continue
                began_ms = began_ms or logged.received_at_ms
                events.append(self._event_of(logged))
                if len(events) == BATCH_EVENTS:
                    yield EventBatch(events, last, began_ms)
                    events = []
                elif len(events) % STEP_EVENTS == 0:
                    await asyncio.sleep(0)
        except CorruptRecord as error:
            log.error("no events of the log entry %d: %s", sequence, error)
        last = max(last, sequence)
        if last > self.position:
            yield EventBatch(events, last, began_ms)

    def _is_of_backend(self, headers: dict[str, str]) -> bool:
        return any(name in headers for name in self._own_headers)

    def _event_of(self, logged: _Logged) -> Event:
        headers = logged.headers
        fits = sum(len(key) + len(value) for key, value in headers.items()) <= HEADERS_BYTES_MAX
        data = MessagePublished(
            message_id=logged.message_id,
            headers=headers if fits else {},
            size=logged.payload_bytes,
            visible_at=format_timestamp(logged.visible_at_ms) if logged.visible_at_ms else "",
            headers_omitted=not fits,
        )
        return make_event(
            data,
            source=self._source,
            request_id=_trace_of(headers),
            at_ms=logged.received_at_ms,
            event_id=derive_event_id(
                logged.received_at_ms, self._stream, data.event_type, logged.message_id
            ),
        )

    # --- The cursor -----------------------------------------------------------

    def _save_soon(self) -> None:
        if self._saving is None:
            self._saving = asyncio.get_running_loop().call_later(CURSOR_S, self.save)

    def _put(self, cursor: EventCursorRecord) -> None:
        self._saved = cursor
        self._shard.publisher.put([(EVENT_CURSOR_KEY, encode_event_cursor(cursor))])


def _trace_of(headers: dict[str, str]) -> str:
    """The ID of the trace in which a message was published; empty where it has none."""
    found = _TRACE.match(headers.get("traceparent", ""))
    return found[1] if found is not None else ""


def _messages_of(value: bytes) -> Iterator[_Logged]:
    for (first_id, _, received, visible, _), headers, delay, sizes, _ in read_log_runs(value):
        visible_at = visible or (received + delay if delay > 0 else 0)
        for number, size in enumerate(sizes, first_id):
            yield _Logged(number, received, visible_at, headers, size)
