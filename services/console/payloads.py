"""Places for payloads, which may take 64 MiB each: few are in memory at once.

::

    page ───────────────────────────► place to read ─► message ─► page
    download ─► place of a download ─► place to read ─► message ─► parts, as the browser takes them
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Final

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from services.console.clients import CALL_S
from slatemq.errors import ResourceExhausted

log = logging.getLogger(__name__)

READS_MAX: Final = 1
"""Messages that are read with their payloads at once, or made into a page."""

READ_COPIES: Final = 4
"""Of a payload while it is read, at most."""

DOWNLOADS_MAX: Final = 2
"""Payloads on their way to browsers."""

DOWNLOAD_S: Final = 600.0
"""How long a browser may take for one."""

PART_BYTES: Final = 256 * 1024


class Payloads:
    def __init__(self) -> None:
        self._reads = asyncio.Semaphore(READS_MAX)
        self._downloads = asyncio.Semaphore(DOWNLOADS_MAX)

    def place_to_read(self) -> AbstractAsyncContextManager[None]:
        """Raises ResourceExhausted after some seconds without one."""
        return _place(self._reads, "others are reading messages")

    def place_of_download(self) -> AbstractAsyncContextManager[None]:
        """Raises ResourceExhausted after some seconds without one."""
        return _place(self._downloads, f"{DOWNLOADS_MAX} payloads are being downloaded")


class Download(StreamingResponse):
    """A payload as a file that no browser opens by itself; `place` is left at its end."""

    def __init__(self, payload: bytes, filename: str, place: AsyncExitStack) -> None:
        headers = {
            "Content-Disposition": f'attachment; filename="{filename}"',
            "Content-Length": str(len(payload)),
        }
        super().__init__(_parts(payload), 200, headers, "application/octet-stream")
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._place:
            try:
                async with asyncio.timeout(DOWNLOAD_S):
                    await super().__call__(scope, receive, send)
            except TimeoutError:
                log.warning("a download was ended after %d s", DOWNLOAD_S)


async def _parts(payload: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(payload), PART_BYTES):
        yield payload[start : start + PART_BYTES]


@asynccontextmanager
async def _place(places: asyncio.Semaphore, reason: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(CALL_S):
            await places.acquire()
    except TimeoutError:
        raise ResourceExhausted(f"{reason}: retry when they have ended") from None
    try:
        yield
    finally:
        places.release()
