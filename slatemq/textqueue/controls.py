"""What an entry is, and the control character that says so."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """What an entry is, by its control character."""

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
"""What some editors put before a file's first character, so that this begins no entry we know."""

MARK_ADVICE = "a byte order mark (BOM): save the file as UTF-8 without it"
