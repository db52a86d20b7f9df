"""Checks that several of the broker's calls share."""

from __future__ import annotations

from slatemq.errors import InvalidArgument

LEASE_MS_MIN = 1000
REASON_BYTES_MAX = 1024
KNOWN_AWAITED_MAX = 1000
"""As many ingests as an instance is planned for; 10,000 claims may wait, each with such a list."""


def within(field: str, value: int, least: int, most: int | None = None) -> int:
    """The value; InvalidArgument naming the field when it is out of bounds."""
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"{least}..{most}"
        raise InvalidArgument(field, f"must be {bounds}, not {value}", reason="OUT_OF_RANGE")
    return value


def within_count(field: str, count: int, most: int) -> None:
    """Raises InvalidArgument naming the field when it has more items than fit."""
    if count > most:
        raise InvalidArgument(
            field, f"has {count} items, at most {most} fit", reason="OUT_OF_RANGE"
        )


def lease_ms_of(field: str, asked_ms: int) -> int:
    """The lease asked for, 0 = none; InvalidArgument when it is too short."""
    if asked_ms and asked_ms < LEASE_MS_MIN:
        raise InvalidArgument(
            field, f"must be 0 or at least {LEASE_MS_MIN}, not {asked_ms}", reason="OUT_OF_RANGE"
        )
    return asked_ms
