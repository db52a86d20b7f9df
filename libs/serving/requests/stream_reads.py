"""The reads of all streams that wait for a message: ended when what arrives takes too much memory.

A stream may wait for hours for its next message, so it cannot stand in line for its turn to receive
one, as calls do (`arrivals`): each asks at once. gRPC says neither that a message has begun to
arrive nor how much of it is there. But all that arrives shows in the memory of the process. When
that grows by more than its work explains, the streams that wait are ended: what has arrived on them
is freed, and their callers go on by calls or by other streams.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from libs.serving.requests.arrivals import resident_bytes

__all__ = ["StreamReads"]

log = logging.getLogger(__name__)

LOOK_S: Final = 0.05
"""Between two looks at the memory of the process: within it some 100 MB arrive on loopback."""

LOOKS: Final = 100
"""Growth is what came since the lowest of the last looks: those of 5 s."""

HELD_FACTOR: Final = 2
"""What the service holds for its callers takes this multiple of its bytes, copies included."""


class StreamReads:
    """The stream reads that wait for a message, or for memory for it."""

    def __init__(
        self,
        growth_bytes_max: int,
        held_bytes: Callable[[], int],
        resident: Callable[[], int] | None = None,
    ) -> None:
        """End reads when the process grows by more than this within `LOOKS` looks.

        It may grow besides by what `held_bytes` gives: what the service holds for its callers.
        `resident` gives the memory of the process.
        """
        self._growth_bytes_max = growth_bytes_max
        self._held_bytes = held_bytes
        self._held: deque[int] = deque(maxlen=LOOKS)
        self._resident = resident or resident_bytes
        self._waiting: dict[asyncio.Timeout, None] = {}
        self._resident_bytes: deque[int] = deque(maxlen=LOOKS)
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, read: asyncio.Timeout) -> None:
        """Begin a read in this scope; TimeoutError ends it when memory is short."""
        self._waiting[read] = None
        if self._timer is None:
            self._look_later()

    def end(self, read: asyncio.Timeout) -> None:
        self._waiting.pop(read, None)

    def look(self) -> None:
        """End all reads if the process has grown by too much."""
        if not self._waiting:
            self._timer = None
            self._resident_bytes.clear()
            self._held.clear()
            return
        self._look_later()
        resident = self._resident()
        self._resident_bytes.append(resident)
        self._held.append(self._held_bytes())
        growth_bytes = resident - min(self._resident_bytes)
        if growth_bytes <= self._growth_bytes_max + HELD_FACTOR * max(self._held):
            return
        log.warning(
            "the process grew by %d MiB in a few seconds: streams that wait for messages are "
            "ended, since large ones may be arriving on them",
            growth_bytes >> 20,
            extra={"streams": len(self._waiting)},
        )
        # Growth counts from here: those who come back are not ended for what is over.
        self._resident_bytes.clear()
        self._resident_bytes.append(resident)
        now = asyncio.get_running_loop().time()
        waiting, self._waiting = self._waiting, {}
        for read in waiting:
            read.reschedule(now)

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self.look)
