"""The states of entries, their control characters, and checks of arguments."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")


class State(StrEnum):
    """The state of an entry, by its control character."""

    QUEUED = "queued"
    PROCESSED = "processed"
    ERROR = "error"
    COMMENT = "comment"
    UNKNOWN = "unknown"


CONTROLS = {
    State.QUEUED: "-",
    State.PROCESSED: "=",
    State.ERROR: "!",
    State.COMMENT: "#",
}

STATES = {ord(control): state for state, control in CONTROLS.items()}

BYTE_ORDER_MARK = "\ufeff"
"""Some editors write it first, which makes the first entry one of an unknown kind."""

MARK_ADVICE = "a byte order mark (BOM): save the file as UTF-8 without it"


def of_kind(value: T, kind: type[T], name: str) -> T:
    """Returns the value; raises TypeError for one of another type."""
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


def state_of(value: State | str) -> State:
    """A state by its name. Raises ValueError."""
    try:
        return State(value)
    except ValueError:
        names = ", ".join(State)
        raise ValueError(f"a state must be one of {names}, not {value!r:.60}") from None
