"""Decoded log entries, kept as far as a bound in bytes allows."""

from __future__ import annotations

import asyncio
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from libs.storage.records.metadata import MessageMetadata, decode_log_entry
from services.ingest.read.entries import INLINE_BYTES_MAX

__all__ = ["DecodedEntry", "EntryCache", "decoded"]

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
        """Drop these entries."""
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
