"""Log entries found by the IDs of their messages, in a log out of which some were removed.

An entry stands under the ID that its first message had at the commit, and a commit's IDs follow one
another. So the entry of a message is the last one at or before its ID, if it is there at all.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from libs.storage.database.slate import Database
from libs.storage.errors import CorruptRecord
from libs.storage.layout.keys import log_range, parse_log_key
from libs.storage.records.metadata import last_message_id
from services.ingest.batches import ENTRY_MESSAGES_MAX

__all__ = ["StoredEntry", "entries_of", "entry_before"]

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
