"""Limits the rate at which queues change, so that messages keep moving meanwhile.

A change takes 3 ms of the broker's event loop, 1 ms of the router's, and two writes. If callers
make as many as they can, a message takes five times as long from publish to delivery as on a quiet
instance (decision 0053). Pausing and resuming are not limited: an operator may be in a hurry.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiolimiter import AsyncLimiter

from slatemq.errors import ResourceExhausted

PER_S: Final = 80

BURST_S: Final = 0.1
"""The changes of this time may come in one burst."""

WAIT_S: Final = 10.0
"""How long a change waits for its turn; then its caller has to retry."""


class ChangePace:
    """Lets changes through at a limited rate; the others wait in the order of their arrival."""

    def __init__(self, per_s: int = PER_S, wait_s: float = WAIT_S) -> None:
        """Let `per_s` changes through each second; each waits at most `wait_s`."""
        self._limiter = AsyncLimiter(max(1.0, per_s * BURST_S), max(1.0, per_s * BURST_S) / per_s)
        self._next = asyncio.Lock()  # The limiter alone lets a late caller overtake waiting ones.
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
