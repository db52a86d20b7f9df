"""Messages as bytes, for brokers that hand them on: no object per message on the way.

They come in runs, as neighbours differ in little but their payloads. What those of a run have in
common is a `Message` of message.proto in protobuf's wire format, as its own library would parse it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, groupby, takewhile
from operator import ne
from typing import Final, NamedTuple, TypeVar, cast

from libs.serving.protobytes import field, number_field, packed_varints, varint
from services.ingest.batches import NOT_SET
from services.ingest.read.payload_cache import PayloadCache, Run
from services.ingest.read.reading import Metadata, Reader, ResponseBudget

__all__ = ["Alike", "Encoded", "EncodedReader"]

T = TypeVar("T")

_RUN: Final = b"\x42"
_COMMON, _MESSAGE_IDS = 1, 2
_PAYLOADS: Final = b"\x1a"
_MESSAGE_ID, _PAYLOAD = 1, 2
_HEADERS, _CREATED_AT, _RECEIVED_AT, _RETENTION = 3, 4, 5, 6


class Alike(NamedTuple):
    """Messages in a row that have all but their IDs and payloads in common."""

    common: bytes
    message_ids: list[int]
    payloads: list[bytes]

    def fields(self) -> list[bytes]:
        """As one of the `runs` of an answer, in pieces."""
        sizes = list(map(len, self.payloads))
        head = _PAYLOADS + varint(sizes[0])
        pieces = [head, b""] * len(sizes)
        if sizes.count(sizes[0]) < len(sizes):
            heads = {size: _PAYLOADS + varint(size) for size in set(sizes)}
            pieces[0::2] = map(heads.__getitem__, sizes)
        pieces[1::2] = self.payloads
        before = field(_COMMON, self.common) + field(_MESSAGE_IDS, packed_varints(self.message_ids))
        size = len(before) + sum(map(len, pieces))
        return [_RUN + varint(size) + before, *pieces]

    def messages(self) -> Iterator[bytes]:
        """Each for itself."""
        for message_id, payload in zip(self.message_ids, self.payloads, strict=True):
            yield number_field(_MESSAGE_ID, message_id) + self.common + field(_PAYLOAD, payload)


class Encoded(NamedTuple):
    """Messages read, in the order asked for, and the IDs of those that are not stored.

    Damaged ones are missing, too; the payloads of slow ones are still being read.
    """

    runs: list[Alike]
    missing_ids: list[int]
    damaged_ids: list[int]
    slow_ids: list[int]

    def add(self, common: bytes, message_ids: list[int], payloads: list[bytes]) -> None:
        """Append messages that are alike."""
        if self.runs and self.runs[-1].common == common:
            self.runs[-1].message_ids.extend(message_ids)
            self.runs[-1].payloads.extend(payloads)
        else:
            self.runs.append(Alike(common, message_ids, payloads))


def _of(column: Sequence[T], offsets: Sequence[int]) -> Sequence[T]:
    """What stands at these offsets."""
    if isinstance(offsets, range):
        return column[offsets.start : offsets.stop]
    return list(map(column.__getitem__, offsets))


def _bytes_of(payloads: Sequence[bytes | None]) -> list[bytes]:
    """Payloads up to the first one that is not here."""
    if not all(payloads) and None in payloads:
        payloads = payloads[: payloads.index(None)]
    return cast("list[bytes]", payloads)


def _stretches(run: Run, offsets: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Where messages of a run cease to be alike, and what those up to there have in common."""
    columns, count = run.columns, len(offsets)
    headers = _of(columns.header_bytes, offsets)
    times = _of(columns.created_at_ms, offsets)
    retentions = _of(columns.retention_s, offsets)
    ends = [count]
    if any(column.count(column[0]) < count for column in (headers, times, retentions)):
        rows = list(zip(headers, times, retentions, strict=True))
        ends = [*compress(range(1, count), map(ne, rows, rows[1:])), count]
    start, before, behind = 0, b"", b""
    known: tuple[bytes, int] | None = None
    for end in ends:
        # Where each message has a time of its own, the rest is the same for most.
        if known != (headers[start], retentions[start]):
            known = (headers[start], retentions[start])
            before = _before_created(columns.headers[offsets[start]])
            behind = _behind_created(run.received_at_ms, retentions[start])
        created_at_ms = run.received_at_ms if times[start] == NOT_SET else times[start]
        yield end, before + number_field(_CREATED_AT, created_at_ms) + behind
        start = end


def _before_created(headers: Mapping[str, str]) -> bytes:
    """What a message has before the time of its creation, but its ID and payload."""
    return b"".join(
        field(_HEADERS, field(1, key.encode()) + field(2, value.encode()))
        for key, value in headers.items()
    )


def _behind_created(received_at_ms: int, retention_s: int) -> bytes:
    """What it has behind that."""
    return number_field(_RECEIVED_AT, received_at_ms) + number_field(_RETENTION, retention_s)


class EncodedReader:
    """Reads like `Reader`, but fresh messages straight from the cache."""

    def __init__(self, reader: Reader, cache: PayloadCache) -> None:
        """Read from these."""
        self._reader = reader
        self._cache = cache

    async def read(self, message_ids: Sequence[int], room: ResponseBudget) -> Encoded:
        """The messages with these IDs, up to the one that no longer fits into `room`."""
        encoded = Encoded([], [], [], [])
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
        self, run: Run, message_ids: Sequence[int], at: int, room: ResponseBudget, encoded: Encoded
    ) -> int:
        """Encode what comes next and is in this run; tells how many, or -1: no more fits."""
        first_id, count, asked = run.first_id, len(run.payloads), len(message_ids)
        first = message_ids[at] - first_id
        offsets: Sequence[int] = range(first, min(count, first + asked - at))
        wanted = range(first_id + offsets[0], first_id + offsets[-1] + 1)
        end = at + len(wanted)
        if message_ids[end - 1] != wanted[-1] or message_ids[at:end] != list(wanted):
            rest = (message_ids[index] - first_id for index in range(at, asked))
            offsets = list(takewhile(range(count).__contains__, rest))
        payloads = _bytes_of(_of(run.payloads, offsets))
        offsets = offsets[: len(payloads)]
        if not payloads:
            return 0
        start = 0
        for end, common in _stretches(run, offsets):
            alike = payloads[start:end]
            fit = _fitting(alike, common, room)
            if fit:
                ids = message_ids[at + start : at + start + fit]
                encoded.add(common, list(ids), alike[:fit])
            if fit < len(alike):
                return -1
            start = end
        return len(payloads)

    async def _read_stored(
        self, message_ids: Sequence[int], at: int, room: ResponseBudget, encoded: Encoded
    ) -> int:
        """The same for what comes next and is not in the cache."""
        stored = list(message_ids[at:])
        if not self._cache.has_none_of(stored):
            get = self._cache.get
            stored = list(takewhile(lambda message_id: get(message_id) is None, stored))
        read = await self._reader.read(stored, room)
        # Neighbours of one log entry share their headers, and are mostly alike in the rest.
        for about, alike in groupby(read.messages, _about):
            headers, created_at_ms, received_at_ms, retention_s = about
            common = (
                _before_created(headers)
                + number_field(_CREATED_AT, created_at_ms)
                + _behind_created(received_at_ms, retention_s)
            )
            metadata, payloads = zip(*alike, strict=True)
            encoded.add(common, [one.message_id for one in metadata], list(payloads))
        encoded.missing_ids.extend(read.missing_ids)
        encoded.damaged_ids.extend(read.damaged_ids)
        encoded.slow_ids.extend(read.slow_ids)
        count = len(read.messages) + len(read.missing_ids) + len(read.slow_ids)
        return count if count == len(stored) else -1


def _about(message: tuple[Metadata, bytes]) -> tuple[Mapping[str, str], int, int, int]:
    """All of a message but its ID and payload."""
    metadata = message[0]
    return (
        metadata.headers,
        metadata.created_at_ms,
        metadata.received_at_ms,
        metadata.retention_s,
    )


def _fitting(payloads: list[bytes], common: bytes, room: ResponseBudget) -> int:
    """How many of these fit, the first ones; takes their places.

    What they have in common counts for each: brokers of earlier versions are sent it so.
    """
    count = len(payloads)
    if count > 1 and room.take_all(sum(map(len, payloads)), count * len(common), count):
        return count
    for at, payload in enumerate(payloads):
        if not room.take(len(payload), len(common)):
            return at
    return count
