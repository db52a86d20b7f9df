"""IDs of write tasks: `task_` and a ULID, which names the ingest shard that accepted the task.

    ULID    | accepted at, ms since 1970, u48 | shard u16 | number u48 | check u16 |    big-endian

The number begins at random in each millisecond; the check is CRC-16/XMODEM of all before it, so
that a mistyped ID is known for one.
"""

from __future__ import annotations

import secrets
from binascii import crc_hqx
from typing import Final, NamedTuple

from slatemq.errors import InvalidArgument

PREFIX: Final = "task_"

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's base 32, most significant digit first: 26 digits have 130 bits for 128."""

_DIGITS: Final = {digit: number for number, digit in enumerate(_ALPHABET)}
_LENGTH: Final = 26
_BYTES: Final = 16
_CHECK_BYTES: Final = 2
_NUMBER_BYTES: Final = 6


class TaskId(NamedTuple):
    accepted_at_ms: int
    shard: int
    ulid: bytes


class TaskIds:
    """Makes IDs; of one process, none twice."""

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self._at_ms = 0
        self._number = 0

    def make(self, now_ms: int) -> str:
        if now_ms > self._at_ms:
            self._at_ms = now_ms
            # Half of the numbers are left to count on in this millisecond.
            self._number = secrets.randbits(8 * _NUMBER_BYTES - 1)
        self._number += 1
        head = self._at_ms.to_bytes(6, "big") + self._shard.to_bytes(2, "big")
        named = head + self._number.to_bytes(_NUMBER_BYTES, "big")
        return task_id_of(named + _check(named))


def task_id_of(ulid: bytes) -> str:
    number = int.from_bytes(ulid, "big")
    digits = (_ALPHABET[number >> 5 * place & 31] for place in reversed(range(_LENGTH)))
    return PREFIX + "".join(digits)


def parse_task_id(text: str) -> TaskId:
    """Parse a task ID. Raises InvalidArgument for one that no ingest can have made."""
    digits = text.removeprefix(PREFIX)
    if digits == text or len(digits) != _LENGTH or not _DIGITS.keys() >= set(digits):
        raise InvalidArgument("task_id", f"must be {PREFIX} and 26 of A-Z and 0-9, not {text!r}")
    number = 0
    for digit in digits:
        number = number << 5 | _DIGITS[digit]
    ulid = (number & (1 << 8 * _BYTES) - 1).to_bytes(_BYTES, "big")
    if number >> 8 * _BYTES or _check(ulid[:-_CHECK_BYTES]) != ulid[-_CHECK_BYTES:]:
        problem = f"no task has the ID {text}: one of its characters is wrong"
        raise InvalidArgument("task_id", problem)
    return TaskId(int.from_bytes(ulid[:6], "big"), int.from_bytes(ulid[6:8], "big"), ulid)


def is_task_id(text: str) -> bool:
    """Whether an ingest may have made this ID."""
    try:
        parse_task_id(text)
    except InvalidArgument:
        return False
    return True


def _check(named: bytes) -> bytes:
    return crc_hqx(named, 0).to_bytes(_CHECK_BYTES, "big")
