"""The parts of keys and values: TerminatedBytes, Utf8, Array<T>, and one reader for them.

    TerminatedBytes   | escaped bytes | 00 |               00 -> 01 01, 01 -> 01 02, FF -> 01 03
    Utf8              | length u16 LE | bytes |             at most 65,535 bytes, valid UTF-8
    Array<T>          | count u16 LE | T | T | ... |        at most 65,535 elements, no padding

Keys are big-endian, values little-endian. Encoding raises ValueError naming the field that does not
fit; decoding raises CorruptRecord naming the record. Nothing here depends on a kind of record.
"""

import re
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import starmap
from typing import Any, Final, NamedTuple, TypeVar

from libs.storage.errors import CorruptRecord

Row = tuple[bytes, bytes]
"""A key and its value."""

RowChange = tuple[bytes, bytes | None]
"""A key and its new value; None deletes it."""

# Lengths and counts are u16 in the layouts of the RFC.
UTF8_MAX_BYTES = 65_535
ARRAY_MAX_COUNT = 65_535

_T = TypeVar("_T")

_U16 = struct.Struct("<H")
_NUMBER_WIDTHS = {"B": 1, "H": 2, "I": 4, "Q": 8, "q": 8}
_ESCAPE = re.compile(rb"\x01(.?)", re.DOTALL)
_UNESCAPED = {b"\x01": b"\x00", b"\x02": b"\x01", b"\x03": b"\xff"}


class KeyRange(NamedTuple):
    """All keys k with start <= k < end, as bytes."""

    start: bytes
    end: bytes


def escape(raw: bytes) -> bytes:
    """`raw` as TerminatedBytes, without the terminator."""
    # 01 first: the other two replacements add 01 bytes.
    escaped = raw.replace(b"\x01", b"\x01\x02").replace(b"\x00", b"\x01\x01")
    return escaped.replace(b"\xff", b"\x01\x03")


def terminated(raw: bytes) -> bytes:
    """`raw` as TerminatedBytes: none is a prefix of another, and UTF-8 keeps its byte order."""
    return escape(raw) + b"\x00"


def utf8(field: str, text: str) -> bytes:
    """`text` as Utf8; ValueError naming `field` when it is too long or holds a lone surrogate."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{field} is not valid Unicode: {error.reason}") from None
    if len(data) > UTF8_MAX_BYTES:
        raise ValueError(f"{field} has {len(data)} bytes, at most {UTF8_MAX_BYTES} fit")
    return _U16.pack(len(data)) + data


def count_prefix(field: str, elements: Collection[Any]) -> bytes:
    """The count that opens an Array; ValueError naming `field` when there are too many elements."""
    if len(elements) > ARRAY_MAX_COUNT:
        raise ValueError(f"{field} has {len(elements)} elements, at most {ARRAY_MAX_COUNT} fit")
    return _U16.pack(len(elements))


def utf8_array(field: str, texts: Sequence[str]) -> bytes:
    """Array<Utf8>. Each distinct text is encoded once: consumers and reasons often repeat."""
    encoded = {text: utf8(field, text) for text in set(texts)}
    prefix = count_prefix(field, texts)
    if len(encoded) == 1:
        return prefix + next(iter(encoded.values())) * len(texts)
    return prefix + b"".join(map(encoded.__getitem__, texts))


def is_constant(column: Sequence[Any]) -> bool:
    """Whether all elements are equal; False for an empty column."""
    # Most columns that are not constant differ at their ends, too.
    return len(column) > 0 and column[0] == column[-1] and column.count(column[0]) == len(column)


def number_array(field: str, code: str, numbers: Sequence[int]) -> bytes:
    """Array of integers of one type: `code` is its letter in `struct` (B, H, I, Q or q)."""
    count = len(numbers)
    try:
        if is_constant(numbers):
            return count_prefix(field, numbers) + struct.pack("<" + code, numbers[0]) * count
        return struct.pack(f"<H{count}{code}", count, *numbers)
    except struct.error as error:
        count_prefix(field, numbers)
        raise ValueError(f"{field} holds a number that does not fit: {error}") from None


CONSTANT_ROWS_MIN: Final = 64
"""The number of rows from which looking for constant columns saves more time than it takes."""


class Fixed:
    """A row of fields of fixed width: a precompiled struct that can name a field that does not fit.

    Made of `name=letter` pairs with the letters of the `struct` module; little-endian by default.
    """

    __slots__ = ("_struct", "codes", "names", "size")

    def __init__(self, *, order: str = "<", **codes: str) -> None:
        self.codes = {name: order + code for name, code in codes.items()}
        self._struct = struct.Struct(order + "".join(codes.values()))
        self.size = self._struct.size
        self.names = tuple(codes)

    def pack(self, *values: Any) -> bytes:
        """One row; ValueError naming the first field whose value does not fit."""
        try:
            return self._struct.pack(*values)
        except struct.error as error:
            raise self._refusal(values, error) from None

    def pack_array(self, field: str, rows: Sequence[tuple[Any, ...]]) -> bytes:
        """Array of rows; ValueError naming the array or the field that does not fit."""
        try:
            return count_prefix(field, rows) + b"".join(starmap(self._struct.pack, rows))
        except struct.error:
            return count_prefix(field, rows) + b"".join(starmap(self.pack, rows))

    def pack_columns(self, field: str, *columns: Sequence[Any]) -> bytes:
        """Like `pack_array`, from the columns of the rows, all of one length.

        Constant columns are packed once; into that, each other column byte by byte.
        """
        count = len(columns[0])
        try:
            if count < CONSTANT_ROWS_MIN:
                rows = map(self._struct.pack, *columns)
                return count_prefix(field, columns[0]) + b"".join(rows)
            constant = list(map(is_constant, columns))
            firsts = [one[0] if same else 0 for one, same in zip(columns, constant, strict=True)]
            packed_rows = bytearray(self._struct.pack(*firsts) * count)
            at = 0
            for code, column, same in zip(self.codes.values(), columns, constant, strict=True):
                width = struct.calcsize(code)
                if not same:
                    packed = struct.pack(f"{code[0]}{count}{code[1]}", *column)
                    for byte in range(width):
                        packed_rows[at + byte :: self.size] = packed[byte::width]
                at += width
            return count_prefix(field, columns[0]) + packed_rows
        except struct.error:
            return self.pack_array(field, list(zip(*columns, strict=True)))

    def unpack_from(self, data: bytes, at: int) -> tuple[Any, ...]:
        """The row at offset `at`; struct.error when the data is too short."""
        return self._struct.unpack_from(data, at)

    def iter_unpack(self, rows: memoryview) -> Iterator[tuple[Any, ...]]:
        """All rows of a buffer that contains nothing else."""
        return self._struct.iter_unpack(rows)

    def _refusal(self, values: Iterable[Any], error: struct.error) -> ValueError:
        for (name, code), value in zip(self.codes.items(), values, strict=True):
            try:
                struct.pack(code, value)
            except struct.error as cause:
                return ValueError(f"{name} = {value!r} does not fit: {cause}")
        return ValueError(str(error))


class Reader:
    """A cursor over one key or value; a read that fails raises CorruptRecord naming the record."""

    __slots__ = ("_at", "_data", "record")

    def __init__(self, record: str, data: bytes, at: int = 0) -> None:
        self.record = record
        self._data = data
        self._at = at

    @property
    def at_end(self) -> bool:
        return self._at == len(self._data)

    @property
    def offset(self) -> int:
        """Bytes read."""
        return self._at

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def corrupt(self, detail: str) -> CorruptRecord:
        """The error to raise for what was read last."""
        return CorruptRecord(self.record, f"{detail} (before byte {self._at} of {len(self._data)})")

    def finish(self) -> None:
        """Raise unless everything has been read."""
        if not self.at_end:
            raise self.corrupt(f"{self.left} bytes too many")

    def take(self, field: str, size: int) -> bytes:
        if size > self.left:
            raise self.corrupt(f"ends within {field}: {size} bytes wanted, {self.left} left")
        start = self._at
        self._at = start + size
        return self._data[start : self._at]

    def fixed(self, field: str, layout: Fixed) -> tuple[Any, ...]:
        return layout.unpack_from(self.take(field, layout.size), 0)

    def last(self, field: str, layout: Fixed) -> tuple[Any, ...]:
        """The last row: nothing may follow it."""
        row = self.fixed(field, layout)
        self.finish()
        return row

    def number(self, field: str, code: str) -> int:
        """One little-endian integer, `code` as in `number_array`."""
        number: int = struct.unpack("<" + code, self.take(field, _NUMBER_WIDTHS[code]))[0]
        return number

    def utf8(self, field: str) -> str:
        data = self.take(field, self.number(f"length of {field}", "H"))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{field} is not valid UTF-8: {error.reason}") from None

    def terminated(self, field: str) -> bytes:
        """One TerminatedBytes, unescaped."""
        end = self._data.find(b"\x00", self._at)
        if end < 0:
            raise self.corrupt(f"{field} has no terminator")
        escaped = self.take(field, end - self._at)
        self._at += 1
        if b"\xff" in escaped:
            raise self.corrupt(f"{field} contains an unescaped FF")
        if b"\x01" not in escaped:
            return escaped
        try:
            return _ESCAPE.sub(lambda match: _UNESCAPED[match[1]], escaped)
        except KeyError as error:
            raise self.corrupt(f"{field} contains the unknown escape 01 {error}") from None

    def array(self, field: str, layout: Fixed) -> Iterator[tuple[Any, ...]]:
        """Array of fixed rows, as bare tuples."""
        count = self.number(f"count of {field}", "H")
        return layout.iter_unpack(memoryview(self.take(field, count * layout.size)))

    def utf8_array(self, field: str) -> list[str]:
        return [self.utf8(field) for _ in range(self.number(f"count of {field}", "H"))]

    def number_array(self, field: str, code: str) -> tuple[int, ...]:
        count = self.number(f"count of {field}", "H")
        return struct.unpack(f"<{count}{code}", self.take(field, count * _NUMBER_WIDTHS[code]))

    def parallel_numbers(
        self, field: str, code: str, count: int, default: int = 0
    ) -> Sequence[int]:
        """A trailing array, parallel to `count` elements; `default` where missing or empty."""
        numbers = () if self.at_end else self.number_array(field, code)
        return self._beside(field, numbers, count) or (default,) * count

    def parallel_texts(self, field: str, count: int) -> Sequence[str]:
        """A trailing Array<Utf8>, parallel to `count` elements; "" where missing or empty."""
        texts = () if self.at_end else self.utf8_array(field)
        return self._beside(field, texts, count) or ("",) * count

    def _beside(self, field: str, values: Sequence[_T], count: int) -> Sequence[_T]:
        if values and len(values) != count:
            raise self.corrupt(f"{field} has {len(values)} elements beside {count}")
        return values
