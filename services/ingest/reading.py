"""Messages by ID: fresh ones from memory, the others from the database and the blobs."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple, Protocol

from libs.storage.blobs import Blobs
from libs.storage.errors import ObjectNotFound, StorageError
from libs.storage.keys import (
    log_range,
    parse_log_key,
    parse_payload_key,
    payload_key,
    payload_range,
)
from libs.storage.metadata import MessageMetadata, decode_log_entry
from libs.storage.payloads import PayloadUri, decode_payload
from libs.storage.slate import Database
from services.ingest.etags import etag_of
from services.ingest.payload_cache import PayloadCache
from services.ingest.tailing import MetadataLog

__all__ = ["Metadata", "Read", "Reader", "Room"]

WINDOW: Final = 256
"""IDs looked up at once; between windows it shows whether the answer is full."""

NEAR: Final = 8
"""IDs at most so far apart are read by one scan: a row costs 7 µs there, and 70 by itself."""

RUN_MIN: Final = 4
"""Shorter runs are read one by one: a scan begins in 300 µs."""

NEAR_ENTRIES: Final = 4096
"""An entry at most so many IDs further on is looked for forwards from the one before."""

ENTRIES_AHEAD: Final = 8
ENTRIES_KEPT: Final = 64
BLOBS_AT_ONCE: Final = 8


class Metadata(Protocol):
    """What is known of a message beside its payload, in whatever form."""

    @property
    def message_id(self) -> int:
        """Its ID."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Its headers."""

    @property
    def created_at_ms(self) -> int:
        """When it was made."""

    @property
    def received_at_ms(self) -> int:
        """When it was accepted."""

    @property
    def retention_s(self) -> int:
        """How long it lives; 0 = for ever."""

    @property
    def payload_bytes(self) -> int:
        """The size of its payload."""


class Read(NamedTuple):
    """Messages read, in the order asked for, and the IDs of those that are not stored.

    `etags` are those of the messages, where they were asked for.
    """

    messages: list[tuple[Metadata, bytes]]
    missing_ids: list[int]
    etags: list[str]


class _Entry(NamedTuple):
    last_message_id: int
    messages: dict[int, MessageMetadata]


class Reader:
    """Reads durable messages."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        log: MetadataLog,
        cache: PayloadCache,
    ) -> None:
        """Read from these."""
        self._database = database
        self._blobs = blobs
        self._log = log
        self._cache = cache
        self._entries: dict[int, _Entry] = {}
        self._sequences: list[int] = []
        self._changes = 0
        self._changing: dict[int, asyncio.Future[None]] = {}
        self._reading: dict[int, set[int]] = {}  # by read, what has changed since it began
        self._reads = 0

    async def read(
        self,
        message_ids: Sequence[int],
        room: Room,
        *,
        with_etags: bool = False,
    ) -> Read:
        """The messages with these IDs, up to the one that no longer fits into `room`."""
        self._reads += 1
        number = self._reads
        try:
            while True:
                changed = self._reading[number] = set()
                left = room.copy()
                read = await self._read(message_ids, left, with_etags)
                # Headers from before and a payload from after belong to no message.
                being = self._changing and [i for i in message_ids if i in self._changing]
                if being:
                    settled = {self._changing[i] for i in being}
                    await asyncio.wait(settled)
                    for one in settled:
                        one.result()
                elif changed.isdisjoint(message_ids):
                    room.become(left)
                    return read
        finally:
            del self._reading[number]

    async def _read(self, message_ids: Sequence[int], room: Room, with_etags: bool) -> Read:
        read = Read([], [], [])
        remaining = iter(message_ids)
        while window := list(islice(remaining, WINDOW)):
            found = await self._metadata(window)
            wanted = list(_fitting(window, found, room))
            records: dict[int, bytes] | None = {} if with_etags else None
            payloads = await self._payloads([i for i in wanted if i in found], records)
            for message_id in wanted:
                payload = payloads.get(message_id)
                if payload is None:
                    read.missing_ids.append(message_id)
                    continue
                metadata = found[message_id]
                read.messages.append((metadata, payload))
                if records is not None:
                    read.etags.append(str(etag_of(records[message_id], metadata.headers)))
            if len(wanted) < len(window):
                break
        return read

    def changing(self, message_ids: Sequence[int]) -> None:
        """These get other content with the next commit, or go: see `changed`."""
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changing.update(dict.fromkeys(message_ids, settled))

    def changed(self, message_ids: Sequence[int], sequences: Iterable[int]) -> None:
        """The messages, in the entries of these sequences, have changed or are gone, durably."""
        self._changes += 1
        self._cache.forget(message_ids)
        forgotten = [one for one in sequences if self._entries.pop(one, None) is not None]
        if forgotten:
            self._sequences = sorted(self._entries)
        for changed in self._reading.values():
            changed.update(message_ids)
        for settled in {self._changing.pop(one) for one in message_ids if one in self._changing}:
            if not settled.done():
                settled.set_result(None)

    def not_changed(self, message_ids: Sequence[int], error: StorageError) -> None:
        """Their commit failed: nobody knows what they are until a process starts anew."""
        for failed in {self._changing[one] for one in message_ids if one in self._changing}:
            if not failed.done():
                failed.set_exception(error)
                failed.exception()  # perhaps nobody waits

    # --- Metadata -------------------------------------------------------------

    async def _metadata(self, message_ids: Iterable[int]) -> dict[int, Metadata]:
        """What is known of those of the messages that are stored and durable."""
        found: dict[int, Metadata] = {}
        durable_id = self._log.end.last_message_id
        before = -1
        for message_id in sorted({one for one in message_ids if one <= durable_id}):
            entry = self._kept(message_id)
            recent = self._log.recent(message_id) if entry is None else None
            if recent is not None:
                self._keep(recent.sequence, decode_log_entry(recent.value))
                entry = self._kept(message_id)
            elif entry is None:
                before = await self._keep_entry(message_id, before)
                entry = self._kept(message_id)
            if entry is not None and message_id in entry.messages:
                found[message_id] = entry.messages[message_id]
        return found

    def _kept(self, message_id: int) -> _Entry | None:
        """The entry read lately whose IDs this one is among."""
        at = bisect_right(self._sequences, message_id) - 1
        entry = self._entries[self._sequences[at]] if at >= 0 else None
        return entry if entry is not None and message_id <= entry.last_message_id else None

    async def _keep_entry(self, message_id: int, before: int) -> int:
        """Read the entry that would have this message; gives the last sequence read.

        `before` is a sequence known to stand before it, or -1.
        """
        if 0 <= message_id - before <= NEAR_ENTRIES and before >= 0:
            last = before
            span = log_range(before + 1, message_id)
            count = self._changes
            async for rows in self._database.scan(*span, limit=ENTRIES_AHEAD, durable=True):
                if count != self._changes:
                    break
                for key, value in rows:
                    last = parse_log_key(key)
                    self._keep(last, decode_log_entry(value))
            if self._kept(message_id) is not None:
                return last
        while True:
            count = self._changes
            stored = await self._log.stored(message_id)
            if stored is None:
                return before
            if count == self._changes:
                # Else it may be the entry as it was, and nothing would ever remove it from here.
                self._keep(*stored)
                return stored[0]

    def _keep(self, sequence: int, messages: list[MessageMetadata]) -> None:
        if len(self._entries) >= ENTRIES_KEPT:
            del self._entries[next(iter(self._entries))]
        self._entries.pop(sequence, None)
        by_id = {message.message_id: message for message in messages}
        self._entries[sequence] = _Entry(messages[-1].message_id, by_id)
        self._sequences = sorted(self._entries)

    # --- Payloads -------------------------------------------------------------

    async def _payloads(
        self, message_ids: Sequence[int], records: dict[int, bytes] | None
    ) -> dict[int, bytes]:
        """The payloads of these messages; those that are gone are left out.

        Their records as they are stored go into `records`, if it is given.
        """
        found: dict[int, bytes] = {}
        older: list[int] = []
        for message_id in message_ids:
            payload = self._cache.get(message_id) if records is None else None
            if payload is None:
                older.append(message_id)
            else:
                found[message_id] = payload
        if older:
            await self._read_payloads(sorted(set(older)), found, records)
        return found

    async def _read_payloads(
        self, message_ids: list[int], found: dict[int, bytes], records: dict[int, bytes] | None
    ) -> None:
        blobs: dict[int, PayloadUri] = {}

        def take(message_id: int, value: bytes) -> None:
            record = decode_payload(value)
            if records is not None:
                records[message_id] = value
            if isinstance(record, PayloadUri):
                blobs[message_id] = record
            else:
                found[message_id] = record

        strays: list[int] = []
        for run in _runs(message_ids):
            if len(run) < RUN_MIN:
                strays += run
                continue
            wanted = set(run)
            async for rows in self._database.scan(
                *payload_range(run[0], run[-1]), limit=run[-1] - run[0] + 1, durable=True
            ):
                for key, value in rows:
                    message_id = parse_payload_key(key)
                    if message_id in wanted:
                        take(message_id, value)
        values = await self._database.get_many(map(payload_key, strays), durable=True)
        for message_id, stray in zip(strays, values, strict=True):
            if stray is not None:
                take(message_id, stray)
        await self._read_blobs(blobs, found)

    async def _read_blobs(self, blobs: dict[int, PayloadUri], found: dict[int, bytes]) -> None:
        remaining = iter(blobs.items())
        while some := list(islice(remaining, BLOBS_AT_ONCE)):
            payloads = await asyncio.gather(*(self.read_blob(record) for _, record in some))
            for (message_id, _), payload in zip(some, payloads, strict=True):
                if payload is not None:
                    found[message_id] = payload

    async def read_blob(self, record: PayloadUri) -> bytes | None:
        """A payload that has an object of its own; None when that is gone."""
        try:
            return await self._blobs.get(record.uri)
        except ObjectNotFound:
            return None


class Room:
    """What still fits into an answer: the first message whatever its size, then up to the bounds.

    `payload_bytes` bounds the payloads, `answer_bytes` payloads and headers together.
    """

    __slots__ = ("_answer_bytes", "_empty", "_payload_bytes")

    def __init__(self, payload_bytes: int, answer_bytes: int) -> None:
        self._payload_bytes = payload_bytes
        self._answer_bytes = answer_bytes
        self._empty = True

    def copy(self) -> Room:
        """Another one that is as full."""
        other = Room(0, 0)
        other.become(self)
        return other

    def become(self, other: Room) -> None:
        """Be as full as the other one."""
        self._payload_bytes = other._payload_bytes
        self._answer_bytes = other._answer_bytes
        self._empty = other._empty

    def take(self, payload_bytes: int, about_bytes: int) -> bool:
        """Whether a message fits, with so many bytes of headers and numbers; takes its place."""
        self._payload_bytes -= payload_bytes
        self._answer_bytes -= payload_bytes + about_bytes + _FIXED_BYTES
        fits = self._empty or (self._payload_bytes >= 0 and self._answer_bytes >= 0)
        self._empty = False
        return fits


_FIXED_BYTES: Final = 64
"""Tags, lengths and numbers of a message or a header on the wire, at most."""


def _fitting(
    message_ids: Iterable[int], found: Mapping[int, Metadata], room: Room
) -> Iterator[int]:
    """The IDs before the one that no longer fits; missing ones take no room."""
    for message_id in message_ids:
        metadata = found.get(message_id)
        if metadata is not None:
            # A character has at most 4 bytes of UTF-8, and counting them all costs more.
            about_bytes = sum(
                4 * (len(key) + len(value)) + _FIXED_BYTES
                for key, value in metadata.headers.items()
            )
            if not room.take(metadata.payload_bytes, about_bytes):
                return
        yield message_id


def _runs(message_ids: list[int]) -> Iterator[list[int]]:
    """Ascending IDs, cut where two are further apart than `NEAR`."""
    run: list[int] = []
    for message_id in message_ids:
        if run and message_id - run[-1] > NEAR:
            yield run
            run = []
        run.append(message_id)
    if run:
        yield run
