"""Requests that are small on the wire and large in memory: refused before they are parsed.

A list of a million empty messages has 2 MB on the wire. Parsed it takes a hundred times as much,
and all calls of the process wait meanwhile. So the wire format of a large request is walked first
(https://protobuf.dev/programming-guides/encoding/): payloads are passed over whatever their size,
and the walk ends at the first bound that is exceeded. It takes 0.1 µs a field and 1 µs a message;
parsing takes 0.4 µs for each pair of a map.

A request that is refused is walked once more, slowly, for the field at fault: the protobuf runtime
only says that a message does not parse, and its sender wants to know which text is not UTF-8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from slatemq._rpc.wire_format import I32, I64, LEN, VARINT, read_varint

WALKED_BYTES_MIN: Final = 32 * 1024
"""A smaller request has at most 16,000 items, which take some milliseconds to parse."""

ITEMS_MAX: Final = 300_000
"""Items in all lists and maps of a request together: at most some 30 ms to parse. A router's call
has up to 131,072 matches, each perhaps of a queue of its own."""

TEXT_ITEMS: Final = 1
MESSAGE_ITEMS: Final = 2
PAIR_ITEMS: Final = 4
"""What an item counts for, by what it takes to parse it."""

PAIRS_MAX: Final = 1_024
"""Pairs of one map: the only maps in requests are headers, of which a message has 255."""

NUMBERS_MAX: Final = 2_097_152
"""Numbers in all lists of a request together: 20 ms to count, 8 to parse."""

NUMBER_BYTES_MAX: Final = 10
"""Of a number on the wire."""

FIELDS_MAX: Final = 524_288
"""Fields of all kinds, unknown ones included."""

STEP_FIELDS: Final = 8_192
"""Fields between two breaks of the walk: 8 ms where each is a message, else 1 ms."""

DEPTH_MAX: Final = 32
"""Messages in messages: three, in the deepest request there is."""

_CONTINUATION: Final = bytes(range(0x80, 0x100))

NUMBERS: Final = frozenset(
    {
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
        FieldDescriptor.CPPTYPE_DOUBLE,
        FieldDescriptor.CPPTYPE_FLOAT,
        FieldDescriptor.CPPTYPE_BOOL,
        FieldDescriptor.CPPTYPE_ENUM,
    }
)


class ShapeError(Exception):
    """The request exceeds a bound, or is malformed.

    Attributes:
        field: Path of the field, such as `messages[3].headers`; empty for the request as a whole.
        rule: What it breaks; empty where the bytes are malformed.
    """

    def __init__(self, field: str, rule: str = "") -> None:
        super().__init__(field, rule)
        self.field = field
        self.rule = rule


class _Kind:
    __slots__ = ("has_fields", "has_numbers", "inner", "is_counted", "is_map", "items", "name")

    def __init__(self, field: FieldDescriptor) -> None:
        inner = field.message_type
        self.name = field.name
        self.has_fields = inner is not None
        self.is_map = inner is not None and bool(inner.GetOptions().map_entry)
        self.has_numbers = field.is_repeated and field.cpp_type in NUMBERS
        self.is_counted = field.is_repeated and not self.has_numbers
        self.items = PAIR_ITEMS if self.is_map else MESSAGE_ITEMS if inner else TEXT_ITEMS
        self.inner = inner if inner is not None and not self.is_map and _has_lists(inner) else None


def walk(descriptor: Descriptor, data: bytes) -> Iterator[None]:
    """Check a request, a step at a time; other tasks may run whenever this yields.

    Raises ShapeError.
    """
    walking = _Walk(data)
    return walking.message(descriptor, 0, len(data), "", DEPTH_MAX)


class _Walk:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._fields = 0
        self._items = 0
        self._numbers = 0
        self._pause_at = STEP_FIELDS

    def message(
        self, descriptor: Descriptor, at: int, end: int, path: str, depth: int
    ) -> Iterator[None]:
        data, kinds = self._data, _kinds(descriptor)
        counts: dict[str, int] = {}
        if not depth:
            raise ShapeError(path, "is nested too deep")
        while at < end:
            self._fields += 1
            if self._fields >= self._pause_at:
                if self._fields >= FIELDS_MAX:
                    raise ShapeError("", f"has {FIELDS_MAX} fields or more: send it in parts")
                self._pause_at += STEP_FIELDS
                yield
            key = data[at]
            at += 1
            if key >= 0x80:
                key, at = _varint(self._data, at - 1, end, path)
            kind = kinds.get(key >> 3)
            wire = key & 7
            if wire == LEN:
                begin, at = self._span(at, end, path)
                if kind is None:
                    continue
                if kind.has_numbers:
                    self._count_numbers(kind, begin, at, path)
                elif kind.is_counted:
                    more, at = self._neighbours(kind, key, at, end, path)
                    counts[kind.name] = place = counts.get(kind.name, 0) + 1 + more
                    self._count(kind, place, 1 + more, path)
                    if kind.inner is not None:
                        inside = f"{path}{kind.name}[{place - 1}]."
                        yield from self.message(kind.inner, begin, at, inside, depth - 1)
                elif kind.inner is not None:
                    inside = f"{path}{kind.name}."
                    yield from self.message(kind.inner, begin, at, inside, depth - 1)
            else:
                at = self._scalar(wire, at, end, path)
                if kind is not None and kind.has_numbers:
                    self._add_numbers(kind, 1, path)

    def _span(self, at: int, end: int, path: str) -> tuple[int, int]:
        """Where the bytes of a field begin and end; `at` is at its length."""
        if at >= end:
            raise ShapeError(path)
        length = self._data[at]
        at += 1
        if length >= 0x80:
            length, at = _varint(self._data, at - 1, end, path)
        if at + length > end:
            raise ShapeError(path)
        return at, at + length

    def _neighbours(self, kind: _Kind, key: int, at: int, end: int, path: str) -> tuple[int, int]:
        """How many items of the same list follow, as far as this step goes, and where they end.

        Only of a list of texts or bytes: payloads are most of what is walked over.
        """
        if kind.has_fields or key >= 0x80:
            return 0, at
        data, count, room = self._data, 0, self._pause_at - self._fields - 1
        while count < room and at < end and data[at] == key:
            count += 1
            at += 1
            # Most lengths have two bytes at most, and a call costs as much as the rest.
            low = data[at] if at < end else 0x80
            if low < 0x80:
                at += 1 + low
            elif at + 1 < end and (high := data[at + 1]) < 0x80:
                at += 2 + (low & 0x7F | high << 7)
            else:
                _, at = self._span(at, end, path)
        if at > end:
            raise ShapeError(path)
        self._fields += count
        return count, at

    def _scalar(self, wire: int, at: int, end: int, path: str) -> int:
        if wire == VARINT and at < end:
            byte = self._data[at]
            at += 1
            if byte >= 0x80:
                _, at = _varint(self._data, at - 1, end, path)
            return at
        if wire in (I64, I32) and at + (8 if wire == I64 else 4) <= end:
            return at + (8 if wire == I64 else 4)
        raise ShapeError(path)

    def _count(self, kind: _Kind, place: int, more: int, path: str) -> None:
        self._items += more * kind.items
        if kind.is_map and place > PAIRS_MAX:
            raise ShapeError(f"{path}{kind.name}", f"has more than {PAIRS_MAX} entries")
        if self._items > ITEMS_MAX:
            rule = f"makes more than {ITEMS_MAX} items in the request: send it in parts"
            raise ShapeError(f"{path}{kind.name}", rule)

    def _count_numbers(self, kind: _Kind, begin: int, end: int, path: str) -> None:
        if end - begin > NUMBER_BYTES_MAX * NUMBERS_MAX:
            count = NUMBERS_MAX + 1
        else:
            count = len(self._data[begin:end].translate(None, _CONTINUATION))
        self._add_numbers(kind, count, path)

    def _add_numbers(self, kind: _Kind, count: int, path: str) -> None:
        self._numbers += count
        if self._numbers > NUMBERS_MAX:
            rule = f"makes more than {NUMBERS_MAX} numbers in the request: send it in parts"
            raise ShapeError(f"{path}{kind.name}", rule)


def _varint(data: bytes, at: int, end: int, path: str) -> tuple[int, int]:
    """The number whose first byte is at `at`, and where it ends."""
    try:
        return read_varint(data, at, end)
    except ValueError:
        raise ShapeError(path) from None


@cache
def _kinds(descriptor: Descriptor) -> dict[int, _Kind]:
    """The fields that are or contain lists or maps, by number."""
    found = {field.number: _Kind(field) for field in descriptor.fields}
    return {
        number: kind
        for number, kind in found.items()
        if kind.is_counted or kind.has_numbers or kind.inner is not None
    }


@cache
def _has_lists(descriptor: Descriptor, above: tuple[str, ...] = ()) -> bool:
    """Whether a message of this type has lists or maps, nested ones included."""
    if descriptor.full_name in above:
        return False  # It stands in itself: the outer one is asked.
    above = (*above, descriptor.full_name)
    return any(
        field.is_repeated
        or (field.message_type is not None and _has_lists(field.message_type, above))
        for field in descriptor.fields
    )


def field_at_fault(descriptor: Descriptor, data: bytes) -> str:
    """The path of the first field whose text is not UTF-8, or of the message that is malformed.

    Such as `messages[3].headers`; empty for the request as a whole, and where nothing was found.
    """
    try:
        _find_fault(descriptor, data, "")
    except ShapeError as found:
        return found.field
    return ""


def first_list(descriptor: Descriptor) -> str:
    """A request's first repeated field, which to make shorter; empty if it has none."""
    return next((field.name for field in descriptor.fields if field.is_repeated), "")


def _find_fault(descriptor: Descriptor, data: bytes, path: str) -> None:
    seen: Counter[str] = Counter()
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at, end, path)
        kind = key & 7
        if kind == VARINT:
            _, at = _varint(data, at, end, path)
        elif kind in (I64, I32):
            at += 8 if kind == I64 else 4
        elif kind == LEN:
            length, at = _varint(data, at, end, path)
            field = descriptor.fields_by_number.get(key >> 3)
            if at + length > end:
                raise ShapeError(path)
            if field is not None:
                _check(field, data[at : at + length], path, seen)
            at += length
        else:
            raise ShapeError(path)
    if at > end:
        raise ShapeError(path)


def _check(field: FieldDescriptor, data: bytes, path: str, seen: Counter[str]) -> None:
    inner = field.message_type
    is_map = inner is not None and bool(inner.GetOptions().map_entry)
    name = field.name
    if field.is_repeated and not is_map:
        name += f"[{seen[field.name]}]"
        seen[field.name] += 1
    here = f"{path}.{name}" if path else name
    if field.type == FieldDescriptor.TYPE_STRING:
        try:
            data.decode()
        except UnicodeDecodeError:
            raise ShapeError(here) from None
    elif inner is not None and is_map:
        try:
            _find_fault(inner, data, "")
        except ShapeError:
            raise ShapeError(here) from None  # A key that is not text cannot be named.
    elif inner is not None:
        _find_fault(inner, data, here)
