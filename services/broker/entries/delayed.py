"""The journals of delayed messages: watched, and cleaned of what can be claimed.

A watch reads what the journal has, then what comes. Everything is read from its durable rows, the
newest too: a stream is a position and no more, so it costs the same however far behind it is, and
can be taken up again anywhere.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import math
import struct
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Final, NamedTuple

from libs.access.current import caller_name, caller_quota, require
from libs.serving.requests.shares import Shares
from libs.storage.database.slate import Database
from libs.storage.errors import StoreUnavailable
from libs.storage.layout.buckets import MAX_ORDER, last_order, order_of, split_order
from libs.storage.layout.own_keys import MINUTE_MS, delayed_range, parse_delayed_key
from libs.storage.layout.primitives import Row
from libs.storage.records.delayed_records import DelayedMessage, decode_delayed
from services.broker.core.queue import Queue
from services.broker.entries.conversion import WITH_MESSAGE, EntryReader, View, delayed_entry
from services.broker.shard.owner import ShardOwner
from slatemq.errors import InvalidArgument, Unavailable
from slatemq.v1 import entry_pb2

log = logging.getLogger(__name__)


STREAMS_MAX: Final = 1000
"""Open streams at most."""

HEARTBEAT_S: Final = 10.0

PAGE_MESSAGES: Final = 1000
"""Messages in one answer at most."""

PAGE_ROWS: Final = 100
"""Rows in one read: of a thousand messages each, they have 3 MB."""

LOOK_S: Final = 1.0
"""How often to look whether a minute is over."""

CLEANED_ROWS: Final = 100
"""Rows in one read."""

CLEANED_QUEUES: Final = 100
"""Queues looked at in one go: most of them have no rows."""

CLEANED_AT_ONCE: Final = 1000
"""Rows removed with one commit, of all queues together: a commit for each would cost too much."""


class WatchPosition(NamedTuple):
    """The row from which on a stream goes on, and how many of its messages it has passed."""

    order: int
    passed: int


class _Page(NamedTuple):
    """Messages with the positions behind them, the position behind all, whether more is there."""

    messages: list[tuple[DelayedMessage, WatchPosition]]
    end: WatchPosition
    is_last: bool


class _Stream:
    def __init__(self, queue: Queue, position: WatchPosition) -> None:
        self.queue = queue
        self.position = position
        self.wake = asyncio.Event()


class DelayedWatches:
    def __init__(
        self,
        owner: ShardOwner,
        database: Database,
        reader: EntryReader,
        *,
        streams_max: int = STREAMS_MAX,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._owner = owner
        self._database = database
        self._reader = reader
        self._heartbeat_s = heartbeat_s
        self._streams: dict[_Stream, None] = {}
        self._shares = Shares(
            "delayed_watches",
            streams_max,
            "watches of delayed messages open",
            ("TOO_MANY_STREAMS", "too many open streams"),
        )
        self._closed = False
        owner.commits.on_durable(self._durable)

    def drain(self) -> None:
        """Ends all streams, and any that begins from now on."""
        self._closed = True
        for stream in self._streams:
            stream.wake.set()

    def _durable(self, _: int) -> None:
        for stream in self._streams:
            queue = stream.queue
            if queue.waiting.delayed.durable_order >= stream.position.order or not self._owner.owns(
                queue
            ):
                stream.wake.set()

    async def watch(
        self, queue_id: str, position: str, view: View
    ) -> AsyncGenerator[entry_pb2.WatchDelayedResponse, None]:
        """The messages of a queue that are delayed, in the order in which they were routed to it.

        The first response comes immediately, then one at least every 10 s. Each counts for the
        budget of deliveries until the next is asked for. Raises InvalidArgument, NotFound,
        ResourceExhausted, and Unavailable where the watch must be begun again.
        """
        queue = await self._owner.find(queue_id)
        begin = decode_position(queue_id, position) if position else _beginning(queue)
        stream, principal = _Stream(queue, begin), caller_name()
        with self._shares.place(caller_quota()):
            self._streams[stream] = None
            sent_s, loop = -math.inf, asyncio.get_running_loop()
            try:
                while True:
                    stream.wake.clear()
                    await self._check(stream)
                    page = await self._page(queue, stream.position)
                    answers, end, held_bytes = await self._filled(queue, page, view, principal)
                    stream.position = end
                    try:
                        if answers[0].entries or loop.time() - sent_s >= self._heartbeat_s:
                            sent_s = loop.time()
                            yield answers.pop()
                    finally:
                        self._reader.release(held_bytes, principal)
                    if page.is_last and end == page.end:
                        with suppress(TimeoutError):
                            async with asyncio.timeout_at(sent_s + self._heartbeat_s):
                                await stream.wake.wait()
            finally:
                self._streams.pop(stream, None)

    async def _check(self, stream: _Stream) -> None:
        if self._closed:
            raise Unavailable("the broker is stopping", reason="DRAINING")
        queue = stream.queue
        require("inspect", queue.queue_id)  # The policy may have changed since the start.
        if not self._owner.owns(queue):
            absence = self._owner.shard.absence(queue.queue_id)
            await self._owner.confirm(absence)
            raise absence
        if split_order(stream.position.order).epoch != queue.waiting.epoch:
            # The queue was purged or re-created: what comes next is at the new epoch's beginning.
            await self._owner.durable()
            stream.position = _beginning(queue)

    # --- The journal --------------------------------------------------------

    async def _page(self, queue: Queue, position: WatchPosition) -> _Page:
        """What is durable from a position on, as far as it is not visible yet."""
        begins = position == _beginning(queue)
        first = queue.waiting.delayed.first_in(queue.waiting.epoch) if begins else position.order
        # What the store calls durable may not be on the disk yet.
        last = queue.waiting.delayed.durable_in(queue.waiting.epoch)
        now_ms = self._owner.clock.now_ms()
        found: list[tuple[DelayedMessage, WatchPosition]] = []
        count, end = 0, position
        if first > last:
            return _Page(found, end, is_last=True)
        span = delayed_range(queue.queue_id, first, last)
        async for rows in self._database.scan(*span, limit=PAGE_ROWS, durable=True):
            for key, value in rows:
                order = parse_delayed_key(key).bucket
                if begins and not count:
                    queue.waiting.delayed.first_order = order  # what was before it is gone for ever
                count += 1
                for passed, item in enumerate(decode_delayed(value), 1):
                    if order == position.order and passed <= position.passed:
                        continue
                    end = WatchPosition(order, passed)
                    if is_delayed(item, now_ms):
                        found.append((item, end))
                    if len(found) == PAGE_MESSAGES:
                        return _Page(found, end, is_last=False)
                end = WatchPosition(order + 1, 0)
                await asyncio.sleep(0)  # a row may have a thousand messages
        return _Page(found, end, is_last=count < PAGE_ROWS)

    # --- Messages -----------------------------------------------------------

    async def _filled(
        self, queue: Queue, page: _Page, view: View, principal: str
    ) -> tuple[list[entry_pb2.WatchDelayedResponse], WatchPosition, int]:
        """An answer with the first entries of a page, the position behind them, bytes held.

        The answer is in a list, out of which it is taken: nothing else may keep it.
        """
        entries = [delayed_entry(queue, message) for message, _ in page.messages]
        end, held_bytes = page.end, 0
        if view in WITH_MESSAGE and entries:
            count, held_bytes = await self._reader.add_messages(entries, view, principal)
            if not count:
                raise Unavailable("an ingest gave no message", reason="INGEST_DOWN")
            if count < len(entries):
                end = page.messages[count - 1][1]
                del entries[count:]
        now_ms = self._owner.clock.now_ms()  # It may have taken long to read.
        answer = entry_pb2.WatchDelayedResponse(
            entries=(one for one in entries if is_delayed(one, now_ms)),
            position=encode_position(queue.queue_id, end),
        )
        return [answer], end, held_bytes


def _beginning(queue: Queue) -> WatchPosition:
    return WatchPosition(order_of(queue.waiting.epoch, 0, 0), 0)


# --- Positions --------------------------------------------------------------

_POSITION: Final = struct.Struct(">QI")
_DIGEST_BYTES: Final = 6


def encode_position(queue_id: str, position: WatchPosition) -> str:
    """The position as watchers keep it: 24 characters."""
    data = _POSITION.pack(*position)
    return base64.urlsafe_b64encode(_digest(queue_id, data) + data).decode()


def decode_position(queue_id: str, text: str) -> WatchPosition:
    """The inverse; InvalidArgument for a position that is not of this queue."""
    try:
        data = base64.b64decode(text, altchars=b"-_", validate=True)
        position = WatchPosition(*_POSITION.unpack(data[_DIGEST_BYTES:]))
        if encode_position(queue_id, position) == text and position.order <= MAX_ORDER:
            return position
    except (ValueError, struct.error):
        pass
    raise InvalidArgument(
        "position", "was not returned by WatchDelayed for this queue", reason="INVALID_POSITION"
    )


def _digest(queue_id: str, data: bytes) -> bytes:
    # Not a secret: it detects positions of other queues and typing errors.
    encode = queue_id.encode() + data
    return hashlib.blake2s(encode, digest_size=_DIGEST_BYTES, person=b"Watch").digest()


class DelayedCleaner:
    """Removes the rows of the journals whose messages can all be claimed.

    A row is looked at when it is 1, 2, 4, 8 … minutes old, until it is removed: the rows of such an
    age lie side by side, since their orders are times. So a row whose messages wait for a hundred
    years is read some 26 times, holds nothing up, and no row outlives its last message by more than
    the time that this one waited. Nothing is kept in memory for it.
    """

    def __init__(self, owner: ShardOwner, database: Database, last_ms: int) -> None:
        """Go on after the time of the last commit before the start."""
        self._owner = owner
        self._database = database
        self._minute = last_ms // MINUTE_MS
        self._over: list[tuple[Queue, int, bytes]] = []

    async def run(self) -> None:
        """Cleans once a minute until cancelled."""
        while True:
            try:
                await self.clean()
            except StoreUnavailable as error:
                log.warning("the journals of delayed messages cannot be cleaned now: %s", error)
            await asyncio.sleep(LOOK_S)

    async def clean(self) -> None:
        """Looks at the rows whose age was reached since the last call."""
        minute = self._owner.clock.now_ms() // MINUTE_MS
        if minute <= self._minute:
            return
        # The greatest power of two of which a multiple has passed; rows of every lower one, too.
        level = (minute ^ self._minute).bit_length() - 1
        begin_ms = max((minute >> level << level) - (2 << level), 0) * MINUTE_MS
        for number, queue in enumerate(list(self._owner.shard.queues.values())):
            await self._clean_queue(queue, begin_ms, (minute - 1) * MINUTE_MS)
            if number % CLEANED_QUEUES == 0:
                await asyncio.sleep(0)
        await self._remove()
        self._minute = minute

    async def _clean_queue(self, queue: Queue, begin_ms: int, end_ms: int) -> None:
        """Looks at the rows of a queue that were written from one time up to another."""
        if not queue.waiting.delayed.last_order:
            await self._find_last(queue)
        epoch = queue.waiting.epoch
        first, last = order_of(epoch, begin_ms, 0), order_of(epoch, end_ms, 0) - 1
        while first <= min(last, queue.waiting.delayed.last_in(epoch)):
            rows = await self._rows(queue, first, last, descending=False)
            for key, value in rows:
                first = parse_delayed_key(key).bucket + 1
                if self._is_over(value):
                    self._over.append((queue, epoch, key))
                await asyncio.sleep(0)  # a row may have a thousand messages
            if len(self._over) >= CLEANED_AT_ONCE:
                await self._remove()
            if len(rows) < CLEANED_ROWS:
                return

    async def _find_last(self, queue: Queue) -> None:
        """After a start: where the journal ends, since most queues have none."""
        epoch = queue.waiting.epoch
        first, last = order_of(epoch, 0, 0), last_order(epoch)
        rows = await self._rows(queue, first, last, descending=True)
        if rows:
            queue.waiting.delayed.found(parse_delayed_key(rows[0][0]).bucket)
        else:
            queue.waiting.delayed.begin(epoch)

    async def _rows(self, queue: Queue, first: int, last: int, *, descending: bool) -> list[Row]:
        span = delayed_range(queue.queue_id, first, last)
        limit = 1 if descending else CLEANED_ROWS
        found: list[Row] = []
        async for rows in self._database.scan(*span, limit=limit, descending=descending):
            found += rows
        return found

    def _is_over(self, value: bytes) -> bool:
        now_ms = self._owner.clock.now_ms()
        return not any(is_delayed(delayed, now_ms) for delayed in decode_delayed(value))

    async def _remove(self) -> None:
        over, self._over = self._over, []

        def remove(_: int) -> None:
            # What was deleted or purged meanwhile is the sweeper's.
            self._owner.shard.write_rows(
                (key, None)
                for queue, epoch, key in over
                if self._owner.owns(queue) and queue.waiting.epoch == epoch
            )

        if over:
            await self._owner.run(remove)
            await self._owner.durable()


def is_delayed(entry: DelayedMessage | entry_pb2.Entry, now_ms: int) -> bool:
    """Whether a message of the journal cannot be claimed yet, and will be."""
    ends_ms = entry.retention_deadline_ms
    return entry.visible_at_ms > now_ms and not 0 < ends_ms <= now_ms
