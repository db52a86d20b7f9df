"""HTTP/2 frames by hand: what no client library would send.

::

    | length: 24 | kind: 8 | flags: 8 | stream: 32 | payload |

(RFC 9113). Header blocks are literals without an index and without Huffman codes (RFC 7541, 6.2.2).
A table of 0 bytes is asked for, so the peer's are literals as well, except for names of the static
table.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(6, 10)

END_STREAM: Final = 1
ACK: Final = 1
END_HEADERS: Final = 4

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
TABLE_SIZE, WINDOW = 1, 4
"""Settings of a connection."""

HEAD_BYTES: Final = 9

ANSWER_S: Final = 5.0
"""How long an answer to a hand-made request is waited for."""

Fields = Iterable[tuple[bytes, bytes]]

LONG: Final = 127
"""From here on a length takes more than a byte."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *pair) for pair in pairs))


def block(fields: Fields) -> bytes:
    """A header block."""
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields)


def _text(text: bytes) -> bytes:
    if len(text) < LONG:
        return bytes([len(text)]) + text
    rest, encoded = len(text) - LONG, bytearray(b"\x7f")
    while rest >= 0x80:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded) + text


def call_fields(path: bytes, *more: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """The header fields of a gRPC call."""
    return [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"slatemq"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *more,
    ]


def message(data: bytes, flag: int = 0, length: int | None = None) -> bytes:
    """A gRPC message in its envelope, whose length may be a lie."""
    return struct.pack(">BI", flag, len(data) if length is None else length) + data


@dataclass(frozen=True)
class Port:
    """A port to attack.

    Attributes:
        service: Whose it is, such as `broker`.
        door: `clients` or `services`.
        address: `host:port`.
        tls: What to connect with; None: without TLS.
        name: The server's name in its certificate.
    """

    service: str
    door: str
    address: str
    tls: ssl.SSLContext | None = None
    name: str = ""

    async def open(self, *, plain: bool = False) -> tuple[asyncio.StreamReader, Writer]:
        """A connection; `plain` without TLS, whatever the port wants. Raises OSError."""
        host, _, number = self.address.rpartition(":")
        tls = None if plain else self.tls
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(
                host, int(number), ssl=tls, server_hostname=self.name if tls else None
            )
        return reader, Writer(writer)


class Writer:
    """Writes to a peer that may close at any time."""

    def __init__(self, stream: asyncio.StreamWriter) -> None:
        self._stream = stream

    async def send(self, data: bytes) -> bool:
        """Send, as fast as the peer reads; returns False once it has closed or stopped reading."""
        if self._stream.is_closing():
            return False
        try:
            self._stream.write(data)
            async with asyncio.timeout(ANSWER_S):
                await self._stream.drain()
        except (OSError, TimeoutError):
            return False
        return not self._stream.is_closing()

    def close(self) -> None:
        self._stream.transport.abort()


@dataclass(frozen=True)
class Answer:
    """What came of a call.

    Attributes:
        status: Of gRPC; None where none was sent.
        words: Of gRPC, as it encodes them.
        end: What ended the call: `trailers`, `reset`, `goaway`, `closed` or `silence`.
    """

    status: int | None
    end: str
    words: str = ""


async def answer_of(reader: asyncio.StreamReader, stream: int) -> Answer:
    """Read until the call on this stream has ended."""
    with suppress(TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            return await _read_answer(reader, stream)
    return Answer(None, "silence")


async def _read_answer(reader: asyncio.StreamReader, stream: int) -> Answer:
    try:
        while True:
            head = await reader.readexactly(HEAD_BYTES)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags = head[3], head[4]
            number = int.from_bytes(head[5:], "big")
            if kind == GOAWAY:
                return Answer(None, "goaway")
            if number != stream:
                continue
            if kind == RST_STREAM:
                return Answer(None, "reset")
            if kind == HEADERS and flags & END_STREAM:
                status = text_in(payload, b"grpc-status")
                words = text_in(payload, b"grpc-message")
                return Answer(int(status) if status else None, "trailers", words)
    except (OSError, asyncio.IncompleteReadError):
        return Answer(None, "closed")


def text_in(header_block: bytes, name: bytes) -> str:
    """The value of a field in a block of literals; empty where there is none."""
    head = bytes([len(name)]) + name
    at = header_block.find(head)
    if at < 0:
        return ""
    at += len(head)
    length, at = header_block[at], at + 1
    if length == LONG:
        length += header_block[at] & 0x7F | (
            header_block[at + 1] << 7 if header_block[at] > LONG else 0
        )
        at += 1 + (header_block[at] > LONG)
    return header_block[at : at + length].decode("ascii", "replace")
