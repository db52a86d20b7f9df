"""Which field of a request is at fault: bytes that do not decode, or that are too many.

The protobuf runtime only says that a message does not parse. A text that is not UTF-8 is a mistake
of one field, though, and its sender wants to know which: so the wire format is walked once more,
slowly, for requests that are refused anyway (https://protobuf.dev/programming-guides/encoding/).
"""

from __future__ import annotations

from collections import Counter

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from slatemq._rpc.wire_format import I32, I64, LEN, VARINT, read_varint


class _At(Exception):
    """The path of the field at fault."""


def field_at_fault(descriptor: Descriptor, data: bytes) -> str:
    """The path of the first field whose text is not UTF-8, or of the message that is malformed.

    Such as `messages[3].headers`; empty for the request as a whole, and where nothing was found.
    """
    try:
        _walk(descriptor, data, "")
    except _At as found:
        return str(found)
    return ""


def first_list(descriptor: Descriptor) -> str:
    """A request's first repeated field, which to make shorter; empty if it has none."""
    return next((field.name for field in descriptor.fields if field.is_repeated), "")


def _walk(descriptor: Descriptor, data: bytes, path: str) -> None:
    seen: Counter[str] = Counter()
    at = 0
    while at < len(data):
        key, at = _varint(data, at, path)
        kind = key & 7
        if kind == VARINT:
            _, at = _varint(data, at, path)
        elif kind in (I64, I32):
            at += 8 if kind == I64 else 4
        elif kind == LEN:
            length, at = _varint(data, at, path)
            field = descriptor.fields_by_number.get(key >> 3)
            if at + length > len(data):
                raise _At(path)
            if field is not None:
                _check(field, data[at : at + length], path, seen)
            at += length
        else:
            raise _At(path)
    if at > len(data):
        raise _At(path)


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
            raise _At(here) from None
    elif inner is not None and is_map:
        try:
            _walk(inner, data, "")
        except _At:
            raise _At(here) from None  # A key that is not text cannot be named.
    elif inner is not None:
        _walk(inner, data, here)


def _varint(data: bytes, at: int, path: str) -> tuple[int, int]:
    try:
        return read_varint(data, at, len(data))
    except ValueError:
        raise _At(path) from None
