"""Turns for changes of queues, so that messages keep moving beside many of them.

A change takes 3 ms of the broker's event loop, 1 ms of the router's, and two writes. Where callers
make as many as they can, a message's way from publish to delivery takes five times as long as on a
quiet instance (decision 0053). Pausing and resuming wait for no turn: an operator may be in haste.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiolimiter import AsyncLimiter

from slatemq.errors import ResourceExhausted

PER_S: Final = 80

BURST_S: Final = 0.1
"""The changes of so many seconds may come at once."""

WAIT_S: Final = 10.0
"""How long a change waits for its turn; then its caller is told to come back."""


class ChangePace:
    """Lets through so many changes a second; the others wait in the order in which they came."""

    def __init__(self, per_s: int = PER_S, wait_s: float = WAIT_S) -> None:
        """Let `per_s` changes through each second; each waits for `wait_s` at most."""
        self._limiter = AsyncLimiter(max(1.0, per_s * BURST_S), max(1.0, per_s * BURST_S) / per_s)
        self._next = asyncio.Lock()  # The limiter alone lets a late caller pass those who wait.
        self._per_s = per_s
        self._wait_s = wait_s

    async def turn(self) -> None:
        """Wait for the turn of one change. Raises ResourceExhausted."""
        try:
            async with asyncio.timeout(self._wait_s), self._next:
                await self._limiter.acquire()
        except TimeoutError:
            raise ResourceExhausted(
                f"more than {self._per_s} changes of queues a second are wanted of this broker",
                reason="QUEUE_CHANGES",
                retry_after_ms=1000,
            ) from None
