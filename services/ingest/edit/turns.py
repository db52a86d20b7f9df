"""Locks: one change of a log entry at a time.

The messages of a commit share a log entry. So changes of them take turns: each reads the entry, and
the next begins when the changed entry is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakValueDictionary

__all__ = ["Turns"]

T = TypeVar("T")


class Turns:
    """Locks of the entries of one log."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        self._running: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def of(self, sequences: Iterable[int]) -> AsyncIterator[None]:
        """Hold the turns at the entries of these sequences."""
        held: list[asyncio.Lock] = []
        try:
            # In one order for all: no two wait for each other.
            for sequence in sorted(sequences):
                lock = self._locks.setdefault(sequence, asyncio.Lock())
                await lock.acquire()
                held.append(lock)
            yield
        finally:
            for lock in held:
                lock.release()

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end, even if cancelled: the next turn must find it durable."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may have gone
