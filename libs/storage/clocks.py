"""Time that never goes back, and the wait that SlateDB asks for after a clock that did."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

__all__ = ["Clock", "HybridClock", "wait_until_past"]

_LOOK_AGAIN_MS: Final = 1000


class Clock(Protocol):
    """Milliseconds since the Unix epoch, UTC, never going back."""

    def now_ms(self) -> int:
        """The time now."""


class HybridClock:
    """max(last + monotonic time passed, wall clock), going on from the last value that was kept.

    It never goes back, whatever the wall clock does, and never stands still while that is behind.
    `wall` gives seconds since the epoch, `monotonic` seconds from anywhere.
    """

    def __init__(
        self,
        last_ms: int = 0,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._base_ms = last_ms
        self._base_at = monotonic()

    def now_ms(self) -> int:
        """The time now; at least every value given before."""
        at = self._monotonic()
        passed_ms = int((at - self._base_at) * 1000)
        now = self._base_ms + passed_ms
        wall = int(self._wall() * 1000)
        if wall > now:
            self._base_ms, self._base_at = wall, at
            return wall
        return now


async def wait_until_past(
    last_ms: int,
    waiting: Callable[[int], None],
    wall: Callable[[], float] = time.time,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Returns once the wall clock is past `last_ms`, the time of the last commit.

    SlateDB refuses writes behind its own last tick and then closes the database, so nothing may be
    written before this returns. `waiting(behind_ms)` is called before each sleep of at most a
    second: log it, and answer NOT_SERVING until this returns.
    """
    while True:
        behind_ms = last_ms - int(wall() * 1000)
        if behind_ms < 0:
            return
        waiting(behind_ms)
        await sleep(min(behind_ms + 1, _LOOK_AGAIN_MS) / 1000)
