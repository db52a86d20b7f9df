"""The place of a time in a metadata log, found by bisection: times never go back in a log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from libs.storage.layout.ids import sequence_of
from libs.storage.layout.keys import log_range, parse_log_key
from libs.storage.layout.primitives import Row
from libs.storage.records.metadata import read_log_entry_head


class LogStore(Protocol):
    """A database or a snapshot."""

    def scan(self, start: bytes, end: bytes, limit: int | None = None) -> AsyncIterator[list[Row]]:
        """Rows with start ≤ key < end in key order, at most `limit`, in lists."""


async def position_before(
    store: LogStore, end_sequence: int, received_at_ms: int, first_sequence: int = 1
) -> int:
    """The last sequence, up to the end, whose messages were all received before this time.

    Returns 0 if there is none. All messages of an entry are received at the same time. Reads a row
    about fifty times, however long the log is. There is no entry before `first_sequence`, so that
    removed rows are not scanned again and again.
    """
    if received_at_ms <= 0:
        return 0
    # Entries up to `before` were received before the time, those above `after` were not.
    position, after = 0, end_sequence
    before = min(max(after - sequence_of(after), first_sequence - 1), after)
    while before < after:
        middle = (before + after) // 2
        sequence, received_ms = await _first_after(store, middle, after)
        if not sequence or received_ms >= received_at_ms:
            after = middle
        else:
            position = before = sequence
    return position


async def _first_after(store: LogStore, position: int, last: int) -> tuple[int, int]:
    """Sequence and time of the first entry after a position and up to `last`; 0, 0: none."""
    span = log_range(position + 1, last)
    async for rows in store.scan(span.start, span.end, limit=1):
        key, value = rows[0]
        return parse_log_key(key), read_log_entry_head(value)[1]
    return 0, 0
