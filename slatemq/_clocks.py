"""How far the clocks of two machines differ."""

from __future__ import annotations

from typing import Final

from slatemq.models import now_ms

SKEW_MS_MAX: Final = 1_000
"""A clock that is further off delays or hurries deliveries by as much."""


def skew_of(read_ms: int, sent_ms: int) -> int:
    """By how many ms at least another machine's clock is ahead of ours; negative: behind.

    `read_ms` is what it has read at some time between our `sent_ms` and now.
    """
    return min(read_ms - sent_ms, 0) or max(read_ms - now_ms(), 0)
