"""Watching the delayed messages of a queue: what its journal has, then what comes.

Everything is read from the journal's durable rows, the newest too: a stream is a position and no
more, so it costs the same however far behind it is, and can be taken up again anywhere.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import struct
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from libs.storage.buckets import MAX_ORDER, order_of, split_order
from libs.storage.delayed_records import DelayedMessage, decode_delayed
from libs.storage.ids import shard_of
from libs.storage.own_keys import delayed_range, parse_delayed_key
from libs.storage.slate import Database
from services.broker.owner import ShardOwner
from services.broker.payloads import Ingests
from services.broker.queue_machine import Queue
from slatemq.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from slatemq.v1.message_pb2 import Message

STREAMS_MAX: Final = 1000
"""Open streams at most."""

HEARTBEAT_S: Final = 10.0

PAGE_MESSAGES: Final = 1000
"""Messages in one answer at most."""

PAGE_ROWS: Final = 100
"""Rows read at once: of a thousand messages each, they have 3 MB."""

PAGE_BYTES: Final = 32 << 20
"""Messages with payloads in one answer at most, unless one alone is larger."""


class Position(NamedTuple):
    """The row from which on a stream goes on, and how many of its messages it has passed."""

    order: int
    passed: int


class Watched(NamedTuple):
    """A delayed message; its content and etag, where they were asked for and it is stored."""

    told: DelayedMessage
    message: Message | None = None
    etag: str = ""


class Update(NamedTuple):
    """What a stream sends; no messages: a heartbeat. `position` is where to go on."""

    messages: list[Watched]
    position: str


class _Page(NamedTuple):
    """Messages with the positions behind them, the position behind all, whether more is there."""

    messages: list[tuple[DelayedMessage, Position]]
    end: Position
    is_last: bool


class _Stream:
    """One that watches a queue."""

    def __init__(self, queue: Queue, position: Position) -> None:
        self.queue = queue
        self.position = position
        self.wake = asyncio.Event()


class DelayedWatches:
    """All open streams of a broker."""

    def __init__(
        self,
        owner: ShardOwner,
        database: Database,
        ingests: Ingests,
        *,
        streams_max: int = STREAMS_MAX,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """Watch the queues of this shard."""
        self._owner = owner
        self._database = database
        self._ingests = ingests
        self._streams_max = streams_max
        self._heartbeat_s = heartbeat_s
        self._streams: set[_Stream] = set()
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
            if queue.delayed.durable_order >= stream.position.order or not self._owner.owns(queue):
                stream.wake.set()

    async def watch(
        self, queue_id: str, position: str, *, with_messages: bool
    ) -> AsyncGenerator[Update, None]:
        """The messages of a queue that are delayed, in the order in which they were routed to it.

        An update comes at once, and then at least every 10 s. Raises InvalidArgument, NotFound,
        ResourceExhausted, and Unavailable where the watch is to be begun again.
        """
        queue = await self._owner.find(queue_id)
        begin = decode_position(queue_id, position) if position else _beginning(queue)
        if len(self._streams) >= self._streams_max:
            raise ResourceExhausted("too many open streams", reason="TOO_MANY_STREAMS")
        stream = _Stream(queue, begin)
        self._streams.add(stream)
        try:
            async for update in self._follow(stream, with_messages):
                yield update
        finally:
            self._streams.discard(stream)

    async def _follow(self, stream: _Stream, with_messages: bool) -> AsyncGenerator[Update, None]:
        loop = asyncio.get_running_loop()
        sent_s = -math.inf
        while True:
            stream.wake.clear()
            await self._check(stream)
            page = await self._page(stream.queue, stream.position)
            messages, end = await self._filled(page, with_messages)
            stream.position = end
            if messages or loop.time() - sent_s >= self._heartbeat_s:
                sent_s = loop.time()
                yield Update(messages, encode_position(stream.queue.queue_id, end))
            if page.is_last and end == page.end:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(sent_s + self._heartbeat_s):
                        await stream.wake.wait()

    async def _check(self, stream: _Stream) -> None:
        if self._closed:
            raise Unavailable("the broker is stopping", reason="DRAINING")
        queue = stream.queue
        if not self._owner.owns(queue):
            await self._owner.durable()
            raise NotFound("queue", queue.queue_id)
        if split_order(stream.position.order).epoch != queue.lane_epoch:
            # The queue was purged or made anew: what comes next is at the new epoch's beginning.
            await self._owner.durable()
            stream.position = _beginning(queue)

    # --- The journal --------------------------------------------------------

    async def _page(self, queue: Queue, position: Position) -> _Page:
        """What is durable from a position on, as far as it is not visible yet."""
        begins = position == _beginning(queue)
        first = queue.delayed.first_in(queue.lane_epoch) if begins else position.order
        # What the store calls durable may not be on the disk yet.
        last = queue.delayed.durable_in(queue.lane_epoch)
        now_ms = self._owner.clock.now_ms()
        found: list[tuple[DelayedMessage, Position]] = []
        count, end = 0, position
        if first > last:
            return _Page(found, end, is_last=True)
        span = delayed_range(queue.queue_id, first, last)
        async for rows in self._database.scan(*span, limit=PAGE_ROWS, durable=True):
            for key, value in rows:
                order = parse_delayed_key(key).bucket or 0
                if begins and not count:
                    queue.delayed.first_order = order  # what was before it is gone for ever
                count += 1
                for passed, told in enumerate(decode_delayed(value), 1):
                    if order == position.order and passed <= position.passed:
                        continue
                    end = Position(order, passed)
                    if is_delayed(told, now_ms):
                        found.append((told, end))
                    if len(found) == PAGE_MESSAGES:
                        return _Page(found, end, is_last=False)
                end = Position(order + 1, 0)
                await asyncio.sleep(0)  # a row may have a thousand messages
        return _Page(found, end, is_last=count < PAGE_ROWS)

    # --- Messages -----------------------------------------------------------

    async def _filled(self, page: _Page, with_messages: bool) -> tuple[list[Watched], Position]:
        """The messages of a page, or the first of them, and the position behind them."""
        if not with_messages or not page.messages:
            return [Watched(told) for told, _ in page.messages], page.end
        by_shard: dict[int, list[int]] = {}
        for told, _ in page.messages:
            by_shard.setdefault(shard_of(told.message_id), []).append(told.message_id)
        answers = await asyncio.gather(
            *(self._ingests.read_with_etags(shard, ids) for shard, ids in by_shard.items())
        )
        contents = {
            message.message_id: (message, etag)
            for answer in answers
            for message, etag in zip(answer.messages, answer.etags, strict=True)
        }
        gone = {message_id for answer in answers for message_id in answer.missing_ids}
        now_ms = self._owner.clock.now_ms()
        filled = list(_fitting(page.messages, contents, gone))
        if not filled:
            raise Unavailable("an ingest gave no message", reason="INGEST_AWAY")
        all_fit = len(filled) == len(page.messages)
        end = page.end if all_fit else page.messages[len(filled) - 1][1]
        return [one for one in filled if is_delayed(one.told, now_ms)], end


def _beginning(queue: Queue) -> Position:
    return Position(order_of(queue.lane_epoch, 0, 0), 0)


def _fitting(
    messages: Sequence[tuple[DelayedMessage, Position]],
    contents: dict[int, tuple[Message, str]],
    gone: set[int],
) -> Iterator[Watched]:
    """Those before the first one that did not come, or no longer fits into an answer."""
    bytes_left = PAGE_BYTES
    for number, (told, _) in enumerate(messages):
        message, etag = contents.get(told.message_id, (None, ""))
        if message is None and told.message_id not in gone:
            return
        bytes_left -= message.ByteSize() if message is not None else 0
        if number and bytes_left < 0:
            return
        yield Watched(told, message, etag)


def is_delayed(told: DelayedMessage, now_ms: int) -> bool:
    """Whether a message of the journal cannot be claimed yet, and will be."""
    ends_ms = told.retention_deadline_ms
    return told.visible_at_ms > now_ms and not 0 < ends_ms <= now_ms


# --- Positions --------------------------------------------------------------

_POSITION: Final = struct.Struct(">QI")
_DIGEST_BYTES: Final = 6


def encode_position(queue_id: str, position: Position) -> str:
    """The position as those who watch keep it: 24 characters."""
    data = _POSITION.pack(*position)
    return base64.urlsafe_b64encode(_digest(queue_id, data) + data).decode()


def decode_position(queue_id: str, text: str) -> Position:
    """The inverse; InvalidArgument for what was not given for this queue."""
    try:
        data = base64.b64decode(text, altchars=b"-_", validate=True)
        position = Position(*_POSITION.unpack(data[_DIGEST_BYTES:]))
        if encode_position(queue_id, position) == text and position.order <= MAX_ORDER:
            return position
    except (ValueError, struct.error):
        pass
    raise InvalidArgument(
        "position", "is not one that WatchDelayed gave for this queue", reason="INVALID_POSITION"
    )


def _digest(queue_id: str, data: bytes) -> bytes:
    # No secret: it tells a position of this queue from what somebody mistyped or mixed up.
    told = queue_id.encode() + data
    return hashlib.blake2s(told, digest_size=_DIGEST_BYTES, person=b"Watch").digest()
