"""Payloads of one log entry that are stored together: a put costs far more than a small payload.

A pack has the payloads of up to PACK_MESSAGES messages with consecutive IDs, from the sequence of
their log entry on, or from a multiple of PACK_MESSAGES after it. A payload that is large, or a
blob, or was replaced, has a record of its own, and is not in the pack.
A pack has at least PACKED_MESSAGES_MIN payloads: when fewer stay in it, they get records.

key   | 01 | 54 | ID of the first message u64 |
value | 01 | sizes, Array<u32 LE> | payloads, one after the other |     size FFFFFFFF: not in it
      | 02 | sizes, Array<u32 LE> | the same payloads as one Zstandard frame (RFC 8878) |

The second form is used where it is smaller by at least an eighth: SlateDB copies, logs, sorts and
stores each byte, which costs more than compressing it.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final

import zstandard

from libs.storage.errors import CorruptRecord
from libs.storage.layout.ids import MAX_MESSAGE_ID
from libs.storage.layout.keys import (
    NUMBER,
    RecordType,
    key_head,
    open_key,
    payload_key,
    through,
)
from libs.storage.layout.primitives import KeyRange, number_array
from libs.storage.records.payloads import encode_inline

PACK_MESSAGES: Final = 16
"""The most messages of a pack: to read, replace or remove one, all are read, and those that stay
are written again. More did not make publishing faster."""

PACKED_BYTES_MAX: Final = 4096
"""Larger payloads have records of their own, so that reading one does not read others."""

PACKED_MESSAGES_MIN: Final = 4
"""Fewer payloads have records of their own."""

PACK_TYPE: Final = 1
COMPRESSED_TYPE: Final = 2

COMPRESSED_BYTES_MIN: Final = 256
"""Fewer bytes of payloads are not compressed."""

UNTRIED_PACKS: Final = 7
"""After a pack that does not become smaller, this many of the same log entry are not tried."""

ABSENT: Final = 0xFFFFFFFF
"""The size of a payload that is not in the pack."""

_HEAD: Final = struct.Struct("<BH")
_PLAIN: Final = bytes((PACK_TYPE,))
_COMPRESSED: Final = bytes((COMPRESSED_TYPE,))
_KEY_HEAD: Final = key_head(RecordType.PAYLOAD_PACK)


def pack_key(first_id: int) -> bytes:
    if not 0 <= first_id <= MAX_MESSAGE_ID:
        raise ValueError(f"first_id = {first_id} is not within 0..{MAX_MESSAGE_ID}")
    return _KEY_HEAD + first_id.to_bytes(8, "big")


def parse_pack_key(key: bytes) -> int:
    reader = open_key("payload pack key", RecordType.PAYLOAD_PACK, key)
    return int(reader.last("first ID", NUMBER)[0])


def pack_range(first_id: int = 0, last_id: int = MAX_MESSAGE_ID) -> KeyRange:
    return through(pack_key(first_id), pack_key(last_id))


def pack_of(sequence: int, message_id: int) -> int:
    """The first ID of the pack that may have this message of the log entry at `sequence`."""
    return message_id - (message_id - sequence) % PACK_MESSAGES


def payload_rows(sequence: int, payloads: Sequence[bytes | None]) -> Iterator[tuple[bytes, bytes]]:
    """The rows of the payloads of a log entry's messages; None: the message has a row already."""
    untried = 0
    for start in range(0, len(payloads), PACK_MESSAGES):
        some = payloads[start : start + PACK_MESSAGES]
        first_id = sequence + start
        small = [None if one is None or len(one) > PACKED_BYTES_MAX else one for one in some]
        if len(some) - small.count(None) < PACKED_MESSAGES_MIN:
            small = [None] * len(some)
        else:
            value = encode_pack(small, compress=not untried)
            yield pack_key(first_id), value
            if untried:
                untried -= 1
            elif value[0] == PACK_TYPE and _size(small) >= COMPRESSED_BYTES_MIN:
                untried = UNTRIED_PACKS
        for at, payload in enumerate(some):
            if payload is not None and small[at] is None:
                yield payload_key(first_id + at), encode_inline(payload)


def _size(payloads: Sequence[bytes | None]) -> int:
    return sum(map(len, filter(None, payloads)))


def encode_pack(payloads: Sequence[bytes | None], *, compress: bool = True) -> bytes:
    """The value of a pack, in its smaller form; None: not in the pack."""
    here = [one for one in payloads if one is not None]
    if len(here) == len(payloads):
        sizes = list(map(len, here))
    else:
        sizes = [ABSENT if one is None else len(one) for one in payloads]
    result, content = number_array("payloads", "I", sizes), b"".join(here)
    if compress and len(content) >= COMPRESSED_BYTES_MIN:
        compressed = _codecs.compress(content)
        if len(compressed) <= len(content) - len(content) // 8:
            return _COMPRESSED + result + compressed
    return _PLAIN + result + content


def plain_pack(data: bytes) -> bytes:
    """A pack in the first form; CorruptRecord where the second form is damaged.

    A value of another type, or that ends too early, is returned unchanged.
    """
    if not data.startswith(_COMPRESSED) or len(data) < _HEAD.size:
        return data
    _, count = _HEAD.unpack_from(data)
    begin = _HEAD.size + 4 * count
    if begin > len(data):
        return data
    sizes = struct.unpack_from(f"<{count}I", data, _HEAD.size)
    size = sum(sizes) - ABSENT * sizes.count(ABSENT)
    frame = data[begin:]
    try:
        # Check the size in the frame first: damage must not become gigabytes.
        frame_bytes = zstandard.frame_content_size(frame)
        if frame_bytes != size:
            raise CorruptRecord("payload pack", f"a frame of {frame_bytes} bytes, expected {size}")
        content = _codecs.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptRecord("payload pack", f"not a Zstandard frame: {error}") from None
    return _PLAIN + data[1:begin] + content


class _Codecs(threading.local):
    """The codecs of one thread: they are not thread-safe."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=1).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_codecs: Final = _Codecs()


def decode_pack(first_id: int, data: bytes) -> dict[int, bytes]:
    """The payloads by message ID; CorruptRecord when the value is damaged."""
    data = plain_pack(data)
    try:
        kind, count = _HEAD.unpack_from(data)
        sizes = struct.unpack_from(f"<{count}I", data, _HEAD.size)
    except struct.error as error:
        raise CorruptRecord("payload pack", f"ends too early: {error}") from None
    if kind != PACK_TYPE:
        raise CorruptRecord("payload pack", f"unknown type {kind:02x}")
    ids = range(first_id, first_id + count)
    if ABSENT in sizes:
        ids_here = [one for one, size in zip(ids, sizes, strict=True) if size != ABSENT]
        sizes = tuple(size for size in sizes if size != ABSENT)
    else:
        ids_here = list(ids)
    ends = list(accumulate(sizes, initial=_HEAD.size + 4 * count))
    if ends[-1] != len(data):
        raise CorruptRecord("payload pack", f"has {len(data)} bytes, expected {ends[-1]}")
    return {
        one: data[start : start + size]
        for one, start, size in zip(ids_here, ends, sizes, strict=False)
    }


def rest_of_pack(
    first_id: int, payloads: Mapping[int, bytes], gone: Collection[int]
) -> tuple[bytes | None, dict[int, bytes]]:
    """What becomes of a pack with these payloads when those of `gone` leave it.

    Its value, or None and the payload records of those that stay: too few for a pack.
    """
    left = {one: payload for one, payload in payloads.items() if one not in gone}
    if len(left) < PACKED_MESSAGES_MIN:
        return None, {one: encode_inline(payload) for one, payload in left.items()}
    return encode_pack([left.get(one) for one in range(first_id, max(left) + 1)]), {}
