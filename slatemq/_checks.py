"""Checks of arguments before they are sent: an error names the argument and what it must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import iscoroutinefunction
from typing import Any, TypeVar

from slatemq.errors import InvalidArgument

T = TypeVar("T")

WHOLE_MAX = (1 << 63) - 1
"""The largest whole number that a message can have."""

TEXTS = (str, bytes, bytearray, memoryview)
"""What can be iterated over, and yet is not meant as a list."""


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
    if value > WHOLE_MAX:
        raise InvalidArgument(field, "must fit into 64 bits")
    if value < least or (most is not None and value > most):
        bounds = f"at least {least:,}" if most is None else f"{least:,} to {most:,}"
        raise InvalidArgument(field, f"must be {bounds}, not {value:,}")


def check_flag(field: str, value: bool) -> None:
    """Raises InvalidArgument for a value that is neither true nor false."""
    if not isinstance(value, bool):
        raise wrong(field, "true or false", value)


def check_kind(field: str, value: object, kind: Any, expected: str = "") -> None:
    """Raises InvalidArgument for a value of another type; `expected`: the type in words."""
    if not isinstance(value, kind):
        raise wrong(field, expected or f"a {kind.__name__}", value)


def check_on_progress(value: object) -> None:
    """Raises InvalidArgument for what cannot be called, or would have to be awaited."""
    if not callable(value):
        raise wrong("on_progress", "a function", value)
    if iscoroutinefunction(value):
        raise InvalidArgument("on_progress", "must be a plain function, not an async one")


def iterable(field: str, what: str, values: Iterable[T]) -> Iterable[T]:
    """Returns the values; raises InvalidArgument for text, and for anything else than a list."""
    if isinstance(values, TEXTS) or not isinstance(values, Iterable):
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
