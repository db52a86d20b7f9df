"""A bound on outstanding bytes; callers wait in line when it is reached."""

from __future__ import annotations

import asyncio
from collections import deque


class ByteSemaphore:
    """Admits a number of bytes at a time, in the order of the calls.

    A caller with more bytes than the bound is admitted when no other is inside: none waits for
    ever, and small ones do not overtake a large one.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_take(self, size: int) -> bool:
        """Takes this many bytes, if there is room and no caller waits."""
        if self._line or not self._fits(size):
            return False
        self._bytes += size
        return True

    async def take(self, size: int) -> None:
        """Waits until this many bytes have room, and takes them."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.release(size)  # It was let in at the moment in which it gave up.
            else:
                self._let_in()  # It may have been the large one in front of small ones.
            raise

    def release(self, size: int) -> None:
        """These bytes are no longer outstanding."""
        self._bytes -= size
        self._let_in()

    def refuse(self, error: Exception) -> None:
        """Fails all waiting callers with this error."""
        line, self._line = self._line, deque()
        for _, turn in line:
            if not turn.done():
                turn.set_exception(error)

    def _let_in(self) -> None:
        while self._line and (self._line[0][1].done() or self._fits(self._line[0][0])):
            size, turn = self._line.popleft()
            if not turn.done():
                self._bytes += size
                turn.set_result(None)

    def _fits(self, size: int) -> bool:
        return not self._bytes or self._bytes + size <= self._bytes_max
