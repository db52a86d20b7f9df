"""A row of a broker's outbox that an ingest has refused permanently.

    refused push 0x51      | refused at i64 | outbox bytes u32 | reason Utf8 | outbox value |

Little-endian; the time in milliseconds since 1970, UTC. The outbox value is unchanged: see
execution_records.py.
"""

from __future__ import annotations

from typing import NamedTuple

from libs.storage.layout.primitives import Fixed, Reader, utf8

_HEAD = Fixed(refused_at_ms="q", outbox_bytes="I")


class RefusedPushRecord(NamedTuple):
    """A push that was refused: when, why, and its outbox value."""

    refused_at_ms: int
    reason: str
    outbox: bytes


def encode_refused_push(push: RefusedPushRecord) -> bytes:
    head = _HEAD.pack(push.refused_at_ms, len(push.outbox))
    return b"".join((head, utf8("reason", push.reason), push.outbox))


def decode_refused_push(data: bytes) -> RefusedPushRecord:
    reader = Reader("refused push", data)
    refused_at_ms, outbox_bytes = reader.fixed("head", _HEAD)
    reason = reader.utf8("reason")
    outbox = bytes(reader.take("outbox", outbox_bytes))
    reader.finish()
    return RefusedPushRecord(refused_at_ms, reason, outbox)
