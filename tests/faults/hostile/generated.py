"""Requests of every sort, each made from the seed and its number alone: so one can be repeated."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from tests.faults.hostile.rpcs import KINDS, Rpc, all_rpcs
from tests.integration.serving.test_any_request import fill, some_message

BUSY_EVERY: Final = 400
"""Of this many requests one is large: each costs the server more than a hundred others do."""

LARGE_ITEMS: Final = 1_000_000

STRANGE_KIND: Final = 0.05
"""The share of calls that go to a process which does not serve their RPC."""

OTHER_DOOR: Final = 0.3
"""The share of calls that go to the port for services."""

TOKENLESS: Final = ("", "forged", "odd")
"""What proves nothing."""

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True)
class Generated:
    """One request, or those of one stream.

    Attributes:
        number: Its place; with the seed, it says all of it.
        sort: How it is wrong, if it is.
        rpc, kind, door: What it calls, of which process, and at which port.
        messages: What it sends.
        metadata: What it sends besides, authorization aside.
        proof: How the caller proves who it is: a name of a token, or one of TOKENLESS.
    """

    number: int
    sort: str
    rpc: Rpc
    kind: str
    door: str
    messages: tuple[bytes, ...]
    metadata: Metadata
    proof: str


def generate(seed: int, number: int, proofs: Sequence[str]) -> Generated:
    """A request; `proofs` has what callers may show."""
    chance = random.Random(f"{seed} {number}")
    rpcs = all_rpcs()
    # In turn, so that none is left out; the sort is left to chance.
    rpc = rpcs[number % len(rpcs)]
    kinds = KINDS if chance.random() < STRANGE_KIND else rpc.kinds
    sort = chance.choice(LARGE if chance.randrange(BUSY_EVERY) == 0 else SMALL)
    count = chance.randrange(1, 4) if rpc.takes_many else 1
    messages = tuple(SORTS[sort](chance, rpc.request) for _ in range(count))
    return Generated(
        number,
        sort,
        rpc,
        chance.choice(kinds),
        "services" if chance.random() < OTHER_DOOR else "clients",
        messages,
        _metadata(chance),
        chance.choice(proofs),
    )


def _metadata(chance: random.Random) -> Metadata:
    match chance.randrange(20):
        case 0:
            return (("odd-bin", chance.randbytes(chance.randrange(2_000))),)
        case 1:
            return tuple((f"many-{n}", "x" * chance.randrange(100)) for n in range(60))
        case 2:
            return (("long", "x" * chance.choice((4_000, 9_000, 20_000, 200_000))),)
        case 3:
            return (("traceparent", chance.choice(("", "00-0-0-0", "x" * 500, "00-" + "f" * 52))),)
        case _:
            return ()


def varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def _empty(chance: random.Random, request: Descriptor) -> bytes:
    return b""


def _valid(chance: random.Random, request: Descriptor) -> bytes:
    return some_message(chance, request, 3)


def _full(chance: random.Random, request: Descriptor) -> bytes:
    """All fields, at any of their extremes."""
    message: Any = GetMessageClass(request)()
    for one in request.fields:
        fill(chance, message, one, 4)
    data: bytes = message.SerializeToString()
    return data


def _not_text(chance: random.Random, request: Descriptor) -> bytes:
    """Texts that are not UTF-8, also as keys of maps and in messages within."""
    wrong = chance.choice((b"\xc3\x28", b"\xff", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"))
    return b"".join(
        field(one.number, field(chance.randrange(1, 4), wrong) if one.message_type else wrong)
        for one in request.fields
    ) or field(1, wrong)


def _deep(chance: random.Random, request: Descriptor) -> bytes:
    """Messages in messages, deeper than any parser goes."""
    numbers = [one.number for one in request.fields] or [1]
    inner = b""
    for _ in range(chance.choice((20, 99, 101, 1_000))):
        inner = field(chance.choice(numbers), inner)
    return inner


def _unknown_enum(chance: random.Random, request: Descriptor) -> bytes:
    number = chance.choice((99, 1 << 31, (1 << 64) - 1))
    return b"".join(
        varint(one.number << 3) + varint(number)
        for one in request.fields
        if one.cpp_type == FieldDescriptor.CPPTYPE_ENUM
    ) + _valid(chance, request)


def _unknown_fields(chance: random.Random, request: Descriptor) -> bytes:
    number = chance.choice((1_000, (1 << 29) - 1))
    return _valid(chance, request) + field(number, b"x" * 10) * chance.randrange(1, 500)


def _random_bytes(chance: random.Random, request: Descriptor) -> bytes:
    return chance.randbytes(chance.choice((1, 10, 100, 5_000)))


def _cut(chance: random.Random, request: Descriptor) -> bytes:
    data = _full(chance, request)
    return data[: chance.randrange(len(data) + 1)]


def _flipped(chance: random.Random, request: Descriptor) -> bytes:
    data = bytearray(_full(chance, request))
    for _ in range(chance.randrange(1, 4) if data else 0):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def _groups(chance: random.Random, request: Descriptor) -> bytes:
    return bytes([chance.choice((0x0B, 0x0C, 0x0E, 0x0F))]) * chance.randrange(1, 2_000)


def _long_numbers(chance: random.Random, request: Descriptor) -> bytes:
    """Numbers of too many bytes, lengths beyond the end, the field 0."""
    key = chance.choice((0, 1, 2, 8, 10, chance.randrange(1, 256)))
    return bytes([key]) + b"\xff" * chance.randrange(1, 12) + b"\x01"


def _other_wire_types(chance: random.Random, request: Descriptor) -> bytes:
    parts = []
    for one in request.fields:
        kind = chance.choice((0, 1, 2, 5))
        content = {0: b"\x01", 1: b"\0" * 8, 2: b"\x02\xff\xfe", 5: b"\0" * 4}[kind]
        parts.append(varint(one.number << 3 | kind) + content)
    return b"".join(parts)


def _many_items(chance: random.Random, request: Descriptor) -> bytes:
    """A million items of one list, or pairs of one map."""
    lists = [one for one in request.fields if one.is_repeated]
    if not lists:
        return varint(chance.randrange(100, 1_000) << 3) + b"\x01" * LARGE_ITEMS
    one = chance.choice(lists)
    item = chance.choice((b"", b"\x0a\x01k", b"\x0a\x00\x12\x00", b"x"))
    return field(one.number, item) * LARGE_ITEMS


def _long_text(chance: random.Random, request: Descriptor) -> bytes:
    one = chance.choice([one.number for one in request.fields] or [1])
    return field(one, b"x" * chance.choice((1 << 20, 3 << 20, 20 << 20)))


Sort = Callable[[random.Random, Descriptor], bytes]

SORTS: Final[dict[str, Sort]] = {
    "empty": _empty,
    "valid by type": _valid,
    "extreme": _full,
    "not UTF-8": _not_text,
    "deep": _deep,
    "unknown enums": _unknown_enum,
    "unknown fields": _unknown_fields,
    "random bytes": _random_bytes,
    "cut": _cut,
    "flipped bits": _flipped,
    "groups": _groups,
    "long numbers": _long_numbers,
    "other wire types": _other_wire_types,
    "a million items": _many_items,
    "long text": _long_text,
}

LARGE: Final = ("a million items", "long text")
SMALL: Final = tuple(sort for sort in SORTS if sort not in LARGE)
BROKEN: Final = ("not UTF-8", "random bytes", "groups", "long numbers", "deep")
"""Those that hardly any request is taken of."""
