"""Payloads that show whether they came back whole: a number, a time, a digest of both, content.

The content is what programs send: JSON, of which much differs from message to message. Or it is
random, so that it cannot be compressed.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
import time
from functools import lru_cache
from typing import Final
from uuid import UUID

EVENTS, RANDOM = "events", "random"

_HEAD = struct.Struct("<Qd")
_DIGEST_BYTES = 8
BYTES_MIN = _HEAD.size + _DIGEST_BYTES

CONTENTS_COUNT: Final = 997
"""Different contents. No store sees one of them twice within what it compresses at once."""


def make(number: int, size: int, kind: str = EVENTS) -> bytes:
    """The payload of this number, `size` bytes, stamped with the time (monotonic seconds)."""
    head = _HEAD.pack(number, time.monotonic())
    digest = hashlib.blake2b(head, digest_size=_DIGEST_BYTES).digest()
    return head + digest + _contents(size, kind)[number % CONTENTS_COUNT]


def read(payload: bytes, size: int, kind: str = EVENTS) -> tuple[int, float]:
    """Its number and its time; ValueError when it is not what was sent."""
    if len(payload) != size:
        raise ValueError(f"a payload of {size} bytes came back with {len(payload)}")
    head, digest = payload[: _HEAD.size], payload[_HEAD.size : BYTES_MIN]
    if hashlib.blake2b(head, digest_size=_DIGEST_BYTES).digest() != digest:
        raise ValueError("a payload came back changed")
    number: int
    number, sent = _HEAD.unpack(head)
    if not payload.endswith(_contents(size, kind)[number % CONTENTS_COUNT]):
        raise ValueError("a payload came back with other content")
    return number, sent


@lru_cache(maxsize=8)
def _contents(size: int, kind: str) -> list[bytes]:
    """The same in every process."""
    length, chance = size - BYTES_MIN, random.Random(size)
    if kind == RANDOM:
        return [chance.randbytes(length) for _ in range(CONTENTS_COUNT)]
    contents = []
    for _ in range(CONTENTS_COUNT):
        text = b""
        while len(text) < length:
            text += json.dumps(_event(chance)).encode()
        contents.append(text[:length])
    return contents


def _event(chance: random.Random) -> dict[str, object]:
    """An event that a shop might publish of an order."""
    first, last = chance.choice(_NAMES), chance.choice(_NAMES)
    return {
        "event_id": str(UUID(int=chance.getrandbits(128))),
        "type": f"order.{chance.choice(_STATES)}",
        "occurred_at": f"2026-11-{chance.randint(1, 30):02}T{chance.randint(0, 23):02}:"
        f"{chance.randint(0, 59):02}:{chance.uniform(0, 60):06.3f}Z",
        "customer": {
            "id": chance.getrandbits(40),
            "name": f"{first} {last}",
            "email": f"{first.lower()}.{chance.getrandbits(16)}@example.com",
            "street": f"{chance.randint(1, 999)} {last} Street",
            "zip": f"{chance.randint(0, 99_999):05}",
        },
        "items": [
            {
                "sku": f"SKU-{chance.getrandbits(27):08}",
                "quantity": chance.randint(1, 9),
                "unit_price": round(chance.uniform(1, 200), 2),
                "currency": "EUR",
            }
            for _ in range(chance.randint(1, 5))
        ],
        "trace_id": f"{chance.getrandbits(128):032x}",
        "signature": f"{chance.getrandbits(256):064x}",
    }


_NAMES: Final = [
    "Ada",
    "Barbara",
    "Donald",
    "Edsger",
    "Frances",
    "Grace",
    "John",
    "Leslie",
    "Radia",
    "Tony",
]
_STATES: Final = ["created", "paid", "packed", "shipped", "delivered", "returned"]
