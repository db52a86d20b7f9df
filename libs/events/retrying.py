"""Waiting for a backend that is down."""

from __future__ import annotations

import asyncio
import logging
import random
import time

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0
WARN_AFTER_S = 5.0
"""How long a backend must be down to be logged."""


class Outage:
    """An outage of a backend: how long it lasts, how long to wait before the next try."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        """Up at first. `what` begins the lines in the log."""
        self._log = log
        self._what = what
        self._began: float | None = None
        self._warned = False
        self._delay_s = FIRST_DELAY_S

    async def wait(self, error: Exception) -> None:
        """Wait after a failure, longer each time, jittered; log once when it lasts."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if not self._warned and now - self._began >= WARN_AFTER_S:
            self._warned = True
            self._log.warning("%s is down: %s; trying until it is back", self._what, error)
        await asyncio.sleep(self._delay_s * random.uniform(0.5, 1.0))
        self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)

    def end(self) -> None:
        if self._warned and self._began is not None:
            self._log.warning("%s is back after %.0f s", self._what, time.monotonic() - self._began)
        self._began = None
        self._warned = False
        self._delay_s = FIRST_DELAY_S
