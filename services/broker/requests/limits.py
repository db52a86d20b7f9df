"""Checks that several of the broker's calls share."""

from __future__ import annotations

from math import inf
from typing import TypeVar

from slatemq.errors import InvalidArgument

LEASE_MS_MIN = 1000
REASON_BYTES_MAX = 1024
KNOWN_AWAITED_MAX = 1000
"""The most ingests that an instance is planned for; 10,000 waiting claims may each list them."""


N = TypeVar("N", int, float)


def within(field: str, value: N, least: float, most: float | None = None) -> N:
    """The value; InvalidArgument naming the field when it is out of bounds."""
    if not least <= value <= (inf if most is None else most):  # refuses NaN, too
        bounds = f"at least {least}" if most is None else f"{least}..{most}"
        raise InvalidArgument(field, f"must be {bounds}, not {value}", reason="OUT_OF_RANGE")
    return value


def within_count(field: str, count: int, most: int) -> None:
    """Raises InvalidArgument naming the field when it has more items than fit."""
    if count > most:
        raise InvalidArgument(
            field, f"has {count} items, the limit is {most}", reason="OUT_OF_RANGE"
        )


def within_bytes(field: str, text: str, most: int) -> str:
    """The text; InvalidArgument naming the field when it has too many bytes."""
    if len(text.encode()) > most:
        raise InvalidArgument(field, f"has more than {most} bytes")
    return text


def not_negative(field: str, value: int) -> int:
    """The value; InvalidArgument naming the field when it is below 0."""
    if value < 0:
        raise InvalidArgument(field, "must not be negative", reason="OUT_OF_RANGE")
    return value


def lease_ms_of(field: str, asked_ms: int) -> int:
    """The lease asked for, 0 = none; InvalidArgument when it is too short."""
    if asked_ms and asked_ms < LEASE_MS_MIN:
        raise InvalidArgument(
            field, f"must be 0 or at least {LEASE_MS_MIN}, not {asked_ms}", reason="OUT_OF_RANGE"
        )
    return asked_ms
