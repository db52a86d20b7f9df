"""What is wrong with a target that returns: two results that should be equal, or none refused."""

from __future__ import annotations

from collections.abc import Callable


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
