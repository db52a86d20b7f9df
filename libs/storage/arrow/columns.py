"""Many values as columns: NumPy reads a field of all of them in one pass, Arrow takes the texts.

The values of a batch lie one after the other in one buffer. A `Walk` has a cursor into each of
them, and reads the same field of all with a few operations on whole columns: no Python runs for
each message. A value that does not have the usual layout is marked (`odd`), and the caller reads it
exactly, or reports the damage. So a column is never wrong, only sometimes slow.

Nothing here depends on a kind of record. Numbers are little-endian, as in all values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from libs.storage.errors import CorruptRecord
from libs.storage.layout.primitives import Fixed, Row

Ints: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Places: TypeAlias = tuple[Ints, Ints]
"""The places of texts in the buffer: ascending starts, and lengths in bytes."""
Column: TypeAlias = Callable[[], pa.Array]
"""Makes a column, called only if the column is wanted."""

JOINED_BYTES_MAX: Final = (1 << 31) - (1 << 20)
"""Offsets of Arrow's texts are i32. A scan's batch is 8 MiB, of packs 32 MiB when they are
decompressed, and one value at most 100 MB."""

_PAD: Final = bytes(256)
"""Added after the last value, so that a row read at its end stays inside the buffer."""

_IN_STEP: Final = 8
"""Arrays of up to this many texts are read together, longer ones one by one."""

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
FIRST_MS: Final = -62_135_596_800_000
LAST_MS: Final = 253_402_300_799_999
"""The years 1 to 9999, the ones that Spark and Python can represent."""
DAY_MS: Final = 86_400_000


def join(values: Sequence[bytes]) -> tuple[bytes, Ints, Ints]:
    """All values in one buffer, and the start and end of each."""
    ends = np.cumsum(np.fromiter(map(len, values), np.int64, len(values)))
    if len(values) and ends[-1] > JOINED_BYTES_MAX:
        raise ValueError(f"{ends[-1]} bytes in one batch; at most {JOINED_BYTES_MAX} fit")
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


def row_type(layout: Fixed) -> np.dtype[Any]:
    """NumPy's type of these rows; u64 are read as i64, which the columns are made of."""
    return np.dtype([(name, code.replace("Q", "q")) for name, code in layout.codes.items()])


U16: Final = np.dtype("<u2")


def owners(counts: Ints) -> Ints:
    """The value that each element belongs to."""
    return np.repeat(np.arange(len(counts)), counts)


def elements(starts: Ints, counts: Ints, size: int) -> Ints:
    """The place of each element of `size` bytes, of arrays whose elements begin at `starts`."""
    firsts = np.cumsum(counts) - counts
    return np.repeat(starts - size * firsts, counts) + size * np.arange(int(counts.sum()))


class Walk:
    """A cursor into each of many values.

    Attributes:
        data: The buffer with all of them.
        at: The place of each cursor.
        ends: The end of each value.
        odd: The values to be read exactly; what was read of them so far does not count.
    """

    def __init__(self, values: Sequence[bytes]) -> None:
        self.data, self.at, self.ends = join(values)
        self.odd: Mask = np.zeros(len(values), np.bool_)

    def counts(self) -> Ints:
        """The counts that open an array, one for each value."""
        counts = rows_at(self.data, self.at, U16).astype(np.int64)
        self.at = self.at + 2
        return self._within(counts)

    def fixed(self, layout: np.dtype[Any]) -> tuple[Ints, npt.NDArray[Any]]:
        """Array of fixed rows: the count in each value, and the rows of all values."""
        counts = self.counts()
        places = self._take(counts, layout.itemsize)
        return counts, rows_at(self.data, places, layout)

    def beside(self, counts: Ints, code: str, default: int = 0) -> npt.NDArray[Any]:
        """A trailing array of numbers, parallel to `counts` elements; `default` where missing."""
        layout = np.dtype(code)
        found = self._beside(counts)
        numbers = rows_at(self.data, self._take(found, layout.itemsize), layout)
        if found.sum() == counts.sum():
            return numbers
        spread = np.full(int(counts.sum()), default, layout)
        spread[np.repeat(found > 0, counts)] = numbers
        return spread

    def texts(self) -> tuple[Ints, Places]:
        """Array<Utf8>: the count in each value, and the places of all texts."""
        counts = self.counts()
        return counts, self._text_places(counts, counts)

    def texts_beside(self, counts: Ints) -> Places:
        """A trailing Array<Utf8>, parallel to `counts` elements; empty where missing."""
        return self._text_places(self._beside(counts), counts)

    def finish(self) -> None:
        """Mark values with bytes after the cursor."""
        self.odd |= self.at != self.ends

    def _beside(self, counts: Ints) -> Ints:
        """The counts of a trailing array: those given, or 0 where it is missing or empty."""
        there = self.at < self.ends
        found = np.where(there, rows_at(self.data, self.at, U16), 0).astype(np.int64)
        self.at = self.at + 2 * there
        self.odd |= (found != 0) & (found != counts)
        return self._within(np.where(found == counts, found, 0))

    def _within(self, counts: Ints) -> Ints:
        """Stop the cursors that ran past their ends."""
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
    """Fill in the places of the texts of one long array; return the end of the array.

    The same consumer, reason or queue often repeats: its run is found in one step.
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
    """How many times the same bytes repeat, `most` at most."""
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
    """The bytes at these places, as binary or as strings that are not validated."""
    starts, lengths = places
    if not len(starts):
        return pa.array([], kind)
    # The buffer is cut at every start and end; Arrow copies every second piece.
    cuts = np.empty(2 * len(starts) + 1, np.int32)
    cuts[0:-1:2], cuts[1::2] = starts, starts + lengths
    cuts[-1] = cuts[-2]
    if (np.diff(cuts) < 0).any():
        raise RuntimeError(f"the pieces of {record} are not in ascending order")
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
    """The number at the end of each key: a message ID, a sequence, a bucket; big-endian u64.

    A bucket of 2^63 or more comes out negative, with the same bits.
    """
    return np.frombuffer(b"".join([key[-8:] for key, _ in rows]), ">u8").astype(np.int64)


def times(milliseconds: npt.NDArray[Any], *, zero_is_none: bool = False) -> pa.Array:
    """Timestamps, clamped to the years 1 to 9999; 0 may mean none."""
    microseconds = np.clip(milliseconds.astype(np.int64), FIRST_MS, LAST_MS) * 1000
    mask = milliseconds == 0 if zero_is_none else None
    return pa.array(microseconds, mask=mask).view(TIMESTAMP)


def days(milliseconds: npt.NDArray[Any]) -> pa.Array:
    clipped = np.clip(milliseconds.astype(np.int64), FIRST_MS, LAST_MS)
    return pa.array((clipped // DAY_MS).astype(np.int32)).view(pa.date32())
