"""Streams that each announce a large message, send it slowly, and never all of it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from tests.faults.hostile.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEAD_BYTES,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    TABLE_SIZE,
    WINDOW,
    WINDOW_UPDATE,
    block,
    call_fields,
    frame,
    message,
    settings,
)

STREAMS: Final = 24
ANNOUNCED_BYTES: Final = 90 << 20
"""The largest request of a call is 97 MiB: a larger message is refused by gRPC as it begins."""

FRAMES: Final = 7
FRAME_BYTES: Final = 10_000
PAUSE_S: Final = 0.05
"""All together send 34 MB/s at most: growth by more than 256 MiB in 5 s is not slow."""


class SlowStream:
    """One stream on a connection of its own.

    Attributes:
        is_ended: Whether the server has ended it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.is_ended = False
        self._reader = reader
        self._writer = writer
        self._window = self._initial = self._stream_window = 65_535

    async def send(self, path: str) -> None:
        fields = block(call_fields(path.encode()))
        self._write(PREFACE + settings((TABLE_SIZE, 0)) + frame(HEADERS, END_HEADERS, 1, fields))
        self._data(message(b"", length=ANNOUNCED_BYTES))
        sent_bytes = 0
        while not self.is_ended and sent_bytes < ANNOUNCED_BYTES - FRAME_BYTES:
            # What the windows or a busy machine do not let through is not caught up with: that
            # would be fast.
            for _ in range(FRAMES):
                if min(self._window, self._stream_window) >= FRAME_BYTES:
                    self._data(bytes(FRAME_BYTES))
                    sent_bytes += FRAME_BYTES
            await asyncio.sleep(PAUSE_S)

    async def receive(self) -> None:
        while True:
            head = await self._reader.readexactly(HEAD_BYTES)
            kind, flags, stream = struct.unpack(">BBI", head[3:])
            content = await self._reader.readexactly(int.from_bytes(head[:3]))
            if kind == SETTINGS and not flags & ACK:
                for key, value in struct.iter_unpack(">HI", content):
                    if key == WINDOW:
                        self._stream_window += value - self._initial
                        self._initial = value
                self._write(frame(SETTINGS, ACK, 0))
            elif kind == WINDOW_UPDATE and stream:
                self._stream_window += int.from_bytes(content)
            elif kind == WINDOW_UPDATE:
                self._window += int.from_bytes(content)
            elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
                self.is_ended = True

    def close(self) -> None:
        self._writer.transport.abort()

    def _data(self, content: bytes) -> None:
        self._write(frame(DATA, 0, 1, content))
        self._window -= len(content)
        self._stream_window -= len(content)

    def _write(self, data: bytes) -> None:
        self._writer.write(data)


@asynccontextmanager
async def slow_streams(address: str, path: str) -> AsyncIterator[list[SlowStream]]:
    """Such streams at this method, until the context ends; then their connections are closed."""
    host, _, port = address.rpartition(":")
    streams = [SlowStream(*await asyncio.open_connection(host, int(port))) for _ in range(STREAMS)]
    tasks = [asyncio.create_task(stream.send(path)) for stream in streams]
    tasks += [asyncio.create_task(stream.receive()) for stream in streams]
    try:
        yield streams
    finally:
        for task in tasks:
            task.cancel()
        for stream in streams:
            stream.close()
        with suppress(OSError, asyncio.IncompleteReadError):
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended
