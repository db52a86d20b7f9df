"""Messages as bytes, for brokers that hand them on: no object per message on the way.

Each is a `Message` of message.proto in protobuf's wire format, as its own library would parse it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from libs.serving.protobytes import field, number_field, varint
from services.ingest.batches import NOT_SET
from services.ingest.payload_cache import PayloadCache, Run
from services.ingest.reading import Reader, Room

__all__ = ["Encoded", "EncodedReader"]

_MESSAGE_ID: Final = b"\x08"
_PAYLOAD: Final = b"\x12"
_HEADERS, _CREATED_AT, _RECEIVED_AT, _RETENTION = 3, 4, 5, 6


class Encoded(NamedTuple):
    """Messages read, in the order asked for, and the IDs of those that are not stored.

    Damaged ones are missing, too.
    """

    messages: list[bytes]
    message_ids: list[int]
    payload_bytes: list[int]
    missing_ids: list[int]
    damaged_ids: list[int]

    def add(self, message_id: int, about: bytes, payload: bytes) -> None:
        """Append a message, of which `about` is all but its ID and payload."""
        size = len(payload)
        self.messages.append(
            b"".join((_MESSAGE_ID, varint(message_id), about, _PAYLOAD, varint(size), payload))
        )
        self.message_ids.append(message_id)
        self.payload_bytes.append(size)


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
        columns, payloads, first_id = run.columns, run.payloads, run.first_id
        headers, created, retention = (
            columns.header_bytes,
            columns.created_at_ms,
            columns.retention_s,
        )
        known: dict[tuple[bytes, int, int], bytes] = {}
        end = first_id + len(payloads)
        start = at
        # By index: a slice for each of many short runs would copy the rest each time.
        for at in range(start, len(message_ids)):
            message_id = message_ids[at]
            offset = message_id - first_id
            payload = payloads[offset] if first_id <= message_id < end else None
            if payload is None:
                return at - start
            key = (headers[offset], created[offset], retention[offset])
            about = known.get(key)
            if about is None:
                created_at_ms = run.received_at_ms if key[1] == NOT_SET else key[1]
                about = known[key] = _about(
                    columns.headers[offset], created_at_ms, run.received_at_ms, key[2]
                )
            if not room.take(len(payload), len(about)):
                return -1
            encoded.add(message_id, about, payload)
        return len(message_ids) - start

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
