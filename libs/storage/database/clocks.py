"""Time that never goes back, and the wait that SlateDB needs after the wall clock went back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from libs.storage.errors import ClockOutOfRange
from libs.storage.layout.buckets import MAX_ORDER_MS

_LOOK_AGAIN_MS: Final = 1000

log = logging.getLogger(__name__)


STEP_MS: Final = 1000
"""A wall clock further ahead than this has stepped: by hand, by NTP, or a suspended machine."""

STEP_HOLD_S: Final = 30.0
"""How long a step must last before it is followed; one that is undone sooner has no effect."""


LAST_MS: Final = MAX_ORDER_MS - (1 << 21)
"""The last time, in 2248, that the keys of records can have."""


class Clock(Protocol):
    """Milliseconds since the Unix epoch, UTC, never going back."""

    @property
    def stepped_ms(self) -> int:
        """The sum of the steps of the wall clock that this clock has followed.

        Subtract its growth from a duration measured by `now_ms`.
        """

    def now_ms(self) -> int:
        """The time in ms since 1970, never less than a value returned before."""


class HybridClock:
    """max(last + monotonic time passed, wall clock), starting from the last value that was stored.

    It never goes back, and does not stand still while the wall clock is behind. A step ahead by
    more than STEP_MS is followed when it has lasted for STEP_HOLD_S, unless it leads beyond
    LAST_MS. `wall` returns seconds since the epoch, `monotonic` seconds from any origin.

    Raises ClockOutOfRange where it would begin beyond LAST_MS.
    """

    def __init__(
        self,
        last_ms: int = 0,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        # A process that starts takes the wall clock as it is.
        self._base_ms = max(last_ms, int(wall() * 1000))
        if self._base_ms > LAST_MS:
            raise ClockOutOfRange(self._base_ms, LAST_MS)
        self._base_at = monotonic()
        self._stepped_at: float | None = None
        self.stepped_ms = 0

    def now_ms(self) -> int:
        # The wall clock first: a process that stands still between the two would otherwise believe
        # that it has stepped ahead, and stay ahead of it.
        wall_ms = int(self._wall() * 1000)
        at = self._monotonic()
        now = min(self._base_ms + int((at - self._base_at) * 1000), LAST_MS)
        ahead_ms = wall_ms - now
        if now + ahead_ms > LAST_MS:
            return now
        if ahead_ms <= STEP_MS:
            self._stepped_at = None
        elif not self._has_lasted(at, ahead_ms):
            return now
        if ahead_ms > 0:
            self._base_ms, self._base_at = now + ahead_ms, at
            return now + ahead_ms
        return now

    def _has_lasted(self, at: float, ahead_ms: int) -> bool:
        if self._stepped_at is None:
            self._stepped_at = at
            log.warning(
                "the wall clock stepped ahead by %.1f s: followed if it stays so for %.0f s",
                ahead_ms / 1000,
                STEP_HOLD_S,
            )
        if at - self._stepped_at < STEP_HOLD_S:
            return False
        self._stepped_at = None
        self.stepped_ms += ahead_ms
        log.warning("following the wall clock, %.1f s ahead", ahead_ms / 1000)
        return True


async def wait_until_past(
    last_ms: int,
    waiting: Callable[[int], None],
    wall: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Return once the wall clock is past `last_ms`, the time of the last commit.

    SlateDB refuses a write with a tick before its last one and then closes the database, so write
    nothing before this returns. `waiting(behind_ms)` is called before each sleep of at most a
    second.
    """
    while True:
        behind_ms = last_ms - int(wall() * 1000)
        if behind_ms < 0:
            return
        waiting(behind_ms)
        await sleep(min(behind_ms + 1, _LOOK_AGAIN_MS) / 1000)
