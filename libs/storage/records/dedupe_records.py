"""Dedupe keys: a row for each, and rows of those that end in the same minute.

    dedupe key 0x44    | message ID u64 | end i64 |
    dedupe ends 0x4B   | dedupe keys: Array<Utf8> |

Little-endian; the end in milliseconds since 1970. From its end on a row is
ignored, whether or not it was removed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from libs.storage.layout.primitives import Fixed, Reader, utf8_array

_DEDUPE = Fixed(message_id="Q", end_ms="q")


class DedupeRecord(NamedTuple):
    """The message first published with a dedupe key, and the time until which the key is taken."""

    message_id: int
    end_ms: int


def encode_dedupe(record: DedupeRecord) -> bytes:
    return _DEDUPE.pack(*record)


def decode_dedupe(data: bytes) -> DedupeRecord:
    return DedupeRecord(*Reader("dedupe key", data).last("message ID and end", _DEDUPE))


def encode_dedupe_ends(keys: Sequence[str]) -> bytes:
    """The keys of one commit, at most 65,535."""
    return utf8_array("dedupe keys", keys)


def decode_dedupe_ends(data: bytes) -> list[str]:
    reader = Reader("dedupe ends", data)
    keys = reader.utf8_array("dedupe keys")
    reader.finish()
    return keys
