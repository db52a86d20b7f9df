"""Log entries in parts, as reading a long one would hold up an event loop.

::

    count | record … record | record … record | … | delays | payload bytes | direct queues
            └── a part ────┘ └── a part ────┘          columns, each with a count

A part is read from its own records and its slices of the columns, as often as needed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from libs.storage.layout.primitives import Reader
from libs.storage.records.log_runs import LogRun
from libs.storage.records.metadata import NO_DELAY, Records, read_log_runs, read_records, runs_of

PART_MESSAGES_MAX: Final = 1024
"""Messages of a part: some two milliseconds."""

PART_BYTES_MAX: Final = 128 << 10
"""Bytes in which the records of a part begin: some milliseconds."""


class LogPart(NamedTuple):
    """Consecutive messages of a log entry.

    Attributes:
        runs: The messages.
        size_bytes: Their share of the entry's size.
        read: Reads the same messages again.
    """

    runs: list[LogRun]
    size_bytes: int
    read: Callable[[], list[LogRun]]


class _Columns(NamedTuple):
    """Where the elements of the columns begin in an entry; 0: missing or empty."""

    delays_at: int
    sizes_at: int
    queues_at: int


def read_log_parts(
    data: bytes, *, messages_max: int = PART_MESSAGES_MAX, bytes_max: int = PART_BYTES_MAX
) -> Iterator[LogPart | None]:
    """The parts of a log entry in order; None after each step before the first part is known.

    A part has `messages_max` messages at most, whose records begin within `bytes_max`. Raises
    CorruptRecord, perhaps after some parts, when it is not a log entry.
    """
    count = int.from_bytes(data[:2], "little")
    if count <= messages_max and len(data) <= bytes_max:
        if runs := _read_whole(data):
            yield LogPart(runs, len(data), partial(_read_whole, data))
        return
    reader = Reader("log entry", data, 2)
    found: list[tuple[int, Records]] = []
    at, left = 2, count
    while left:
        read = read_records(data, at, min(left, messages_max), bytes_max)
        found.append((at, read))
        at, left = read.end, left - read.messages_count
        yield None
    reader.take("records", at - 2)
    columns = _Columns(
        _column_at(reader, "delay_ms", count, 8),
        _column_at(reader, "payload_bytes", count, 4),
        _column_at(reader, "direct_queue_id", count, 0),
    )
    place, queues_at = 0, columns.queues_at
    for at, read in found:
        queues = _texts(data, queues_at, read.messages_count)
        where = columns._replace(queues_at=queues_at)
        if queues_at:
            queues_at += sum(2 + len(queue.encode()) for queue in queues)
        yield LogPart(
            _runs(data, where, place, read, queues),
            read.end - at,
            partial(_read_again, data, where, place, at, read.messages_count),
        )
        place += read.messages_count
    if columns.queues_at:
        reader.take("direct_queue_id", queues_at - columns.queues_at)
    reader.finish()


def _read_whole(data: bytes) -> list[LogRun]:
    return list(read_log_runs(data))


def _read_again(data: bytes, columns: _Columns, place: int, at: int, count: int) -> list[LogRun]:
    read = read_records(data, at, count, len(data))
    return _runs(data, columns, place, read, _texts(data, columns.queues_at, count))


def _runs(
    data: bytes, columns: _Columns, place: int, read: Records, queues: Sequence[str]
) -> list[LogRun]:
    delays: Sequence[int] = (NO_DELAY,) * read.messages_count
    if columns.delays_at:
        delays = struct.unpack_from(f"<{read.messages_count}q", data, columns.delays_at + 8 * place)
    if min(delays) < NO_DELAY:
        raise Reader("log entry", data).corrupt(f"delay_ms = {min(delays)}")
    sizes: Sequence[int] = (0,) * read.messages_count
    if columns.sizes_at:
        sizes = struct.unpack_from(f"<{read.messages_count}I", data, columns.sizes_at + 4 * place)
    return list(runs_of(read, delays, sizes, queues))


def _column_at(reader: Reader, field: str, count: int, width: int) -> int:
    """Where the elements of a trailing array begin; skips those of fixed width."""
    if reader.at_end:
        return 0
    elements = reader.number(f"count of {field}", "H")
    if not elements:
        return 0
    if elements != count:
        raise reader.corrupt(f"{field} has {elements} elements beside {count}")
    at = reader.offset
    reader.take(field, elements * width)
    return at


def _texts(data: bytes, at: int, count: int) -> Sequence[str]:
    if not at:
        return ("",) * count
    reader = Reader("log entry", data, at)
    return [reader.utf8("direct_queue_id") for _ in range(count)]
