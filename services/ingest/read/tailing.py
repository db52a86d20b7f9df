"""The metadata log, followed: recent entries from memory, older ones from the database.

::

    database                    ......|======================|   durable
    recent, in memory                         (floor, durable]
    a tailer behind the floor   reads the database up to durable, then looks again
    a tailer at the floor on    reads memory, then waits for the next commit

Everything above the floor is in memory, and the floor only rises to positions that are durable, so
a tailer that changes from one to the other neither misses an entry nor sees one twice.

Entries are rewritten, and removed, when messages in them are changed or purged. A tailer that reads
such an entry from the database waits until the change is synced. The log's end stays where it was
when the last entry goes.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Final, NamedTuple

from libs.access.principals import PLACE_RETRY_MS
from libs.storage.database.log_positions import position_before
from libs.storage.database.slate import Database
from libs.storage.errors import StorageError
from libs.storage.layout.ids import MAX_SEQUENCE, message_id
from libs.storage.layout.keys import log_range, parse_log_key
from libs.storage.layout.own_keys import LOG_BOUNDS_KEY
from libs.storage.records.log_bounds import LogBoundsRecord, decode_log_bounds
from libs.storage.records.metadata import (
    last_message_id,
    read_log_entry_head,
)
from services.ingest.read.entries import entry_before
from slatemq.errors import InvalidArgument, ResourceExhausted, Unavailable

UPDATE_BYTES_MAX: Final = 4 << 20
"""Encoded entries in one answer, unless one entry alone has more."""

READ_ROWS_MIN: Final = 8
READ_ROWS_MAX: Final = 64
"""Entries read from the database at once: a scan begins in 0.3 ms, and an entry may have 4 MiB."""


Entry = tuple[int, bytes]
"""A sequence, and the value stored there."""


class LogEnd(NamedTuple):
    """The end of the log: its last entry, with that entry's last message; 0 while it is empty."""

    sequence: int
    last_message_id: int


class Recent(NamedTuple):
    """A durable entry in memory, as it is stored."""

    sequence: int
    last_message_id: int
    value: bytes


class Update(NamedTuple):
    """What a tailer gets: entries in ascending order (none: a heartbeat), and the last message.

    An entry is its sequence and its value as it is stored (libs.storage.records.metadata).
    """

    entries: list[Entry]
    durable_sequence: int


class Unsettled(dict[int, asyncio.Future[None]]):
    """What the next commit changes or removes, by number: readers wait until that is durable."""

    def begin(self, numbers: Iterable[int]) -> None:
        """The next commit changes these; `settle` or `fail` follows."""
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.update(dict.fromkeys(numbers, settled))

    def settle(self, numbers: Iterable[int]) -> None:
        for settled in {self.pop(one) for one in numbers if one in self}:
            if not settled.done():
                settled.set_result(None)

    def fail(self, numbers: Iterable[int], error: StorageError) -> None:
        """Their commit failed: what is stored stays unknown until the process restarts."""
        for failed in {self[one] for one in numbers if one in self}:
            if not failed.done():
                failed.set_exception(error)
                failed.exception()  # there may be no waiter


async def read_log_bounds(database: Database, shard: int) -> LogBoundsRecord:
    """Where a shard's log begins and ends, entries that were purged included."""
    result = await database.get(LOG_BOUNDS_KEY)
    bounds = LogBoundsRecord() if result is None else decode_log_bounds(result)
    first, last = message_id(shard, 1), message_id(shard, MAX_SEQUENCE)
    span = log_range(max(first, bounds.first_sequence), last)
    async for rows in database.scan(*span, limit=1, descending=True):
        key, value = rows[0]
        sequence = parse_log_key(key)
        if sequence >= bounds.last_sequence:
            last_id = max(last_message_id(value), bounds.last_message_id)
            bounds = bounds._replace(last_sequence=sequence, last_message_id=last_id)
    return bounds


class MetadataLog:
    """The durable log of one shard.

    Attributes:
        end: Where it ends.
        streams_count: Tailers.
        rewriting: Entries that the next commit rewrites or removes; `rewritten` follows.
        rewrites_count: How often `rewritten` was called: as before, no entry has changed since.
    """

    def __init__(
        self,
        database: Database,
        bounds: LogBoundsRecord,
        *,
        bytes_max: int,
        streams_max: int,
        heartbeat_ms: int,
    ) -> None:
        """Keep `bytes_max` of entries in memory; admit `streams_max` tailers."""
        self.end = LogEnd(bounds.last_sequence, bounds.last_message_id)
        self.streams_count = 0
        self.rewrites_count = 0
        self._first = bounds.first_sequence
        self._database = database
        self._bytes_max = bytes_max
        self._streams_max = streams_max
        self._heartbeat_s = heartbeat_ms / 1000
        self._floor = self.end.sequence
        self._sequences: list[int] = []
        self._recent: list[Recent] = []
        self.size_bytes = 0
        self._closed = False
        self._waiting: dict[asyncio.Future[None], None] = {}
        self.rewriting = Unsettled()

    @property
    def bounds(self) -> LogBoundsRecord:
        """The record to store with every removal."""
        return LogBoundsRecord(self._first, *self.end)

    def append(self, entries: list[Recent]) -> None:
        """Add entries that have just become durable, and wake the tailers."""
        for recent in entries:
            self._sequences.append(recent.sequence)
            self._recent.append(recent)
            self.size_bytes += len(recent.value)
        self.end = LogEnd(entries[-1].sequence, entries[-1].last_message_id)
        self._evict()
        self._wake()

    # --- Entries that change --------------------------------------------------

    def rewritten(self, entries: Mapping[int, bytes | None]) -> None:
        """The commit is durable: these entries have changed; None stands for a removed one."""
        self.rewrites_count += 1
        removed: list[int] = []
        for sequence, value in sorted(entries.items()):
            at = bisect_right(self._sequences, sequence) - 1
            if at >= 0 and self._sequences[at] == sequence:
                before = self._recent[at]
                self.size_bytes -= len(before.value)
                if value is None:
                    removed.append(at)
                else:
                    self.size_bytes += len(value)
                    # Its last messages may be gone: a reader behind what is left is past it.
                    self._recent[at] = Recent(sequence, last_message_id(value), value)
        self._drop(removed)
        self._evict()
        self.rewriting.settle(entries)

    def _drop(self, places: list[int]) -> None:
        """Drop these ascending places, neighbours together, since each cut moves the rest."""
        while places:
            end = places.pop() + 1
            start = end - 1
            while places and places[-1] == start - 1:
                start = places.pop()
            del self._sequences[start:end], self._recent[start:end]

    async def _settled(self, first: int, last: int) -> None:
        """Wait until what the database returned of these entries is durable."""
        if self.rewriting:
            for settled in {v for k, v in self.rewriting.items() if first <= k <= last}:
                await asyncio.shield(settled)

    async def look_for_first(self) -> None:
        """Find the first entry that is left; reads skip those removed before it from now on."""
        end = self.end.sequence
        first = end + 1
        async for rows in self._database.scan(*log_range(self._first, end), limit=1, durable=True):
            first = parse_log_key(rows[0][0])
        self._first = max(self._first, first)

    # --- Reading --------------------------------------------------------------

    def close(self) -> None:
        self._closed = True
        self._wake()

    def recent(self, message_id: int) -> Recent | None:
        """The entry in memory whose range has this ID."""
        at = bisect_right(self._sequences, message_id) - 1
        if at < 0 or message_id > self._recent[at].last_message_id:
            return None
        return self._recent[at]

    async def received_at_ms(self, message_id: int) -> int:
        """When this message was received; 0 when it is not in the log."""
        row = await entry_before(self._database, message_id)
        if row is None or message_id > last_message_id(row[1]):
            return 0
        return read_log_entry_head(row[1])[1]

    async def position_before(self, received_at_ms: int) -> int:
        """The last message received before this time; 0 when there is none."""
        end = self.end.sequence
        sequence = await position_before(self._database, end, received_at_ms, self._first)
        row = await entry_before(self._database, sequence) if sequence else None
        # All messages of an entry are received at the same time. One that has gone stands for none.
        return sequence if row is None or row[0] != sequence else last_message_id(row[1])

    async def tail(
        self, after_sequence: int, bytes_max: Callable[[], int] = lambda: UPDATE_BYTES_MAX
    ) -> AsyncGenerator[Update, None]:
        """Every entry that has messages after this one, in order, each once, without end.

        Begins with an update at once, if only a heartbeat. `bytes_max` gives what the next update
        may have, unless one entry alone has more; it is called when that is made. Raises
        InvalidArgument, ResourceExhausted, and Unavailable once the log is closed.
        """
        end = self.end.last_message_id
        if not 0 <= after_sequence <= end:
            raise InvalidArgument("after_sequence", f"must be within 0..{end}, the end of the log")
        if self.streams_count >= self._streams_max:
            raise ResourceExhausted(
                f"{self._streams_max} streams are open",
                reason="TOO_MANY_STREAMS",
                retry_after_ms=PLACE_RETRY_MS,
            )
        self.streams_count += 1
        try:
            position = await self._before_entry_of(after_sequence)
            async for update in self._follow(position, bytes_max):
                yield update
        finally:
            self.streams_count -= 1

    async def _before_entry_of(self, position: int) -> int:
        """The position, or the one before its entry where it is inside an entry."""
        at = bisect_right(self._sequences, position) - 1
        if at >= 0:
            sequence, last_id, _ = self._recent[at]
        else:
            row = await entry_before(self._database, position) if position else None
            if row is None:
                return position
            sequence, last_id = row[0], last_message_id(row[1])
        return sequence - 1 if position < last_id else position

    async def _follow(
        self, position: int, bytes_max: Callable[[], int]
    ) -> AsyncGenerator[Update, None]:
        fresh, rows = True, READ_ROWS_MIN
        while True:
            if self._closed:
                raise Unavailable("the service is stopping", reason="DRAINING")
            # From before any wait: an update without entries says that none is left up to there.
            end = self.end
            if position < self._floor:
                most = min(UPDATE_BYTES_MAX, bytes_max())
                position, entries, size_bytes = await self._read(position, end.sequence, rows, most)
                rows = _next_rows(rows, size_bytes, most)
            elif position < end.sequence:
                most = min(UPDATE_BYTES_MAX, bytes_max())
                position, entries = self._take(position, most)
            elif fresh or not await self._wait_for_entries():
                entries = []
            else:
                continue
            fresh = False
            yield Update(entries, end.last_message_id)

    def _take(self, position: int, bytes_max: int) -> tuple[int, list[Entry]]:
        first = at = bisect_right(self._sequences, position)
        size_bytes = 0
        while at < len(self._recent):
            size_bytes += len(self._recent[at].value)
            if at > first and size_bytes > bytes_max:
                break
            at += 1
        entries = [(recent.sequence, recent.value) for recent in self._recent[first:at]]
        # With none left, what stood between here and the end has been removed.
        return entries[-1][0] if entries else self.end.sequence, entries

    async def _read(
        self, position: int, durable: int, rows_max: int, bytes_max: int
    ) -> tuple[int, list[Entry], int]:
        """Returns the position after them, the next entries, and their size."""
        first = max(position + 1, self._first)
        span = log_range(first, durable)
        entries: list[Entry] = []
        size_bytes = 0
        async for rows in self._database.scan(*span, limit=rows_max, durable=True):
            for key, value in rows:
                size_bytes += len(value)
                if entries and size_bytes > bytes_max:
                    break
                position = parse_log_key(key)
                entries.append((position, value))
        if not entries:
            position = durable  # what stood between here and the end has been removed
        await self._settled(first, position)
        return position, entries, size_bytes

    async def _wait_for_entries(self) -> bool:
        """Wait for the next commit; False when a heartbeat is due."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[woken] = None
        try:
            async with asyncio.timeout(self._heartbeat_s):
                await woken
        except TimeoutError:
            return False
        finally:
            self._waiting.pop(woken, None)
        return True

    def _wake(self) -> None:
        for woken in self._waiting:
            if not woken.done():
                woken.set_result(None)
        self._waiting.clear()

    def _evict(self) -> None:
        if self.size_bytes <= self._bytes_max:
            return
        count = 0
        # An eighth more than needed, so that the lists are not cut at every commit.
        while self.size_bytes > self._bytes_max - self._bytes_max // 8:
            self.size_bytes -= len(self._recent[count].value)
            self._floor = self._recent[count].sequence
            count += 1
        del self._recent[:count], self._sequences[:count]


def _next_rows(rows: int, size_bytes: int, bytes_max: int) -> int:
    if size_bytes > bytes_max:
        return max(READ_ROWS_MIN, rows // 2)
    return min(READ_ROWS_MAX, rows * 2)
