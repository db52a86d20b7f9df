"""The states of entries, and their control characters."""

from __future__ import annotations

from enum import StrEnum


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
