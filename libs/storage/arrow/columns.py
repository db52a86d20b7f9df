"""Many values at once, as columns: NumPy looks at all of them in one pass, Arrow takes the texts.

The values of a batch lie one behind the other in one buffer. A `Walk` has a cursor into each of
them, and reads the same field of all with a few operations on whole columns: no Python runs per
message. What does not look like the usual layout is only marked (`odd`); the exact decoder of that
record then reads it, or says what is wrong with it. So a column is never wrong, only sometimes
slow.

Nothing here knows a record of its own. Numbers are little-endian, as in all values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from libs.storage.database.binding import Row
from libs.storage.errors import CorruptRecord

Ints: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Places: TypeAlias = tuple[Ints, Ints]
"""Where texts lie in the buffer: starts, ascending, and lengths in bytes."""
Column: TypeAlias = Callable[[], pa.Array]
"""Makes a column, if it is asked for."""

JOINED_BYTES_MAX: Final = (1 << 31) - (1 << 20)
"""Offsets of Arrow's texts are i32. A scan's batch is 8 MiB, of packs 32 MiB when they are
decompressed, and one value at most 100 MB."""

_PAD: Final = bytes(256)
"""Behind the last value, so that a fixed row read at its end stays inside the buffer."""

_IN_STEP: Final = 8
"""Arrays of up to so many texts are read in step with each other, longer ones one by one."""

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
FIRST_MS: Final = -62_135_596_800_000
LAST_MS: Final = 253_402_300_799_999
"""The years 1 to 9999: beyond them neither Spark nor Python has names."""
DAY_MS: Final = 86_400_000


def join(values: Sequence[bytes]) -> tuple[bytes, Ints, Ints]:
    """All values in one buffer, with where each starts and ends."""
    ends = np.cumsum(np.fromiter(map(len, values), np.int64, len(values)))
    if len(values) and ends[-1] > JOINED_BYTES_MAX:
        raise ValueError(f"{ends[-1]} bytes at once, at most {JOINED_BYTES_MAX} can be told apart")
    data = b"".join((*values, _PAD))
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1])) if len(values) else ends
    return data, starts, ends


def rows_at(data: bytes, starts: Ints, layout: np.dtype[Any]) -> npt.NDArray[Any]:
    """The fixed rows that begin at these places."""
    size = layout.itemsize
    if not len(starts):
        return np.empty(0, layout)
    windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), size)
    return windows[starts].view(layout)[:, 0]


U16: Final = np.dtype("<u2")


def owners(counts: Ints) -> Ints:
    """For each element, which value it belongs to."""
    return np.repeat(np.arange(len(counts)), counts)


def elements(starts: Ints, counts: Ints, size: int) -> Ints:
    """Where each element of size `size` lies, of arrays whose elements begin at `starts`."""
    firsts = np.cumsum(counts) - counts
    return np.repeat(starts - size * firsts, counts) + size * np.arange(int(counts.sum()))


class Walk:
    """A cursor into each of many values.

    Attributes:
        data: The buffer with all of them.
        at: Where each cursor stands.
        ends: Where each value ends.
        odd: Those that the exact decoder must look at; nothing that was read of them counts.
    """

    def __init__(self, values: Sequence[bytes]) -> None:
        self.data, self.at, self.ends = join(values)
        self.odd: Mask = np.zeros(len(values), np.bool_)

    def counts(self) -> Ints:
        """The count that opens an array: one of each value."""
        counts = rows_at(self.data, self.at, U16).astype(np.int64)
        self.at = self.at + 2
        return self._within(counts)

    def fixed(self, layout: np.dtype[Any]) -> tuple[Ints, npt.NDArray[Any]]:
        """Array of fixed rows: how many each value has, and all of them in a row."""
        counts = self.counts()
        places = self._take(counts, layout.itemsize)
        return counts, rows_at(self.data, places, layout)

    def beside(self, counts: Ints, code: str, default: int = 0) -> npt.NDArray[Any]:
        """A trailing array of numbers beside one of these counts; `default` where it is missing."""
        layout = np.dtype(code)
        found = self._beside(counts)
        numbers = rows_at(self.data, self._take(found, layout.itemsize), layout)
        if found.sum() == counts.sum():
            return numbers
        spread = np.full(int(counts.sum()), default, layout)
        spread[np.repeat(found > 0, counts)] = numbers
        return spread

    def texts(self) -> tuple[Ints, Places]:
        """Array<Utf8>: how many each value has, and where all of them lie."""
        counts = self.counts()
        return counts, self._text_places(counts, counts)

    def texts_beside(self, counts: Ints) -> Places:
        """A trailing Array<Utf8> beside one of these counts; empty where it is missing."""
        return self._text_places(self._beside(counts), counts)

    def finish(self) -> None:
        """Nothing may follow."""
        self.odd |= self.at != self.ends

    def _beside(self, counts: Ints) -> Ints:
        """The count of a trailing array: that of its list, or 0 where it is missing or empty."""
        there = self.at < self.ends
        found = np.where(there, rows_at(self.data, self.at, U16), 0).astype(np.int64)
        self.at = self.at + 2 * there
        self.odd |= (found != 0) & (found != counts)
        return self._within(np.where(found == counts, found, 0))

    def _within(self, counts: Ints) -> Ints:
        """Stops the cursors that ran over their ends."""
        over = self.at > self.ends
        self.odd |= over
        self.at = np.where(over, self.ends, self.at)
        return np.where(self.odd, 0, counts)

    def _take(self, counts: Ints, size: int) -> Ints:
        over = self.at + size * counts > self.ends
        if over.any():
            self.odd |= over
            counts[over] = 0
        places = elements(self.at, counts, size)
        self.at = self.at + size * counts
        return places

    def _text_places(self, found: Ints, counts: Ints) -> Places:
        starts = np.repeat(self.at, counts)
        lengths = np.zeros(len(starts), np.int64)
        firsts = np.cumsum(counts) - counts
        short = np.flatnonzero((found > 0) & (found <= _IN_STEP))
        for step in range(int(found[short].max(initial=0))):
            now = short[found[short] > step]
            at = self.at[now]
            size = rows_at(self.data, at, U16).astype(np.int64)
            places = firsts[now] + step
            starts[places], lengths[places] = at + 2, size
            self.at[now] = np.minimum(at + 2 + size, self.ends[now] + 1)
        for one in np.flatnonzero(found > _IN_STEP):
            first, count = int(firsts[one]), int(found[one])
            self.at[one] = _long_array(
                self.data,
                int(self.at[one]),
                int(self.ends[one]),
                starts[first : first + count],
                lengths[first : first + count],
            )
        self._within(found)
        return starts, lengths


def _long_array(data: bytes, at: int, end: int, starts: Ints, lengths: Ints) -> int:
    """Fills in where the texts of one long array lie; gives the end of the array.

    A consumer, a reason or a queue mostly stands many times in a row: a run is found at a stroke.
    """
    done, count = 0, len(starts)
    while done < count and at + 2 <= end:
        size = int.from_bytes(data[at : at + 2], "little") + 2
        most = min(count - done, (end - at) // size)
        run = _run(data, at, size, most)
        if not run:
            return end + 1
        starts[done : done + run] = np.arange(at + 2, at + 2 + run * size, size)
        lengths[done : done + run] = size - 2
        at += run * size
        done += run
    return at if done == count else end + 1


def _run(data: bytes, at: int, size: int, most: int) -> int:
    """How many times, `most` at most, the same bytes stand in a row."""
    if most < 2 or data[at : at + size] != data[at + size : at + 2 * size]:
        return min(most, 1)
    rows = np.frombuffer(data, np.uint8, most * size, at).reshape(most, size)
    other = np.flatnonzero((rows != rows[0]).any(axis=1))
    return int(other[0]) if len(other) else most


# --- Arrow columns ----------------------------------------------------------


def batch(schema: pa.Schema, made: Mapping[str, Column]) -> pa.RecordBatch:
    """The columns of `schema`, at least one, and no others."""
    return pa.RecordBatch.from_arrays([made[name]() for name in schema.names], schema=schema)


def pieces(record: str, data: bytes, places: Places, kind: pa.DataType) -> pa.Array:
    """The bytes at these places, as binary or as strings, which are not looked at."""
    starts, lengths = places
    if not len(starts):
        return pa.array([], kind)
    # The buffer cut at every start and end: what is wanted is every second piece, copied by Arrow.
    cuts = np.empty(2 * len(starts) + 1, np.int32)
    cuts[0:-1:2], cuts[1::2] = starts, starts + lengths
    cuts[-1] = cuts[-2]
    if (np.diff(cuts) < 0).any():
        raise RuntimeError(f"what {record} holds does not lie in order")
    buffers = [None, pa.py_buffer(cuts), pa.py_buffer(data)]
    all_pieces = pa.Array.from_buffers(kind, 2 * len(starts), buffers)
    return all_pieces.take(pa.array(np.arange(0, 2 * len(starts), 2)))


def texts(record: str, data: bytes, places: Places) -> pa.Array:
    """The texts at these places; CorruptRecord when one is not valid UTF-8."""
    taken = pieces(record, data, places, pa.string())
    try:
        taken.validate(full=True)
    except pa.ArrowInvalid as error:
        raise CorruptRecord(record, f"a text is not valid UTF-8: {error}") from None
    return taken


def present(column: pa.Array, lengths: Ints) -> pa.Array:
    """The texts, with null in place of the empty ones."""
    return where(lengths > 0, column)


def where(wanted: Mask, column: pa.Array) -> pa.Array:
    """The column, with null where it is not wanted."""
    if wanted.all():
        return column
    return pc.if_else(pa.array(wanted), column, pa.scalar(None, column.type))


def last_numbers(rows: Sequence[Row]) -> Ints:
    """The number with which each key ends: a message ID, a sequence, a bucket; big-endian u64.

    A bucket over 2^63 comes out negative: its bits are the same.
    """
    return np.frombuffer(b"".join([key[-8:] for key, _ in rows]), ">u8").astype(np.int64)


def times(milliseconds: npt.NDArray[Any], *, zero_is_none: bool = False) -> pa.Array:
    """Timestamps; beyond the year 9999 they stand at its end, and 0 may mean none."""
    microseconds = np.clip(milliseconds.astype(np.int64), FIRST_MS, LAST_MS) * 1000
    mask = milliseconds == 0 if zero_is_none else None
    return pa.array(microseconds, mask=mask).view(TIMESTAMP)


def days(milliseconds: npt.NDArray[Any]) -> pa.Array:
    clipped = np.clip(milliseconds.astype(np.int64), FIRST_MS, LAST_MS)
    return pa.array((clipped // DAY_MS).astype(np.int32)).view(pa.date32())
