"""Reads of payloads that are objects of their own: they go on when their callers stop waiting.

A far or throttled store may take longer for one object than any caller's deadline. So a read that
has begun is finished, and its payload is kept for a while, for the caller that asks again. Those
share a budget: beyond it no read begins, since of many at once on a slow store none would end.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from libs.storage.database.blobs import Blobs
from libs.storage.errors import (
    DamagedObject,
    ObjectNotFound,
    StorageError,
    StoreUnavailable,
)
from libs.storage.records.payloads import PayloadUri
from slatemq._byte_budget import ByteBudget
from slatemq._cancelling import end_all

log = logging.getLogger(__name__)

SILENCE_S: Final = (15.0, 60.0, 300.0)
"""How long no byte may come before an object is read again from its start; each try is more patient
than the one before, and a payload of any size comes as long as bytes come."""

KEEP_S: Final = 60.0
"""How long to keep a payload whose caller stopped waiting, or the error that its object is damaged
or gone."""

TAKEN_S: Final = 5.0
"""How long to keep it once a caller has it, which may only have asked whether it is there."""

BYTES_MAX: Final = 128 << 20
"""Bytes of objects being read, and of payloads kept; one object alone aside."""


class BlobReads:
    """Reads objects, each once however many callers want it."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._budget = ByteBudget(BYTES_MAX)
        self._reads: dict[str, asyncio.Task[bytes | None]] = {}
        self._sizes: dict[str, int] = {}
        self._given_up: set[str] = set()
        self._kept: dict[str, asyncio.TimerHandle] = {}

    async def read(self, record: PayloadUri, size_bytes: int) -> bytes | None:
        """The payload; None when its object is gone. Cancelling the caller does not end the read.

        A read begins once the budget has room for it, in the order of the callers that wait for
        it. Raises the errors of libs.storage.
        """
        uri = record.uri
        if uri not in self._reads:
            await self._budget.reserve(size_bytes)
            if uri in self._reads:  # Another caller's, which waited too.
                self._budget.release(size_bytes)
            else:
                self._sizes[uri] = size_bytes
                reading = self._reads[uri] = asyncio.create_task(self._read(uri))
                reading.add_done_callback(lambda done: self._ended(uri, done))
        task = self._reads[uri]
        try:
            payload = await asyncio.shield(task)
        except asyncio.CancelledError:
            self._given_up.add(uri)
            raise
        if uri in self._kept:
            self._keep(uri, TAKEN_S)
        return payload

    async def close(self) -> None:
        await end_all(self._reads.values())

    async def _read(self, uri: str) -> bytes | None:
        try:
            return await self._blobs.get(uri)
        except ObjectNotFound:
            return None
        except StoreUnavailable as error:
            log.info("reading a payload again with a longer timeout: %s", error)
        last = StoreUnavailable(f"reading {uri}")
        for silence_s in SILENCE_S:
            try:
                return await self._blobs.get_slowly(uri, silence_s)
            except ObjectNotFound:
                return None
            except TimeoutError:
                last = StoreUnavailable(f"reading {uri}: nothing came for {silence_s:g} s")
        raise last

    def _ended(self, uri: str, done: asyncio.Task[bytes | None]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None and not isinstance(error, StorageError):
            log.error("reading a payload failed", exc_info=error)
        has_given_up = uri in self._given_up
        self._given_up.discard(uri)
        is_damaged = isinstance(error, DamagedObject)
        if not has_given_up or done.cancelled() or (error is not None and not is_damaged):
            self._forget(uri)
            return
        if is_damaged or done.result() is None:
            # The answer is kept, as a payload is: found again, it might take as long each time.
            self._budget.release(self._sizes[uri])
            self._sizes[uri] = 0
        self._keep(uri, KEEP_S)

    def _keep(self, uri: str, for_s: float) -> None:
        if uri in self._kept:
            self._kept[uri].cancel()
        self._kept[uri] = asyncio.get_running_loop().call_later(for_s, self._forget, uri)

    def _forget(self, uri: str) -> None:
        self._kept.pop(uri, None)
        del self._reads[uri]
        self._budget.release(self._sizes.pop(uri))
