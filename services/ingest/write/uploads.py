"""Payloads that do not fit into records, on their way to objects of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from libs.storage.database.blobs import UPLOAD_AGE_MS_MAX, Blobs
from libs.storage.database.clocks import Clock
from libs.storage.errors import DamagedObject, ObjectNotFound, StorageError, first_raised
from services.ingest.write.waiting import Waiting


def are_old(waiting: Waiting, now_ms: int) -> bool:
    """Whether a publish has objects that are not committed any more."""
    return bool(waiting.uris) and now_ms - waiting.began_ms > UPLOAD_AGE_MS_MAX


class Uploads:
    """Stores payloads as blobs.

    Attributes:
        size_bytes: What is in memory and not yet handed to the commit loop.
    """

    def __init__(self, blobs: Blobs, clock: Clock, at_once: int) -> None:
        self.size_bytes = 0
        self._blobs = blobs
        self._clock = clock
        self._turns = asyncio.Semaphore(at_once)

    @contextmanager
    def counting(self, size_bytes: int) -> Iterator[None]:
        self.size_bytes += size_bytes
        try:
            yield
        finally:
            self.size_bytes -= size_bytes

    async def one(self, payload: bytes) -> str:
        with self.counting(len(payload)):
            async with self._turns:
                return await self._blobs.put(payload)

    async def all_of(self, waiting: Waiting) -> None:
        """Store the large payloads of a publish, without known duplicates."""
        waiting.began_ms = min(self._clock.now_ms(), waiting.began_ms or self._clock.now_ms())
        found = waiting.duplicates.found if waiting.duplicates is not None else {}
        # Where one fails, the others stay: nothing refers to them, and the janitor removes such.
        with first_raised(StorageError), self.counting(waiting.accepted.size_bytes):
            async with asyncio.TaskGroup() as uploads:
                for at in waiting.accepted.large:
                    if at not in found:
                        uploads.create_task(self._put(waiting, at))

    async def _put(self, waiting: Waiting, at: int) -> None:
        async with self._turns:
            waiting.uris[at] = await self._blobs.put(waiting.accepted.payloads[at])

    async def renew(self, waiting: Waiting) -> None:
        """Copy those payloads of a push that were stored as objects too long ago to be committed.

        An outbox may wait for days. Its row still refers to the object from then, and goes soon.
        """
        waiting.began_ms = self._clock.now_ms()
        with first_raised(StorageError):
            async with asyncio.TaskGroup() as renewals:
                for at in list(waiting.uris):
                    renewals.create_task(self._renew(waiting, at))

    async def _renew(self, waiting: Waiting, at: int) -> None:
        uri = waiting.uris[at]
        async with self._turns:
            try:
                stored_ms = await self._blobs.stored_ms(uri)
                if self._clock.now_ms() - stored_ms <= UPLOAD_AGE_MS_MAX:
                    waiting.began_ms = min(waiting.began_ms, stored_ms)
                    return
                payload = await self._blobs.get(uri)
            except (ObjectNotFound, DamagedObject):
                return  # a message without a payload: its queue will say so
            with self.counting(len(payload)):
                waiting.uris[at] = await self._blobs.put(payload)
