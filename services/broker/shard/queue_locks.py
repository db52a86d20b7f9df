"""Who may take dead letters out of the stored rows of a queue: one at a time.

Whoever reads a row, judges, and writes it anew without what it takes out has the queue's turn from
the reading until what it wrote is durable. So a row that was read is as the command finds it; only
a purge may come in between, which empties the list whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class QueueLocks:
    """The turns of one shard's queues."""

    def __init__(self) -> None:
        """Nobody has one."""
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def of(self, queue_id: str) -> AsyncIterator[None]:
        """Waits for the turn of a queue, and has it."""
        lock = self._locks.setdefault(queue_id, asyncio.Lock())
        async with lock:
            yield
