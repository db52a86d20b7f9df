"""Checks that several of the broker's calls share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from math import inf
from typing import Final, TypeVar

from libs.access.current import may
from slatemq.errors import InvalidArgument

LEASE_MS_MIN = 1000
REASON_BYTES_MAX = 1024
KNOWN_AWAITED_MAX = 1000
"""The most ingests that an instance is planned for; 10,000 waiting claims may each list them."""

JUDGED_QUEUES: Final = 500
"""Judged by the caller's rules in one step: a few milliseconds, in which nothing else runs."""


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


async def inspectable(queue_ids: Iterable[str], most: int | None = None) -> list[str]:
    """The queues that the caller may inspect, the first ones, in their order. Judged in steps."""
    found: list[str] = []
    for number, queue_id in enumerate(queue_ids, 1):
        if may("inspect", queue_id):
            found.append(queue_id)
            if len(found) == most:
                break
        if number % JUDGED_QUEUES == 0:
            await asyncio.sleep(0)
    return found
