"""Log entries: found by the IDs of their messages, decoded, and cut into parts.

An entry stands under the ID that its first message had at the commit, and a commit's IDs follow one
another. So the entry of a message is the last one at or before its ID, if it is there at all: some
messages, and entries, were removed.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from libs.storage.database.slate import Database
from libs.storage.errors import CorruptRecord
from libs.storage.layout.keys import log_range, parse_log_key
from libs.storage.records.metadata import (
    MessageMetadata,
    decode_log_entry,
    encode_log_entry,
    encode_metadata_record,
    last_message_id,
)
from services.ingest.batches import ENTRY_MESSAGES_MAX

NEAR: Final = 64
"""IDs at most so far apart are looked for on the way: a row costs 7 µs there, a new scan 300."""

ROWS_MIN: Final = 8
ROWS_MAX: Final = 512
ROWS_BYTES: Final = 4 << 20
"""Entries read at once, and about how many bytes: an entry may have 16 MiB."""

INLINE_BYTES_MAX: Final = 64 << 10
"""Entries up to this size are looked through on the event loop: 1 ms."""


class StoredEntry(NamedTuple):
    """A stored entry that may have some of the messages asked for.

    It has none above `last_message_id`, and perhaps not that one either: an entry bounded by the
    next one is not decoded. `number` is what the caller counted when it was read.
    """

    sequence: int
    value: bytes
    last_message_id: int
    number: int


async def entry_before(
    database: Database, message_id: int, after: int = 0
) -> tuple[int, bytes] | None:
    """The durable entry that may have this message, if its sequence is above `after`."""
    # No further back than an entry reaches: what was removed before it costs 1.5 µs a row.
    first = max(after + 1, message_id - ENTRY_MESSAGES_MAX + 1)
    start, end = log_range(first, message_id)
    async for rows in database.scan(start, end, limit=1, durable=True, descending=True):
        return parse_log_key(rows[0][0]), rows[0][1]
    return None


async def entries_of(
    database: Database, message_ids: Sequence[int], counted: Callable[[], int]
) -> AsyncGenerator[StoredEntry, None]:
    """The durable entries that may have these messages, each once; IDs and entries ascend.

    They are read a little ahead: `counted` is asked before each reading.
    """
    at, known, rows_max = 0, 0, ROWS_MIN
    while at < len(message_ids):
        number = counted()
        if message_ids[at] - known > NEAR:
            row = await entry_before(database, message_ids[at], known)
            known = message_ids[at]
            if row is not None:
                found = await _found(database, *row, number)
                known = max(known, found.last_message_id)
                if _is_among(message_ids, found):
                    yield found
        else:
            run = _run_end(message_ids, at)
            span = log_range(known + 1, run)
            scan = database.scan(*span, limit=rows_max, durable=True)
            rows = [(parse_log_key(key), value) async for some in scan for key, value in some]
            for (sequence, value), (following, _) in pairwise(rows):
                last = min(following, sequence + ENTRY_MESSAGES_MAX) - 1
                found = StoredEntry(sequence, value, last, number)
                if _is_among(message_ids, found):
                    yield found
            if rows:
                found = await _found(database, *rows[-1], number)
                known = found.last_message_id
                if _is_among(message_ids, found):
                    yield found
            if len(rows) < rows_max:
                known = max(known, run)
            rows_max = _fitting([len(value) for _, value in rows])
        at = bisect_right(message_ids, known)


def _fitting(sizes: Sequence[int]) -> int:
    """The number of rows to read next, after rows of these sizes."""
    return max(ROWS_MIN, min(ROWS_MAX, ROWS_BYTES * len(sizes) // max(1, sum(sizes))))


def _run_end(message_ids: Sequence[int], at: int) -> int:
    """The last of the IDs from `at` on that are at most NEAR apart."""
    while at + 1 < len(message_ids) and message_ids[at + 1] - message_ids[at] <= NEAR:
        at += 1
    return message_ids[at]


def _is_among(message_ids: Sequence[int], found: StoredEntry) -> bool:
    at = bisect_left(message_ids, found.sequence)
    return at < len(message_ids) and message_ids[at] <= found.last_message_id


async def _found(database: Database, sequence: int, value: bytes, number: int) -> StoredEntry:
    try:
        if len(value) <= INLINE_BYTES_MAX:
            last = last_message_id(value)
        else:
            last = await asyncio.to_thread(last_message_id, value)
    except CorruptRecord:
        last = await _last_possible(database, sequence)
    return StoredEntry(sequence, value, last, number)


async def _last_possible(database: Database, sequence: int) -> int:
    """The highest ID that the entry at this sequence can have."""
    last = sequence + ENTRY_MESSAGES_MAX - 1
    async for rows in database.scan(*log_range(sequence + 1, last), limit=1, durable=True):
        return parse_log_key(rows[0][0]) - 1
    return last


MESSAGE_BYTES: Final = 320
"""Of a message in memory: a tuple of nine, three numbers, its place by ID."""

HEADERS_BYTES: Final = 232
HEADER_BYTES: Final = 100
"""Of headers that are not those of the message before, beside their texts."""


class DecodedEntry(NamedTuple):
    sequence: int
    last_message_id: int
    messages: Mapping[int, MessageMetadata]
    size_bytes: int


class EntryCache:
    """The entries that were read last; one is kept even above the bound.

    Attributes:
        size_bytes: What they take, about.
    """

    def __init__(self, bytes_max: int) -> None:
        self.size_bytes = 0
        self._bytes_max = bytes_max
        self._entries: dict[int, DecodedEntry] = {}
        self._sequences: list[int] = []

    def of(self, message_id: int) -> DecodedEntry | None:
        """The cached entry whose range has this ID."""
        at = bisect_right(self._sequences, message_id) - 1
        entry = self._entries[self._sequences[at]] if at >= 0 else None
        return entry if entry is not None and message_id <= entry.last_message_id else None

    def add(self, entry: DecodedEntry) -> None:
        """Add an entry; evicts the oldest."""
        self.forget([entry.sequence])
        while self._entries and self.size_bytes + entry.size_bytes > self._bytes_max:
            self.forget([next(iter(self._entries))])
        self._entries[entry.sequence] = entry
        insort(self._sequences, entry.sequence)
        self.size_bytes += entry.size_bytes

    def forget(self, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            entry = self._entries.pop(sequence, None)
            if entry is not None:
                self._sequences.remove(sequence)
                self.size_bytes -= entry.size_bytes


async def decoded(sequence: int, value: bytes) -> DecodedEntry:
    """Decode a log entry, a large one in a thread. Raises CorruptRecord."""
    if len(value) <= INLINE_BYTES_MAX:
        return _decode(sequence, value)
    return await asyncio.to_thread(_decode, sequence, value)


def _decode(sequence: int, value: bytes) -> DecodedEntry:
    messages = decode_log_entry(value)
    size_bytes = len(messages) * MESSAGE_BYTES
    known: Mapping[str, str] | None = None
    for message in messages:
        if message.headers is not known:  # neighbours share theirs
            known = message.headers
            size_bytes += HEADERS_BYTES + sum(
                HEADER_BYTES + len(key) + len(text) for key, text in known.items()
            )
    by_id = {message.message_id: message for message in messages}
    return DecodedEntry(sequence, messages[-1].message_id, by_id, size_bytes)


COLUMNS_BYTES = 32
"""What an entry has of a message besides its record and the name of its queue."""


class EntryPart(NamedTuple):
    """Some messages of a log entry, as an entry of their own.

    Attributes:
        sequence: The ID of the first one.
        last_message_id: The ID of the last one.
        value: They, encoded.
        is_end: Whether the entry has none behind these.
    """

    sequence: int
    last_message_id: int
    value: bytes
    is_end: bool


async def part_behind(value: bytes, position: int, bytes_max: int) -> EntryPart:
    """The messages of an entry behind a position: one, and as many more as the bound has room for.

    Raises CorruptRecord. The entry has messages behind the position.
    """
    return await asyncio.to_thread(_part_behind, value, position, bytes_max)


def _part_behind(value: bytes, position: int, bytes_max: int) -> EntryPart:
    entry = decode_log_entry(value)
    part: list[MessageMetadata] = []
    size_bytes = 0
    for message in entry:
        if message.message_id <= position:
            continue
        size_bytes += len(encode_metadata_record(message)) + COLUMNS_BYTES
        size_bytes += len(message.direct_queue_id)
        if part and size_bytes > bytes_max:
            break
        part.append(message)
    first, last = part[0].message_id, part[-1].message_id
    return EntryPart(first, last, encode_log_entry(part), last == entry[-1].message_id)
