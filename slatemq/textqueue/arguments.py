"""Checks of arguments: each returns its argument, or raises an error that names it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TypeVar

from slatemq.textqueue.controls import State

T = TypeVar("T")

_MS = timedelta(milliseconds=1)


def of_kind(value: T, kind: type[T], name: str) -> T:
    """Raises TypeError."""
    if not isinstance(value, kind):
        raise wrong(name, kind.__name__, value)
    return value


def wrong(name: str, wanted: str, value: object) -> TypeError:
    return TypeError(f"{name} must be {wanted}, not {type(value).__name__}: {value!r:.60}")


def several(texts: Iterable[str], name: str) -> Iterable[str]:
    """Raises TypeError, also for a single text, which is an iterable of its characters."""
    if isinstance(texts, str | bytes):
        raise TypeError(f"{name} must be several texts, not a single one: put it into a list")
    if not isinstance(texts, Iterable):
        raise wrong(name, "several texts", texts)
    return texts


def texts_by_name(values: Mapping[str, str], name: str) -> Mapping[str, str]:
    """Raises TypeError."""
    for key, value in values.items():
        of_kind(key, str, f"a name in {name}")
        of_kind(value, str, f"{name}[{key!r}]")
    return values


def state_of(value: State | str) -> State:
    """A state by its name. Raises ValueError."""
    try:
        return State(value)
    except ValueError:
        names = ", ".join(State)
        raise ValueError(f"a state must be one of {names}, not {value!r:.60}") from None


def width_of(value: int) -> int:
    """Raises TypeError, ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong("width", "a number of bytes", value)
    if value < 0:
        raise ValueError(f"width must be 0 bytes or more, not {value}")
    return value


def milliseconds(lease: timedelta) -> int:
    """A lease in milliseconds. Raises TypeError, ValueError."""
    if not isinstance(lease, timedelta):
        raise wrong("lease", "a timedelta, such as timedelta(minutes=5)", lease)
    if lease < _MS:
        raise ValueError(f"lease must be a millisecond or more, not {lease}")
    return lease // _MS
