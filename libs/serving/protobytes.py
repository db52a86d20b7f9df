"""Protobuf's wire format written by hand, for the few messages that pass by the hundred thousand.

A message that is only handed on need not become an object: what is known of it is put before and
behind the bytes that are there already (https://protobuf.dev/programming-guides/encoding/). An
object per message costs 3 to 6 µs on its way through a process, this 1
(docs/decisions/0015-messages-as-bytes.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import eq, rshift
from typing import Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

__all__ = [
    "field",
    "framed",
    "number_field",
    "packed_varints",
    "tag_of",
    "varint",
    "varints",
    "varints_of",
]

_LEN: Final = 2
_VARINT: Final = 0

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

_SHORT: Final = [
    bytes((n,)) if n < 0x80 else bytes((n & 0x7F | 0x80, n >> 7)) for n in range(1 << 14)
]
"""The varints of most lengths."""

_MORE: Final = [bytes((n & 0x7F | 0x80, n >> 7 | 0x80)) for n in range(1 << 14)]
"""The first two bytes of longer ones."""


def varint(number: int) -> bytes:
    """A number from 0 to 2^64 - 1."""
    encoded = b""
    while number >= 1 << 14:
        encoded += _MORE[number & 0x3FFF]
        number >>= 14
    return encoded + _SHORT[number]


def varints(first: int, count: int) -> list[bytes]:
    """So many numbers from `first` on: most of them differ in their first two bytes alone."""
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


def varints_of(numbers: Sequence[int]) -> list[bytes]:
    """These numbers, at least one: quick where they are in a row, or above 16,383."""
    first, count = numbers[0], len(numbers)
    if count == 1:
        return [varint(first)]
    if numbers[-1] - first == count - 1 and all(map(eq, numbers, range(first, first + count))):
        return varints(first, count)
    rests = {high: varint(high) for high in set(map(rshift, numbers, repeat(14)))}
    if 0 in rests:
        return list(map(varint, numbers))
    return [_MORE[number & 0x3FFF] + rests[number >> 14] for number in numbers]


def packed_varints(numbers: Sequence[int]) -> bytes:
    """The same one behind the other, as a packed field has them."""
    first, count = numbers[0], len(numbers)
    low, high = first & 0x3FFF, first >> 14
    if not high or low + count > 1 << 14 or tuple(numbers) != tuple(range(first, first + count)):
        return b"".join(varints_of(numbers))
    rest = varint(high)
    return rest.join(_MORE[low : low + count]) + rest


def number_field(tag: int, number: int) -> bytes:
    """An integer field; nothing for 0, as in proto3."""
    return varint(tag << 3 | _VARINT) + varint(number) if number else b""


def field(tag: int, content: bytes) -> bytes:
    """A field of bytes, text or a message that is encoded already; also where it is empty."""
    return varint(tag << 3 | _LEN) + varint(len(content)) + content


def tag_of(message: type[Message], name: str) -> bytes:
    """What stands before a field, by the generated code: its number and its kind.

    ValueError for kinds that this module does not write.
    """
    described = message.DESCRIPTOR.fields_by_name[name]
    if described.type in _VARINTS and not described.is_repeated:
        return varint(described.number << 3 | _VARINT)
    if described.type in _FRAMED or described.is_packed:
        return varint(described.number << 3 | _LEN)
    raise ValueError(f"{message.DESCRIPTOR.full_name}.{name} is of another kind")


def framed(tag: bytes, content: bytes) -> bytes:
    """A field of bytes, text, a message or packed numbers, encoded already; also where empty."""
    return tag + varint(len(content)) + content
