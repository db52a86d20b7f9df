"""Bounds on bytes in memory that many share, in the order in which they asked."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final


class ByteBudget:
    """Bytes that may be reserved at once; those that do not fit wait in line.

    A reservation larger than the whole budget gets it while nothing else is reserved, so that none
    waits forever.

    Attributes:
        bytes_max: The budget.
        used_bytes: What is reserved now.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max: Final = bytes_max
        self.used_bytes = 0
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_reserve(self, size_bytes: int) -> bool:
        """Reserve at once, unless it does not fit or others wait."""
        if self._line or not self._fits(size_bytes):
            return False
        self.used_bytes += size_bytes
        return True

    def take(self, size_bytes: int) -> None:
        """Count what is in memory already, whether it fits or not."""
        self.used_bytes += size_bytes

    @property
    def is_full(self) -> bool:
        """Whether any reservation would have to wait."""
        return bool(self._line) or self.used_bytes > self.bytes_max

    async def reserve(self, size_bytes: int) -> None:
        """Reserve once it fits and earlier reservations are granted."""
        if self.try_reserve(size_bytes):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((size_bytes, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.release(size_bytes)
            else:
                granted.cancel()  # Its place in line goes when its turn comes.
                self._grant()
            raise

    def release(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        self._grant()

    def refuse(self, error: Exception) -> None:
        """Raise the error in all that wait."""
        line, self._line = self._line, deque()
        for _, granted in line:
            if not granted.done():
                granted.set_exception(error)

    def change(self, before_bytes: int, after_bytes: int) -> None:
        """Adjust for what is in memory already."""
        self.take(after_bytes)
        self.release(before_bytes)

    def _grant(self) -> None:
        while self._line and (self._line[0][1].done() or self._fits(self._line[0][0])):
            size_bytes, granted = self._line.popleft()
            if not granted.done():
                self.used_bytes += size_bytes
                granted.set_result(None)

    def _fits(self, size_bytes: int) -> bool:
        return not self.used_bytes or self.used_bytes + size_bytes <= self.bytes_max
