"""Messages as bytes, for brokers that hand them on: no object per message on the way.

Each is a `Message` of message.proto in protobuf's wire format, as its own library would parse it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Final, NamedTuple, cast

from libs.serving.protobytes import field, number_field, varint, varints
from services.ingest.batches import NOT_SET
from services.ingest.payload_cache import PayloadCache, Run
from services.ingest.reading import Reader, Room

__all__ = ["Encoded", "EncodedReader"]

TOGETHER_MIN: Final = 4
"""Fewer messages of a run are encoded one by one: columns cost more to begin with."""

_ENCODED_MESSAGE: Final = b"\x22"
_MESSAGE_ID: Final = b"\x08"
_PAYLOAD: Final = b"\x12"
_HEADERS, _CREATED_AT, _RECEIVED_AT, _RETENTION = 3, 4, 5, 6


class Encoded(NamedTuple):
    """Messages read, in the order asked for, and the IDs of those that are not stored.

    Damaged ones are missing, too. `fields` joined are `encoded_messages` of the answer.
    """

    fields: list[bytes]
    message_ids: list[int]
    payload_bytes: list[int]
    missing_ids: list[int]
    damaged_ids: list[int]

    def add(self, message_id: int, about: bytes, payload: bytes) -> None:
        """Append a message, of which `about` is all but its ID and payload."""
        encoded_id = varint(message_id)
        before, behind = _around(len(encoded_id), about, len(payload))
        self.fields.extend((before, encoded_id, behind, payload))
        self.message_ids.append(message_id)
        self.payload_bytes.append(len(payload))

    def add_run(
        self, run: Run, offsets: Sequence[int], payloads: Sequence[bytes], room: Room
    ) -> bool:
        """Append messages of one run, by their offsets, if all fit; or (False) none of them."""
        columns, count = run.columns, len(offsets)
        message_ids = [run.first_id + offset for offset in offsets]
        first_id = message_ids[0]
        in_a_row = message_ids == list(range(first_id, first_id + count))
        ids = varints(first_id, count) if in_a_row else list(map(varint, message_ids))
        if len(set(map(len, ids))) > 1:
            return False
        sizes = list(map(len, payloads))
        # What stands around an ID repeats: messages of a run differ in little beside the payload.
        parts = (columns.header_bytes, columns.created_at_ms, columns.retention_s)
        keys = list(zip(*(map(one.__getitem__, offsets) for one in parts), sizes, strict=True))
        around = {
            key: _around(len(ids[0]), _about_of(run, offset), key[-1])
            for key, offset in dict(zip(keys, offsets, strict=True)).items()
        }
        fields = [b""] * (4 * count)
        if len(around) == 1:
            before, behind = around[keys[0]]
            fields[0::4], fields[2::4] = [before] * count, [behind] * count
        else:
            fields[0::4], fields[2::4] = zip(*map(around.__getitem__, keys), strict=True)
        fields[1::4], fields[3::4] = ids, payloads
        payload_bytes = sum(sizes)
        if not room.take_all(payload_bytes, sum(map(len, fields)) - payload_bytes, count):
            return False
        self.fields.extend(fields)
        self.message_ids.extend(message_ids)
        self.payload_bytes.extend(sizes)
        return True


def _bytes_of(payloads: list[bytes | None]) -> list[bytes]:
    """Payloads up to the first one that is not here."""
    if not all(payloads) and None in payloads:
        payloads = payloads[: payloads.index(None)]
    return cast("list[bytes]", payloads)


def _around(id_size: int, about: bytes, payload_size: int) -> tuple[bytes, bytes]:
    """What stands before and behind the ID of a message, up to its payload."""
    behind = about + _PAYLOAD + varint(payload_size)
    size = len(_MESSAGE_ID) + id_size + len(behind) + payload_size
    return _ENCODED_MESSAGE + varint(size) + _MESSAGE_ID, behind


def _about_of(run: Run, offset: int) -> bytes:
    """All of a message of a run but its ID and payload."""
    columns, created_at_ms = run.columns, run.columns.created_at_ms[offset]
    if created_at_ms == NOT_SET:
        created_at_ms = run.received_at_ms
    return _about(
        columns.headers[offset], created_at_ms, run.received_at_ms, columns.retention_s[offset]
    )


def _about(
    headers: Mapping[str, str], created_at_ms: int, received_at_ms: int, retention_s: int
) -> bytes:
    """All of a message but its ID and payload."""
    parts = [
        field(_HEADERS, field(1, key.encode()) + field(2, value.encode()))
        for key, value in headers.items()
    ]
    parts.append(number_field(_CREATED_AT, created_at_ms))
    parts.append(number_field(_RECEIVED_AT, received_at_ms))
    parts.append(number_field(_RETENTION, retention_s))
    return b"".join(parts)


class EncodedReader:
    """Reads like `Reader`, but fresh messages straight from the cache."""

    def __init__(self, reader: Reader, cache: PayloadCache) -> None:
        """Read from these."""
        self._reader = reader
        self._cache = cache

    async def read(self, message_ids: Sequence[int], room: Room) -> Encoded:
        """The messages with these IDs, up to the one that no longer fits into `room`."""
        encoded = Encoded([], [], [], [], [])
        at, count = 0, len(message_ids)
        while at < count:
            run = self._cache.run(message_ids[at])
            took = 0 if run is None else self._take(run, message_ids, at, room, encoded)
            if took < 0:
                break
            if took == 0:
                took = await self._read_stored(message_ids, at, room, encoded)
                if took < 0:
                    break
            at += took
        return encoded

    def _take(
        self, run: Run, message_ids: Sequence[int], at: int, room: Room, encoded: Encoded
    ) -> int:
        """Encode what comes next and is in this run; tells how many, or -1: no more fits."""
        first_id, count = run.first_id, len(run.payloads)
        # No more than the run has: a slice for each of many short runs would copy the rest.
        offsets = [one - first_id for one in message_ids[at : at + count]]
        if min(offsets) < 0 or max(offsets) >= count:
            offsets = list(takewhile(range(count).__contains__, offsets))
        payloads = [run.payloads[offset] for offset in offsets]
        stored = _bytes_of(payloads)
        del offsets[len(stored) :]
        if len(offsets) >= TOGETHER_MIN and encoded.add_run(run, offsets, stored, room):
            return len(offsets)
        for offset, payload in zip(offsets, stored, strict=True):
            about = _about_of(run, offset)
            if not room.take(len(payload), len(about)):
                return -1
            encoded.add(first_id + offset, about, payload)
        return len(offsets)

    async def _read_stored(
        self, message_ids: Sequence[int], at: int, room: Room, encoded: Encoded
    ) -> int:
        """The same for what comes next and is not in the cache."""
        get = self._cache.get
        rest = (message_ids[index] for index in range(at, len(message_ids)))
        stored = list(takewhile(lambda message_id: get(message_id) is None, rest))
        read = await self._reader.read(stored, room)
        known: tuple[Mapping[str, str] | None, int, int, int] = (None, 0, 0, 0)
        about = b""
        for metadata, payload in read.messages:
            headers, created_at_ms = metadata.headers, metadata.created_at_ms
            received_at_ms, retention_s = metadata.received_at_ms, metadata.retention_s
            # Neighbours of one log entry share their headers, and are alike in the rest.
            if headers is not known[0] or (created_at_ms, received_at_ms, retention_s) != known[1:]:
                known = (headers, created_at_ms, received_at_ms, retention_s)
                about = _about(*known)
            encoded.add(metadata.message_id, about, payload)
        encoded.missing_ids.extend(read.missing_ids)
        encoded.damaged_ids.extend(read.damaged_ids)
        told = len(read.messages) + len(read.missing_ids)
        return told if told == len(stored) else -1
