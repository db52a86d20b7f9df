"""Payloads that tell whether they came back whole: a number, a time, a digest of both, filler."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterable

_HEAD = struct.Struct("<Qd")
_DIGEST_BYTES = 8
BYTES_MIN = _HEAD.size + _DIGEST_BYTES


def make(number: int, size: int) -> bytes:
    """The payload of this number, `size` bytes, stamped with the time (monotonic seconds)."""
    head = _HEAD.pack(number, time.monotonic())
    digest = hashlib.blake2b(head, digest_size=_DIGEST_BYTES).digest()
    return (head + digest).ljust(size, b"x")


def read(payload: bytes) -> tuple[int, float]:
    """Its number and its time; ValueError when it is not what was sent."""
    head, digest = payload[: _HEAD.size], payload[_HEAD.size : BYTES_MIN]
    if hashlib.blake2b(head, digest_size=_DIGEST_BYTES).digest() != digest:
        raise ValueError("a payload came back changed")
    if payload.count(b"x", BYTES_MIN) != len(payload) - BYTES_MIN:
        raise ValueError("a payload came back with other filler")
    number, sent = _HEAD.unpack(head)
    return number, sent


class Tally:
    """Which numbers came back, and how often."""

    def __init__(self) -> None:
        self.count = 0
        self.distinct = 0
        self._seen = bytearray()

    def add(self, numbers: Iterable[int]) -> None:
        """Counts these."""
        for number in numbers:
            self.count += 1
            if number >= len(self._seen):
                self._seen.extend(bytes(2 * number + 1024 - len(self._seen)))
            self.distinct += not self._seen[number]
            self._seen[number] = 1
