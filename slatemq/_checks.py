"""Checks of arguments before they are sent: an error names the argument and what it must be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from slatemq.errors import InvalidArgument

T = TypeVar("T")
M = TypeVar("M", bound=Message)

_EXPECTED = {
    FieldDescriptor.CPPTYPE_INT32: "a whole number",
    FieldDescriptor.CPPTYPE_INT64: "a whole number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "text",
}


def message_of(kind: Callable[..., M], **values: Any) -> M:
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
    except (TypeError, ValueError):
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
    except (TypeError, ValueError) as error:
        # What an iterator of the caller's raises says more than this.
        cause = error if isinstance(value, Iterator) else None
        raise InvalidArgument(field or name, _rule(kind, name, value)) from cause


def _refuse(kind: Callable[..., Message], name: str, value: object, field: str) -> None:
    """Raises TypeError, or InvalidArgument about `field`, for what protobuf alone would take."""
    if isinstance(value, str) and _field(kind, name).is_repeated:
        raise TypeError("text is not a list")
    if isinstance(value, bytes) and _field(kind, name).type == FieldDescriptor.TYPE_STRING:
        raise TypeError("bytes are not text")
    if isinstance(value, Mapping) and _is_mapping(kind, name):
        check_texts(field, value)


def check_texts(field: str, headers: Mapping[str, str]) -> None:
    """Raises InvalidArgument for the first header that is not text."""
    for key, value in headers.items():
        for what in (key, value):
            if not isinstance(what, str):
                raise wrong(f"{field}[{key!r}]", "text", what)


def check_text(field: str, value: str) -> None:
    """Raises InvalidArgument for a value that is not text, or cannot be UTF-8."""
    if not isinstance(value, str):
        raise wrong(field, "text", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, f"must be UTF-8 text: {error}") from None


def check_whole(field: str, value: int, least: int, most: int | None = None) -> None:
    """Raises InvalidArgument for a value that is not a whole number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(field, "a whole number", value)
    if value < least or (most is not None and value > most):
        bounds = f"at least {least:,}" if most is None else f"{least:,} to {most:,}"
        raise InvalidArgument(field, f"must be {bounds}, not {value:,}")


def iterable(field: str, what: str, values: Iterable[T]) -> Iterable[T]:
    """Returns the values; raises InvalidArgument for text, and for anything else than a list."""
    if isinstance(values, str | bytes | bytearray | memoryview) or not isinstance(values, Iterable):
        raise wrong(field, f"a list of {what}", values)
    return values


def moved(error: InvalidArgument, field: str) -> InvalidArgument:
    """The error, but about another field, such as a field of one item of a list."""
    return InvalidArgument(
        field.rstrip("."), error.description, reason=error.reason, metadata=error.metadata
    )


def wrong(field: str, expected: str, value: object) -> InvalidArgument:
    """The error about a value of a wrong type."""
    return InvalidArgument(field, f"must be {expected}, not {type(value).__name__}")


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
    if isinstance(value, int) and not isinstance(value, bool) and expected == "a whole number":
        bits = 32 if field.cpp_type == FieldDescriptor.CPPTYPE_INT32 else 64
        return f"must fit into {bits} bits"
    if field.is_repeated and isinstance(value, list):
        return f"must be {expected}"
    return f"must be {expected}, not {type(value).__name__}"
