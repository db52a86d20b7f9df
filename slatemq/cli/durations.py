"""Durations as people write them: 500ms, 30s, 2h, 7d, 1h30m."""

from __future__ import annotations

import re

_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}

_DURATION = re.compile(
    r"(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m(?!s))?(?:(?P<s>\d+)s)?(?:(?P<ms>\d+)ms)?",
    re.ASCII,
)

DIGITS_MAX = 15

DURATION_MS_MAX = 4_294_967_295_000
"""The longest that any setting takes: 2^32 - 1 seconds, some 136 years."""


def parse_duration(text: str) -> int:
    """Milliseconds: numbers with units, larger units first, or a bare 0. Raises ValueError."""
    if text == "0":
        return 0
    found = _DURATION.fullmatch(text)
    if found is None or not text:
        raise ValueError(
            f"{text!r} is not a valid duration: write numbers with units (d, h, m, s, ms), the "
            "larger units first, e.g. 500ms, 30s, 1h30m, 7d"
        )
    parts = {unit: digits for unit, digits in found.groupdict().items() if digits}
    length = DURATION_MS_MAX + 1
    if all(len(digits) <= DIGITS_MAX for digits in parts.values()):
        length = sum(int(digits) * _UNITS_MS[unit] for unit, digits in parts.items())
    if length > DURATION_MS_MAX:
        raise ValueError(f"{text!r} is too long: at most 136 years")
    return length


def format_duration(length_ms: int) -> str:
    """The shortest form that `parse_duration` reads."""
    if length_ms == 0:
        return "0"
    written, left = "", length_ms
    for unit, size in _UNITS_MS.items():
        count, left = divmod(left, size)
        if count:
            written += f"{count}{unit}"
    return written
