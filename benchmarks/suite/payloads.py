"""Payloads that tell whether they came back whole: a number, a time, a digest of both, filler."""

from __future__ import annotations

import hashlib
import struct
import time

_HEAD = struct.Struct("<Qd")
_DIGEST_BYTES = 8
BYTES_MIN = _HEAD.size + _DIGEST_BYTES


def make(number: int, size: int) -> bytes:
    """The payload of this number, `size` bytes, stamped with the time (monotonic seconds)."""
    head = _HEAD.pack(number, time.monotonic())
    digest = hashlib.blake2b(head, digest_size=_DIGEST_BYTES).digest()
    return (head + digest).ljust(size, b"x")


def read(payload: bytes, size: int) -> tuple[int, float]:
    """Its number and its time; ValueError when it is not what was sent."""
    if len(payload) != size:
        raise ValueError(f"a payload of {size} bytes came back with {len(payload)}")
    head, digest = payload[: _HEAD.size], payload[_HEAD.size : BYTES_MIN]
    if hashlib.blake2b(head, digest_size=_DIGEST_BYTES).digest() != digest:
        raise ValueError("a payload came back changed")
    if payload.count(b"x", BYTES_MIN) != size - BYTES_MIN:
        raise ValueError("a payload came back with other filler")
    number, sent = _HEAD.unpack(head)
    return number, sent
