"""Payloads that do not fit into records, on their way to objects of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from libs.storage.blobs import Blobs
from libs.storage.clocks import Clock
from libs.storage.errors import StorageError
from services.ingest.waiting import Waiting

__all__ = ["Uploads"]


class Uploads:
    """Stores payloads as blobs.

    Attributes:
        size_bytes: What is in memory and not yet handed to the commit loop.
    """

    def __init__(self, blobs: Blobs, clock: Clock, at_once: int) -> None:
        """Upload so many at the same time."""
        self.size_bytes = 0
        self._blobs = blobs
        self._clock = clock
        self._turns = asyncio.Semaphore(at_once)

    @contextmanager
    def counting(self, size_bytes: int) -> Iterator[None]:
        """Count this among what is in memory."""
        self.size_bytes += size_bytes
        try:
            yield
        finally:
            self.size_bytes -= size_bytes

    async def one(self, payload: bytes) -> str:
        """Store a payload; gives its URI."""
        with self.counting(len(payload)):
            async with self._turns:
                return await self._blobs.put(payload)

    async def all_of(self, waiting: Waiting) -> None:
        """Store the large payloads of a publish, but for those known to be duplicates."""
        waiting.began_ms = self._clock.now_ms()
        found = waiting.duplicates.found if waiting.duplicates is not None else {}
        try:
            with self.counting(waiting.accepted.size_bytes):
                async with asyncio.TaskGroup() as uploads:
                    for at in waiting.accepted.large:
                        if at not in found:
                            uploads.create_task(self._put(waiting, at))
        except* StorageError as failed:
            # The other blobs stay: nothing refers to them, and the janitor removes such.
            raise failed.exceptions[0] from None

    async def _put(self, waiting: Waiting, at: int) -> None:
        async with self._turns:
            waiting.uris[at] = await self._blobs.put(waiting.accepted.payloads[at])
