"""Messages of the API from checked arguments, and plain values from messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from math import isnan
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from slatemq._checks import TEXTS, check_texts
from slatemq.errors import InvalidArgument

M = TypeVar("M", bound=Message)

_EXPECTED = {
    FieldDescriptor.CPPTYPE_INT32: "a whole number",
    FieldDescriptor.CPPTYPE_INT64: "a whole number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "text",
}


def message_of(kind: Callable[..., M], /, **values: Any) -> M:
    """A message of the API; raises InvalidArgument for the first field that cannot hold its value.

    Text in the place of a list is refused, too: it would be a list of characters.
    """
    for name, value in values.items():
        if isinstance(value, Iterator):
            values[name] = list(value)  # Looked at again when a field is wrong.
    try:
        for name, value in values.items():
            _refuse(kind, name, value, name)
        return kind(**values)
    except (TypeError, ValueError, OverflowError):
        pass  # The loop finds which field it is.
    for name, value in values.items():
        check_field(kind, name, value)
    return kind(**values)


def fields_of(wire: Message, kind: type) -> dict[str, Any]:
    """The plain values of a wire message that this dataclass has under the same names.

    A field that is not set is None where the dataclass allows None.
    """
    return {
        name: getattr(wire, name) if not may_be_none or wire.HasField(name) else None
        for name, may_be_none in _plain_fields(wire.DESCRIPTOR, kind)
    }


@cache
def _plain_fields(wire: Descriptor, kind: Any) -> list[tuple[str, bool]]:
    types = {one.name: str(one.type) for one in fields(kind)}
    return [
        (one.name, one.has_presence and types[one.name].endswith("| None"))
        for one in wire.fields
        if one.name in types
        and not one.is_repeated
        and one.message_type is None
        and one.enum_type is None
    ]


def check_field(kind: Callable[..., Message], name: str, value: object, field: str = "") -> None:
    """Raises InvalidArgument, about `field` (else `name`), when the field cannot hold the value."""
    try:
        _refuse(kind, name, value, field or name)
        kind(**{name: value})
    except UnicodeEncodeError as error:
        raise InvalidArgument(field or name, f"must be UTF-8 text: {error}") from None
    except (TypeError, ValueError, OverflowError) as error:
        # What an iterator of the caller's raises says more than this.
        cause = error if isinstance(value, Iterator) else None
        raise InvalidArgument(field or name, _rule(kind, name, value)) from cause


def _refuse(kind: Callable[..., Message], name: str, value: object, field: str) -> None:
    """Raises TypeError, or InvalidArgument about `field`, for what protobuf alone would take."""
    described = _field(kind, name)
    if value is None:
        if not described.has_presence:
            raise TypeError("the default would be sent")
    elif described.is_repeated:
        if isinstance(value, TEXTS):
            raise TypeError("text is not a list")
        if _is_mapping(kind, name):
            if not isinstance(value, Mapping):
                raise TypeError("pairs are not a mapping")
            check_texts(field, value)
    elif isinstance(value, float) and isnan(value):
        raise InvalidArgument(field, "must be a number, not nan")
    elif isinstance(value, bytes) and described.type == FieldDescriptor.TYPE_STRING:
        raise TypeError("bytes are not text")
    elif isinstance(value, bool) != (described.cpp_type == FieldDescriptor.CPPTYPE_BOOL):
        raise TypeError("true and false are not numbers")


def _is_mapping(kind: Callable[..., Message], name: str) -> bool:
    described = _field(kind, name).message_type
    return described is not None and described.GetOptions().map_entry


def _field(kind: Callable[..., Message], name: str) -> FieldDescriptor:
    described: Any = kind
    found: FieldDescriptor = described.DESCRIPTOR.fields_by_name[name]
    return found


def _rule(kind: Callable[..., Message], name: str, value: object) -> str:
    field = _field(kind, name)
    if field.type == FieldDescriptor.TYPE_BYTES:
        # Where text is taken, too, it is bytes by now.
        expected = "bytes" if isinstance(value, str) else "bytes or text"
    elif field.message_type is None:
        expected = _EXPECTED[field.cpp_type]
    elif _is_mapping(kind, name):
        expected = "a mapping of text to text"
    else:
        expected = f"a {field.message_type.name}"
    if field.is_repeated and not expected.startswith("a mapping"):
        expected = f"a list of {expected.removeprefix('a ')}" + ("s" if expected != "text" else "")
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and expected in ("a whole number", "a number")
    ):
        bits = 32 if field.cpp_type == FieldDescriptor.CPPTYPE_INT32 else 64
        return f"must fit into {bits} bits"
    if field.is_repeated and isinstance(value, list):
        return f"must be {expected}"
    return f"must be {expected}, not {type(value).__name__}"
