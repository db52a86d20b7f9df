"""The values of what executed commands leave behind: pushes on their way, and request IDs.

    outbox 0x45            | pushed at i64 | retention i64 | delay i64 | visible at i64
                           | payload bytes u32 | queue ID Utf8
                           | header count u8 | key Utf8 | value Utf8 | ...
                           | payload: a payload value (see payloads.py)
                           | retention deadline i64, left out where there is none |
    outbox counter 0x47    | last number u64 | first waiting number u64 | waiting bytes u64
                           | offset i64, left out where it is 0 |
    refused push 0x51      | refused at i64 | outbox bytes u32 | reason Utf8 | outbox value |
    executed 0x4F          | Array<(request ID Utf8 | fingerprint 16 bytes)> |

Little-endian; times in milliseconds since 1970, UTC, delay in milliseconds, retention in seconds.
Retention, delay and visible at are -1 where the push does not say. The payload bytes are those of
the payload itself, also where an object holds it. A deadline stands in place of a retention where
the message is older than the push. No row waits where the first waiting number is
one above the last; the waiting bytes are those of the values of the rows that do. The offset is
added to a row's number when it is sent: not 0 once people have settled numbers that differed.
A refused push is one that an ingest has refused permanently; its outbox value is unchanged.

Header keys ascend. A deadline or an offset of 0 is left out, and refused where it is not.

Encoding raises ValueError naming the field that does not fit, decoding CorruptRecord.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from libs.storage.layout.primitives import Fixed, Reader, count_prefix, utf8
from libs.storage.records.metadata import encode_headers
from libs.storage.records.payloads import (
    PAYLOAD_HEAD_BYTES,
    PayloadRecord,
    PayloadUri,
    decode_payload,
    encode_inline,
    encode_uri,
    payload_size,
)
from libs.storage.records.states import FINGERPRINT_BYTES

NOT_SET = -1
"""Stands for a field that the push does not set."""

_PUSH = Fixed(pushed_at_ms="q", retention_s="q", delay_ms="q", visible_at_ms="q", payload_bytes="I")
_DEADLINE = Fixed(retention_deadline_ms="q")
_COUNTER = Fixed(last_number="Q", first_waiting="Q", waiting_bytes="Q")
_OFFSET = Fixed(offset="q")
_REFUSED = Fixed(refused_at_ms="q", outbox_bytes="I")


class OutboxRecord(NamedTuple):
    """A push on its way to ingest: a new message for one queue.

    `retention_s`, `delay_ms` and `visible_at_ms` are NOT_SET where the push does not say. With a
    deadline (0: none) the message is not delivered from then on, however late ingest takes it.
    """

    pushed_at_ms: int
    queue_id: str
    payload: PayloadRecord
    payload_bytes: int
    headers: Mapping[str, str]
    retention_s: int = NOT_SET
    delay_ms: int = NOT_SET
    visible_at_ms: int = NOT_SET
    retention_deadline_ms: int = 0


class OutboxCounter(NamedTuple):
    """Where the pushes for one ingest shard stand: those from `first_waiting` on are not sent.

    `offset` is what is added to a row's number when it is sent.
    """

    last_number: int
    first_waiting: int
    waiting_bytes: int
    offset: int = 0


class ExecutedRecord(NamedTuple):
    """A list of commands that took effect: its request ID, and a fingerprint of its content."""

    request_id: str
    fingerprint: bytes


def encode_outbox(push: OutboxRecord) -> bytes:
    fixed = _PUSH.pack(
        push.pushed_at_ms, push.retention_s, push.delay_ms, push.visible_at_ms, push.payload_bytes
    )
    payload = push.payload
    tail = encode_uri(payload.uri) if isinstance(payload, PayloadUri) else encode_inline(payload)
    deadline_ms = push.retention_deadline_ms
    end = _DEADLINE.pack(deadline_ms) if deadline_ms else b""
    parts = (fixed, utf8("queue ID", push.queue_id), encode_headers(push.headers), tail, end)
    return b"".join(parts)


def decode_outbox(data: bytes) -> OutboxRecord:
    reader = Reader("outbox value", data)
    pushed_at_ms, retention_s, delay_ms, visible_at_ms, payload_bytes = reader.fixed("push", _PUSH)
    queue_id = reader.utf8("queue ID")
    headers: dict[str, str] = {}
    last_key = ""
    for place in range(reader.number("header count", "B")):
        key = reader.utf8("header key")
        if place and key <= last_key:
            raise reader.corrupt("it has a header key twice, or out of order")
        last_key = key
        headers[key] = reader.utf8("header value")
    head = reader.take("payload", PAYLOAD_HEAD_BYTES)
    payload = decode_payload(head + reader.take("payload", payload_size(head)), reader.record)
    deadline_ms = _rest(reader, "retention deadline", _DEADLINE)
    return OutboxRecord(
        pushed_at_ms,
        queue_id,
        payload,
        payload_bytes,
        headers,
        retention_s,
        delay_ms,
        visible_at_ms,
        deadline_ms,
    )


def encode_outbox_counter(counter: OutboxCounter) -> bytes:
    fixed = _COUNTER.pack(counter.last_number, counter.first_waiting, counter.waiting_bytes)
    return fixed + _OFFSET.pack(counter.offset) if counter.offset else fixed


def decode_outbox_counter(data: bytes) -> OutboxCounter:
    reader = Reader("outbox counter", data)
    fixed = reader.fixed("counter", _COUNTER)
    counter = OutboxCounter(*fixed)._replace(offset=_rest(reader, "offset", _OFFSET))
    if not 1 <= counter.first_waiting <= counter.last_number + 1:
        raise reader.corrupt(f"waits from {counter.first_waiting} to {counter.last_number}")
    return counter


def _rest(reader: Reader, field: str, layout: Fixed) -> int:
    """The last number of a value, which is left out where it is 0."""
    if reader.at_end:
        return 0
    number = int(reader.last(field, layout)[0])
    if not number:
        raise reader.corrupt(f"{field} is 0, and not left out")
    return number


def encode_executed(executed: Sequence[ExecutedRecord]) -> bytes:
    parts = [count_prefix("executed", executed)]
    for request_id, fingerprint in executed:
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"fingerprint has not {FINGERPRINT_BYTES} bytes")
        parts += (utf8("request ID", request_id), fingerprint)
    return b"".join(parts)


def decode_executed(data: bytes) -> list[ExecutedRecord]:
    reader = Reader("executed", data)
    found = [
        ExecutedRecord(reader.utf8("request ID"), reader.take("fingerprint", FINGERPRINT_BYTES))
        for _ in range(reader.number("count of request IDs", "H"))
    ]
    reader.finish()
    return found


class RefusedPushRecord(NamedTuple):
    """A push that was refused: when, why, and its outbox value."""

    refused_at_ms: int
    reason: str
    outbox: bytes


def encode_refused_push(push: RefusedPushRecord) -> bytes:
    head = _REFUSED.pack(push.refused_at_ms, len(push.outbox))
    return b"".join((head, utf8("reason", push.reason), push.outbox))


def decode_refused_push(data: bytes) -> RefusedPushRecord:
    reader = Reader("refused push", data)
    refused_at_ms, outbox_bytes = reader.fixed("head", _REFUSED)
    reason = reader.utf8("reason")
    outbox = bytes(reader.take("outbox", outbox_bytes))
    reader.finish()
    return RefusedPushRecord(refused_at_ms, reason, outbox)
