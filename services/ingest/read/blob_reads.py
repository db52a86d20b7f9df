"""Reads of payloads that are objects of their own: they go on when their callers stop waiting.

A far or throttled store may take longer for one object than any caller's deadline. So a read that
has begun is finished, and its payload is kept for a while, for the caller that asks again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from libs.storage.database.blobs import Blobs
from libs.storage.errors import ObjectNotFound, StorageError, StoreUnavailable
from libs.storage.records.payloads import PayloadUri

log = logging.getLogger(__name__)

SILENCE_S: Final = (15.0, 60.0, 300.0)
"""How long no byte may come before an object is read again from its start; each try is more patient
than the one before, and a payload of any size comes as long as bytes come."""

KEEP_S: Final = 60.0
"""How long a payload is kept of which some caller stopped waiting before it came."""

KEPT_BYTES_MAX: Final = 64 << 20
"""Bytes of such payloads, one alone aside."""


class BlobReads:
    """Reads objects, each once however many callers want it."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._reads: dict[str, asyncio.Task[bytes | None]] = {}
        self._waiting: dict[str, int] = {}
        self._given_up: set[str] = set()
        self._kept: dict[str, int] = {}

    async def read(self, record: PayloadUri) -> bytes | None:
        """The payload; None when its object is gone. Cancelling the caller does not end the read.

        Raises the errors of libs.storage.
        """
        uri = record.uri
        task = self._reads.get(uri)
        if task is None:
            task = self._reads[uri] = asyncio.create_task(self._read(uri))
            task.add_done_callback(lambda done: self._ended(uri, done))
        self._waiting[uri] = self._waiting.get(uri, 0) + 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._given_up.add(uri)
            raise
        finally:
            self._waiting[uri] -= 1
            if not self._waiting[uri]:
                del self._waiting[uri]

    async def close(self) -> None:
        reads = list(self._reads.values())
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)

    async def _read(self, uri: str) -> bytes | None:
        try:
            return await self._blobs.get(uri)
        except ObjectNotFound:
            return None
        except StoreUnavailable as error:
            log.info("a payload is read with more patience: %s", error)
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
        payload = None if done.cancelled() or error is not None else done.result()
        has_given_up = uri in self._given_up
        self._given_up.discard(uri)
        if payload is None or not has_given_up:
            del self._reads[uri]
            return
        self._kept[uri] = len(payload)
        while len(self._kept) > 1 and sum(self._kept.values()) > KEPT_BYTES_MAX:
            self._forget(next(iter(self._kept)))
        asyncio.get_running_loop().call_later(KEEP_S, self._forget, uri, done)

    def _forget(self, uri: str, kept: asyncio.Task[bytes | None] | None = None) -> None:
        """Drop a payload, if it is still this one."""
        if uri in self._kept and kept in (None, self._reads[uri]):
            del self._kept[uri], self._reads[uri]
