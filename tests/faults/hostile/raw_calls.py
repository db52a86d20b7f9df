"""Calls that no gRPC client makes: wrong types, lying lengths, bombs, odd header fields."""

from __future__ import annotations

import gzip
import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from tests.faults.hostile.floods import TOPOLOGY, connected
from tests.faults.hostile.generated import SMALL, SORTS, varint
from tests.faults.hostile.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    Answer,
    Port,
    answer_of,
    block,
    call_fields,
    frame,
    message,
)
from tests.faults.hostile.rpcs import all_rpcs

INTERNAL_OR_UNKNOWN: Final = (2, 13)

OF_THE_LIBRARY: Final = (
    "Error parsing '",
    "Illegal header key",
    "Illegal header value",
    "Duplicate '",
    "Metadata keys cannot be zero length",
    "Compression bit set but no encoding",
)
"""How gRPC's own words begin where a call is none by its protocol: it answers INTERNAL before any
code of ours has seen the call."""

BOMB: Final = gzip.compress(varint(1 << 3 | 2) + b"\xff\xff\xff\x07" + b"\0" * (16 << 20))
"""16 KB that become 16 MB."""

Fields = list[tuple[bytes, bytes]]
Call = tuple[Fields, bytes]
"""Header fields, and the bytes of the body."""


def _fields(chance: random.Random, *more: tuple[bytes, bytes]) -> Fields:
    return call_fields(chance.choice(all_rpcs()).path.encode(), *more)


def _replaced(fields: Iterable[tuple[bytes, bytes]], name: bytes, value: bytes) -> Fields:
    return [(key, value if key == name else old) for key, old in fields]


def _content_type(chance: random.Random) -> Call:
    types = (b"", b"text/html", b"application/json", b"application/grpc+json", b"application/grpcx")
    return _replaced(_fields(chance), b"content-type", chance.choice(types)), message(b"")


def _method(chance: random.Random) -> Call:
    method = chance.choice((b"GET", b"PUT", b"CONNECT", b"", b"\x00"))
    return _replaced(_fields(chance), b":method", method), message(b"")


def _path(chance: random.Random) -> Call:
    paths = (
        *(
            b"",
            b"/",
            b"//",
            b"*",
            b"/x",
            b"/slatemq.v1.IngestService/",
            b"/slatemq.v1.IngestService/None",
        ),
        *(b"/../../etc/passwd", b"/slatemq.v1.IngestService/Publish/..", b"/" + b"x" * 5_000),
        *(b"/\xff\xfe", b"/slatemq.v1.AssignmentService/assign", b"http://x/y"),
    )
    return _replaced(call_fields(b""), b":path", chance.choice(paths)), message(b"")


def _timeout(chance: random.Random) -> Call:
    values = (b"", b"-1S", b"99999999H", b"999999999999S", b"1x", b"S", b"0n", b"\xff")
    return _fields(chance, (b"grpc-timeout", chance.choice(values))), message(b"")


def _fields_of_all_sorts(chance: random.Random) -> Call:
    odd: tuple[Fields, ...] = (
        [(b"UPPER", b"x")],
        [(b"connection", b"close")],
        [(b":path", b"/twice")],
        [(b":unknown", b"x")],
        [(b"", b"")],
        [(b"x-bin", b"%%% not base64")],
        [(b"x", b"a\r\nb: c")],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"host", b"a"), (b"host", b"b")],
        [(b"content-length", b"7")],
        [(b"cookie", b"x" * 100)] * 80,
        [(b"n%d" % n, b"v") for n in range(300)],
        [(b"grpc-accept-encoding", b"x" * 3_000)],
        [(b"grpc-status", b"13")],
        [(b"transfer-encoding", b"chunked")],
    )
    return [*_fields(chance), *chance.choice(odd)], message(b"")


def _length(chance: random.Random) -> Call:
    lengths = (1, 100, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
    return _fields(chance), message(b"", 0, chance.choice(lengths))


def _envelope(chance: random.Random) -> Call:
    """Half an envelope, several messages, a flag that there is not, padding."""
    body = chance.choice(
        (b"", b"\0", b"\0\0\0", message(b"") * 3, message(b"", 2), message(b"", 255))
    )
    return _fields(chance), body + chance.choice((b"", b"\0"))


def _compressed(chance: random.Random) -> Call:
    encoding = chance.choice((b"gzip", b"deflate", b"identity", b"snappy", b"br", b""))
    body = message(
        chance.choice((BOMB, b"", b"not gzip", gzip.compress(b""))), chance.choice((0, 1))
    )
    return _fields(chance, (b"grpc-encoding", encoding)), body


def _some_bytes(chance: random.Random) -> Call:
    rpc = chance.choice(all_rpcs())
    data = SORTS[chance.choice(SMALL)](chance, rpc.request)
    return call_fields(rpc.path.encode()), message(data)


KINDS: Final[dict[str, Callable[[random.Random], Call]]] = {
    "content type": _content_type,
    "method": _method,
    "path": _path,
    "timeout": _timeout,
    "header fields": _fields_of_all_sorts,
    "length": _length,
    "envelope": _envelope,
    "compressed": _compressed,
    "bytes": _some_bytes,
}


class RawCalls:
    """Makes them on connections of their own.

    Attributes:
        ends: How often each kind came to each end, with gRPC's status where one was sent.
        faults: What was answered as a fault of the server.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.ends: Counter[str] = Counter()
        self.faults: list[str] = []

    async def make(self, port: Port, numbers: range) -> None:
        """Make the calls of these numbers, each on a connection of its own."""
        for number in numbers:
            chance = random.Random(f"raw {self._seed} {number}")
            kind = chance.choice(tuple(KINDS))
            answer = Answer(None, "closed")
            with suppress(OSError, TimeoutError):
                answer = await _answer(port, *KINDS[kind](chance))
            self.ends[f"{kind}: {answer.end} {answer.status}"] += 1
            own = not answer.words.startswith(OF_THE_LIBRARY)
            if answer.status in INTERNAL_OR_UNKNOWN and own:
                place = f"{port.service} at the port for {port.door}"
                fault = f"raw call {number}, {kind}, {place}: {answer.status} {answer.words}"
                self.faults.append(fault)


async def _answer(port: Port, fields: Fields, body: bytes) -> Answer:
    async with connected(port) as (reader, writer):
        parts = [frame(HEADERS, END_HEADERS, 1, block(fields))]
        # As large as frames may be.
        parts += [frame(DATA, 0, 1, body[at : at + 16_384]) for at in range(0, len(body), 16_384)]
        await writer.send(b"".join(parts) + frame(DATA, END_STREAM, 1))
        return await answer_of(reader, 1)


async def answers(port: Port) -> Answer:
    """What a proper call by hand is answered."""
    return await _answer(port, call_fields(TOPOLOGY), message(b""))
