"""The value of a payload record.

inline   | 01 | size u16 LE | payload |           Array<Byte>
blob     | 02 | size u16 LE | URI, UTF-8 |        Utf8; the payload is the object it names
"""

import struct
from dataclasses import dataclass
from typing import TypeAlias

from libs.storage.layout.primitives import ARRAY_MAX_COUNT, Reader, utf8

# The count of an Array<Byte> is a u16; a larger payload becomes a blob.
INLINE_PAYLOAD_MAX_BYTES = ARRAY_MAX_COUNT

_INLINE, _URI = 1, 2
_INLINE_HEAD = struct.Struct("<BH")


PAYLOAD_HEAD_BYTES = _INLINE_HEAD.size
"""The type of a payload record, and the number of bytes that follow."""


@dataclass(frozen=True, slots=True)
class PayloadUri:
    """The URI of the object that has the payload, durable before this record."""

    uri: str


PayloadRecord: TypeAlias = bytes | PayloadUri


def encode_inline(payload: bytes) -> bytes:
    """Payload record with the payload; ValueError over INLINE_PAYLOAD_MAX_BYTES."""
    size = len(payload)
    if size > INLINE_PAYLOAD_MAX_BYTES:
        raise ValueError(f"payload has {size} bytes, at most {INLINE_PAYLOAD_MAX_BYTES} fit")
    return _INLINE_HEAD.pack(_INLINE, size) + payload


def encode_uri(uri: str) -> bytes:
    """Payload record with a blob's URI; ValueError when that has over 65,535 bytes."""
    return bytes((_URI,)) + utf8("payload URI", uri)


def payload_size(head: bytes) -> int:
    """How many bytes follow the head of a payload record."""
    size: int = _INLINE_HEAD.unpack(head)[1]
    return size


def decode_payload(data: bytes, record: str = "payload value") -> PayloadRecord:
    """The payload itself, or the URI of its blob; CorruptRecord when it is neither.

    `record` names the record for the error.
    """
    # Nearly all are inline, and reading a backlog decodes each of its messages.
    if len(data) >= _INLINE_HEAD.size:
        kind, size = _INLINE_HEAD.unpack_from(data)
        if kind == _INLINE and size == len(data) - _INLINE_HEAD.size:
            return data[_INLINE_HEAD.size :]
    reader = Reader(record, data)
    kind = reader.number("type", "B")
    payload: PayloadRecord
    if kind == _INLINE:
        payload = reader.take("payload", reader.number("size", "H"))
    elif kind == _URI:
        payload = PayloadUri(reader.utf8("URI"))
    else:
        raise reader.corrupt(f"unknown payload type {kind:02x}")
    reader.finish()
    return payload
