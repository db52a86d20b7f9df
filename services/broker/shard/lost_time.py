"""Time that does not count for leases: no consumer could ack or extend in it.

It is lost while the broker starts or drains, when the process stood still, and when its clock
steps. Leases that were alive get a grace then, before any of them ends.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, NamedTuple

from libs.storage.database.clocks import Clock

log = logging.getLogger(__name__)

STANDSTILL_S: Final = 1.0
"""A loop that has not run for so long has stood still: acks that arrived are not read yet."""

LOOK_S: Final = 0.25
"""How often the loop notes that it runs."""

STEP_SPARE_MS: Final = 100
"""How long before a step of the clock a lease may have ended that was not ended yet."""

HOLD_EVERY_MS: Final = 500
"""How often commits look at held leases at most: no lease is shorter than twice this."""

HOLD_MS: Final = 2000
"""How much time held leases get that are about to end: few need any, and each is written."""


class Lost(NamedTuple):
    """Leases that were alive at `since_ms` have lost what passed until `until_ms`."""

    since_ms: int
    until_ms: int


class LostTime:
    """Notes what time was lost, until it is made up for."""

    def __init__(self, clock: Clock, held_ms: int | None = None) -> None:
        """Hold the leases that were alive at `held_ms`, if that is given."""
        self.held_ms = held_ms
        """Leases that were alive then do not end now; None: they do."""
        self._clock = clock
        self._stepped_ms = clock.stepped_ms
        self._ran_at: tuple[float, int] | None = None  # in seconds and ms
        self._lost: Lost | None = None
        self._looked_ms = 0

    def hold(self) -> None:
        """Let no lease end from now on."""
        if self.held_ms is None:
            self.look()
            lost, now_ms = self._lost, self._clock.now_ms()
            # So are those that were alive before time was lost that is not made up for.
            self.held_ms = now_ms if lost is None else min(now_ms, lost.since_ms)

    def go_on(self) -> None:
        """Let leases end again: those that were held have a grace from now on."""
        if self.held_ms is not None:
            self._note(self.held_ms, self._clock.now_ms())
            self.held_ms = None

    def must_look(self, next_ms: int, now_ms: int) -> bool:
        """Whether held leases must be given time now; the next lease ends at `next_ms`."""
        if self.held_ms is None or next_ms > now_ms + 2 * HOLD_EVERY_MS:
            return False
        if now_ms < self._looked_ms + HOLD_EVERY_MS:
            return False
        self._looked_ms = now_ms
        return True

    async def watch(self) -> None:
        """Note that the loop runs, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> bool:
        """Notes that the loop runs; returns whether time was lost that is not made up for."""
        now_s, now_ms = asyncio.get_running_loop().time(), self._clock.now_ms()
        before_s, before_ms = self._ran_at or (now_s, now_ms)
        self._ran_at = now_s, now_ms
        if now_s - before_s > STANDSTILL_S:
            log.warning(
                "the process did not run for %.1f s: its leases are extended", now_s - before_s
            )
            self._note(before_ms, now_ms)
        step_ms = self._clock.stepped_ms - self._stepped_ms
        if step_ms:
            self._stepped_ms += step_ms
            log.warning("the clock stepped by %.1f s: leases are extended", step_ms / 1000)
            self._note(now_ms - step_ms - STEP_SPARE_MS, now_ms)
        return self._lost is not None

    def take(self) -> Lost | None:
        """What was lost, of which this was the only note."""
        self.look()
        lost, self._lost = self._lost, None
        return lost

    def _note(self, since_ms: int, until_ms: int) -> None:
        before = self._lost or Lost(since_ms, until_ms)
        self._lost = Lost(min(before.since_ms, since_ms), until_ms)
