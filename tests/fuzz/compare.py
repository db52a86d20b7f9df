"""What targets share: what is wrong with a result, and coroutines that end by themselves."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Wrong(AssertionError):
    """A target that returned, and whose result cannot be right."""


def same(one: object, other: object, what: str) -> None:
    """Raise Wrong unless these are equal."""
    if one != other:
        raise Wrong(f"{what}: {one!r} and {other!r}")


def refused(read: Callable[[], object], error: type[Exception], what: str) -> None:
    """Raise Wrong unless `read` raises this error."""
    try:
        found = read()
    except error:
        return
    raise Wrong(f"{what}: {found!r}")


def ended(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that waits for nothing but its turn."""
    try:
        while True:
            coroutine.send(None)
    except StopIteration as end:
        return cast("T", end.value)
