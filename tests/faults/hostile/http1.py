"""What comes to a port for HTTP: `GET /health`, `GET /metrics`, and posts."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

from tests.faults.hostile.floods import Attack, held_s, scaled
from tests.faults.hostile.http2 import PREFACE, Port, Writer

_HEAD: Final = b"GET /health HTTP/1.1\r\nHost: x\r\n"

SERVER_ERROR: Final = b"500"

ANSWER_S: Final = 1.0

REQUESTS: Final = (
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /metrics/..%2f..%2fetc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET " + b"/x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    _HEAD + b"x: " + b"y" * 100_000 + b"\r\n\r\n",
    _HEAD + b"".join(b"x-%d: y\r\n" % n for n in range(5_000)) + b"\r\n",
    b"GET /health HTTP/9.9\r\n\r\n",
    b"\r\n" * 1_000,
    b"POST /s3-events HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
    b"POST /s3-events HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked"
    b"\r\n\r\n0\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"DELETE /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    PREFACE,
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
)


def odd_requests(requests: Sequence[bytes]) -> Attack:
    """Requests that are no good; none may be answered 500."""

    async def attack(port: Port, scale: float, chance: random.Random) -> str:
        seen: Counter[str] = Counter()
        for number in range(max(len(requests), scaled(500, scale))):
            data = chance.choice(requests) if number >= len(requests) else requests[number]
            if chance.random() < 0.1:
                data = chance.randbytes(500)
            status = await _status_of(port, data)
            seen[status.decode("latin-1") or "none"] += 1
            if status == SERVER_ERROR:
                raise AssertionError(f"answered 500 to {data[:80]!r}")
        return ", ".join(f"{count} × {status}" for status, count in seen.most_common())

    return attack


async def _status_of(port: Port, data: bytes) -> bytes:
    """The status with which a request is answered; empty where there is no answer."""
    with suppress(OSError, TimeoutError):
        reader, writer = await port.open()
        try:
            await writer.send(data)
            async with asyncio.timeout(ANSWER_S):
                return (await reader.readline())[9:12]
        except ValueError:
            pass  # a line that is too long
        finally:
            writer.close()
    return b""


async def a_large_body(port: Port, scale: float, _: random.Random) -> str:
    """A body that no path takes."""
    sent = 0
    with suppress(OSError, TimeoutError):
        _reader, writer = await port.open()
        await writer.send(b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 400000000\r\n\r\n")
        while sent < scaled(400, scale) and await writer.send(b"x" * (1 << 20)):
            sent += 1
        writer.close()
    return f"{sent} MiB taken"


def held(each: Callable[[Writer, int], Awaitable[object]]) -> Attack:
    async def hold(port: Port, scale: float, _: random.Random) -> str:
        opened = []
        for number in range(scaled(1_000, scale)):
            with suppress(OSError, TimeoutError):
                _reader, writer = await port.open()
                opened.append(writer)
                await each(writer, number)
        end = asyncio.get_running_loop().time() + held_s(scale)
        while asyncio.get_running_loop().time() < end:
            for writer in opened:
                await writer.send(b"x")  # False where it was closed: it stays so
            await asyncio.sleep(0.2)
        for writer in opened:
            writer.close()
        return f"{len(opened)} connections"

    return hold


async def _begun(writer: Writer, _: int) -> None:
    await writer.send(_HEAD + b"x: ")


async def _metrics(writer: Writer, _: int) -> None:
    """Asks for much and reads nothing."""
    await writer.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 50)


ATTACKS: Final[dict[str, Attack]] = {
    "odd requests": odd_requests(REQUESTS),
    "a large body": a_large_body,
    "headers byte by byte": held(_begun),
    "answers that are not read": held(_metrics),
}
