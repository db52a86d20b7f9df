"""Log entries in parts, for tails where memory for answers is short."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from libs.storage.records.metadata import (
    MessageMetadata,
    decode_log_entry,
    encode_log_entry,
    encode_metadata_record,
)

__all__ = ["EntryPart", "part_behind"]

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
