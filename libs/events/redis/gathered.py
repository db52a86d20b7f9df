"""Items of several callers in one command: what comes while one is under way shares the next.

Redis answers all that one turn of its loop has written after one sync, so callers wait no longer
than they would on connections of their own, and an item costs a fraction of a round trip.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")

ITEMS_MAX: Final = 256

BYTES_MAX: Final = 1 << 20
"""Of one call, unless one item alone has more."""


class _Waiting(NamedTuple, Generic[T]):
    item: T
    size_bytes: int
    done: asyncio.Future[None]


class Gathered(Generic[T]):
    """Sends what gathers, one call after the other."""

    def __init__(self, send: Callable[[Sequence[T]], Awaitable[object]]) -> None:
        """Each caller gets what `send` raises for a call with its item."""
        self._send = send
        self._waiting: deque[_Waiting[T]] = deque()
        self._sending: asyncio.Task[None] | None = None

    async def execute(self, item: T, size_bytes: int = 0) -> None:
        """Send an item. Raises as `send` does.

        Once it is called, the item may take effect, also where the caller is cancelled.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(item, size_bytes, done))
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
        await done

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                await self._send_some(self._take())
        finally:
            self._sending = None
            while self._waiting:  # cancelled: the loop ends
                self._waiting.popleft().done.cancel()

    def _take(self) -> list[_Waiting[T]]:
        taken = [self._waiting.popleft()]
        size_bytes = taken[0].size_bytes
        while self._waiting and len(taken) < ITEMS_MAX:
            size_bytes += self._waiting[0].size_bytes
            if size_bytes > BYTES_MAX:
                break
            taken.append(self._waiting.popleft())
        return taken

    async def _send_some(self, taken: list[_Waiting[T]]) -> None:
        try:
            await self._send([one.item for one in taken])
        except asyncio.CancelledError:
            for one in taken:
                one.done.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - each caller gets it
            for one in taken:
                if not one.done.done():  # its caller may be gone
                    one.done.set_exception(error)
        else:
            for one in taken:
                if not one.done.done():
                    one.done.set_result(None)
