"""Protobuf's wire format written by hand, for the messages that pass by the hundred thousand.

An object per message costs 3 to 6 µs on its way through a process; pieces of bytes that are put
together cost 1 or less. docs/decisions/0015-messages-as-bytes.md names the places that write it so,
and what they save. Field numbers come from the generated descriptors (`tag_of`), never from a
literal, so a field that is renumbered is renumbered here.

The format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import eq, rshift
from typing import Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

VARINT, I64, LEN, I32 = 0, 1, 2, 5
"""Wire types: the lower three bits of a tag."""

_VARINTS: Final = {
    FieldDescriptor.TYPE_INT32,
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_UINT64,
}
_FRAMED: Final = {
    FieldDescriptor.TYPE_BYTES,
    FieldDescriptor.TYPE_MESSAGE,
    FieldDescriptor.TYPE_STRING,
}

_LAST: Final = [bytes((n,)) for n in range(0x80)]
_CONTINUED: Final = [bytes((n | 0x80,)) for n in range(0x80)]

_SHORT: Final = _LAST + [low + high for high in _LAST[1:] for low in _CONTINUED]
"""The varints of the numbers below 2^14, which most lengths are."""

_MORE: Final = [low + high for high in _CONTINUED for low in _CONTINUED]
"""The first two bytes of longer ones, by the number's lower 14 bits."""


SHORT_LENGTH: Final = b"%c"
SHORT_CONTENT: Final = SHORT_LENGTH + b"%b"
"""Formats of a length below 0x80, which is one byte, without and with what has this length: for
small fields that are put together in one step."""


def varint(number: int) -> bytes:
    """A number from 0 to 2^64 - 1."""
    encoded = b""
    while number >= 1 << 14:
        encoded += _MORE[number & 0x3FFF]
        number >>= 14
    return encoded + _SHORT[number]


def read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends. Raises ValueError where it has no end."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a varint without an end")


def varints_of(numbers: Sequence[int]) -> list[bytes]:
    """These numbers, at least one: fast where they are in a row, or above 16,383."""
    first, count = numbers[0], len(numbers)
    if count == 1:
        return [varint(first)]
    if numbers[-1] - first == count - 1 and all(map(eq, numbers, range(first, first + count))):
        return _varints(first, count)
    rests = {high: varint(high) for high in set(map(rshift, numbers, repeat(14)))}
    if 0 in rests:
        return list(map(varint, numbers))
    return [_MORE[number & 0x3FFF] + rests[number >> 14] for number in numbers]


def _varints(first: int, count: int) -> list[bytes]:
    """The numbers from `first` on: most of them differ in their first two bytes alone."""
    encoded: list[bytes] = []
    while len(encoded) < count:
        low, high = first & 0x3FFF, first >> 14
        end = min(low + count - len(encoded), 1 << 14)
        if high:
            rest = varint(high)
            encoded += [start + rest for start in _MORE[low:end]]
        else:
            encoded += _SHORT[low:end]
        first += end - low
    return encoded


def packed_varints(numbers: Sequence[int]) -> bytes:
    """The content of a packed field with these numbers, at least one."""
    first, count = numbers[0], len(numbers)
    low, high = first & 0x3FFF, first >> 14
    if not high or low + count > 1 << 14 or tuple(numbers) != tuple(range(first, first + count)):
        return b"".join(varints_of(numbers))
    rest = varint(high)
    return rest.join(_MORE[low : low + count]) + rest


def tag_of(message: type[Message], name: str) -> bytes:
    """What stands before a field: its number and its wire type.

    ValueError for kinds that this module does not write.
    """
    described = message.DESCRIPTOR.fields_by_name[name]
    if described.type in _VARINTS and not described.is_repeated:
        return varint(described.number << 3 | VARINT)
    if described.type in _FRAMED or described.is_packed:
        return varint(described.number << 3 | LEN)
    raise ValueError(f"{message.DESCRIPTOR.full_name}.{name} is of another kind")


def number_field(tag: bytes, number: int) -> bytes:
    """An integer field; nothing for 0, as in proto3."""
    return tag + varint(number) if number else b""


def framed(tag: bytes, content: bytes) -> bytes:
    """A field of bytes, text, a message or packed numbers, encoded already; also where empty."""
    return tag + varint(len(content)) + content


def framed_each(tag: bytes, contents: Sequence[bytes]) -> list[bytes]:
    """A repeated field of bytes with at least one item, in pieces: before each item its head."""
    sizes = list(map(len, contents))
    pieces = [tag + varint(sizes[0]), b""] * len(sizes)
    if sizes.count(sizes[0]) < len(sizes):
        heads = {size: tag + varint(size) for size in set(sizes)}
        pieces[0::2] = map(heads.__getitem__, sizes)
    pieces[1::2] = contents
    return pieces
