"""A link to a server that tests slow down, stop and cut: a proxy on loopback."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, Self

PIECE_BYTES: Final = 1 << 14


class Link:
    """Leads to a server; what passes is one piece after the other.

    Attributes:
        address: What the client connects to.
        pause_s: How long each piece takes.
        passes: Cleared, nothing passes in either direction.
        passed_bytes: What the server has sent so far, and the client could get.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._target = host, int(port)
        self.address = ""
        self.pause_s = 0.0
        self.passes = asyncio.Event()
        self.passes.set()
        self.passed_bytes = 0
        self._ends: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        # A small buffer: what a slow link has not passed on, the server has not sent.
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=PIECE_BYTES)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.passes.set()
        self.cut()

    def cut(self) -> None:
        """Ends all connections; new ones pass."""
        for end in self._ends:
            end.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far = await asyncio.open_connection(*self._target, limit=PIECE_BYTES)
        ends = {writer, far}
        self._ends |= ends
        try:
            await asyncio.gather(
                self._pump(reader, far, is_answer=False),
                self._pump(far_reader, writer, is_answer=True),
            )
        finally:
            self._ends -= ends

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(PIECE_BYTES):
                await self.passes.wait()
                writer.write(data)
                await writer.drain()
                if is_answer:
                    self.passed_bytes += len(data)
                if self.pause_s:
                    await asyncio.sleep(self.pause_s)
        writer.close()
