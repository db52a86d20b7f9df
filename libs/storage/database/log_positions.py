"""Where in a metadata log a time stands: found by halving, as times never go back along a log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from libs.storage.database.binding import Row
from libs.storage.layout.ids import sequence_of
from libs.storage.layout.keys import log_range, parse_log_key
from libs.storage.records.metadata import read_log_entry_head

__all__ = ["LogStore", "position_before"]


class LogStore(Protocol):
    """What is needed of a database or a snapshot."""

    def scan(self, start: bytes, end: bytes, limit: int | None = None) -> AsyncIterator[list[Row]]:
        """Rows with start ≤ key < end in key order, at most `limit`, in lists."""


async def position_before(
    store: LogStore, end_sequence: int, received_at_ms: int, first_sequence: int = 1
) -> int:
    """The last sequence up to the end whose messages were all received before this time.

    0: there is none. All messages of an entry are received at the same time. Costs some fifty reads
    of one row, however long the log is. No entry stands before `first_sequence`: what was removed
    there is not passed again and again.
    """
    if received_at_ms <= 0:
        return 0
    # Entries up to `before` were, those above `after` were not.
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
    """Sequence and time of the first entry behind a position, up to the last one; or 0, 0."""
    span = log_range(position + 1, last)
    async for rows in store.scan(span.start, span.end, limit=1):
        key, value = rows[0]
        return parse_log_key(key), read_log_entry_head(value)[1]
    return 0, 0
