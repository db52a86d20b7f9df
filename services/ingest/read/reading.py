"""Messages by ID: fresh ones from memory, the others from the database and the blobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final, NamedTuple

from libs.storage.database.blobs import Blobs
from libs.storage.database.slate import Database
from libs.storage.errors import CorruptRecord, StorageError
from libs.storage.layout.keys import log_range, parse_log_key
from libs.storage.records.payload_packs import PACKED_MESSAGES_MIN, decode_pack, pack_of
from libs.storage.records.payloads import PayloadUri, decode_payload, encode_inline
from services.ingest.read.answer_room import Metadata, ResponseBudget, fitting
from services.ingest.read.blob_reads import BlobReads
from services.ingest.read.entry_cache import DecodedEntry, EntryCache, decoded
from services.ingest.read.etags import etag_of
from services.ingest.read.payload_cache import PayloadCache
from services.ingest.read.rows import PACKS, PAYLOADS, read_rows
from services.ingest.read.tailing import MetadataLog

__all__ = ["Metadata", "Read", "Reader", "ResponseBudget"]

log = logging.getLogger(__name__)

WINDOW: Final = 256
"""IDs looked up at once; between windows it shows whether the answer is full."""

NEAR_ENTRIES: Final = 4096
"""An entry at most so many IDs further on is looked for forwards from the one before."""

ENTRIES_AHEAD: Final = 8
ENTRIES_BYTES_MAX: Final = 64 << 20
"""Decoded entries in memory: one has up to 65,535 messages, which take some 20 MB."""

BLOBS_AT_ONCE: Final = 8

BLOB_WAIT_S: Final = 4.0
"""A payload whose object takes longer is left out of the answer, so that the others come in time;
it goes on being read, and comes with a later answer."""


class Read(NamedTuple):
    """Messages read, in the order asked for, and the IDs of those that are not stored.

    `etags` are those of the messages, where they were asked for. Damaged ones are missing, too. The
    payloads of slow ones are still being read: they are neither.
    """

    messages: list[tuple[Metadata, bytes]]
    missing_ids: list[int]
    etags: list[str]
    damaged_ids: list[int]
    slow_ids: Sequence[int] = ()


class _Packs(NamedTuple):
    """By message, the pack that may have its payload: likely ones, and those of small entries."""

    likely: dict[int, int]
    others: dict[int, int]


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
        self._blob_reads = BlobReads(blobs)
        self._log = log
        self._cache = cache
        self._entries = EntryCache(ENTRIES_BYTES_MAX)
        self._changes = 0
        self._changing: dict[int, asyncio.Future[None]] = {}
        self._reading: dict[int, set[int]] = {}  # by read, what has changed since it began
        self._reads = 0

    async def read(
        self,
        message_ids: Sequence[int],
        room: ResponseBudget,
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

    async def _read(
        self, message_ids: Sequence[int], room: ResponseBudget, with_etags: bool
    ) -> Read:
        read = Read([], [], [], [])
        damaged: set[int] = set()
        slow: set[int] = set()
        remaining = iter(message_ids)
        while window := list(islice(remaining, WINDOW)):
            packs = _Packs({}, {})
            found = await self._metadata(window, packs, damaged)
            wanted = list(fitting(window, found, room))
            records: dict[int, bytes] | None = {} if with_etags else None
            stored = [i for i in wanted if i in found]
            payloads = await self._payloads(stored, packs, records, damaged, slow)
            for message_id in wanted:
                payload = payloads.get(message_id)
                if message_id in slow:
                    continue
                if payload is None:
                    read.missing_ids.append(message_id)
                    if message_id in damaged:
                        read.damaged_ids.append(message_id)
                    continue
                metadata = found[message_id]
                read.messages.append((metadata, payload))
                if records is not None:
                    read.etags.append(str(etag_of(records[message_id], metadata.headers)))
            # With one that is slow the answer is late as it is.
            if slow or len(wanted) < len(window):
                break
        return read._replace(slow_ids=sorted(slow))

    async def close(self) -> None:
        """End what is still being read."""
        await self._blob_reads.close()

    def changing(self, message_ids: Sequence[int]) -> None:
        """These get other content with the next commit, or go: see `changed`."""
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changing.update(dict.fromkeys(message_ids, settled))

    def changed(self, message_ids: Sequence[int], sequences: Iterable[int]) -> None:
        """The messages, in the entries of these sequences, have changed or are gone, durably."""
        self._changes += 1
        self._cache.forget(message_ids)
        self._entries.forget(sequences)
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

    async def _metadata(
        self, message_ids: Iterable[int], packs: _Packs, damaged: set[int]
    ) -> dict[int, Metadata]:
        """What is known of those of the messages that are stored and durable; fills `packs`."""
        found: dict[int, Metadata] = {}
        durable_id = self._log.end.last_message_id
        before = -1
        entry: DecodedEntry | None = None
        for message_id in sorted({one for one in message_ids if one <= durable_id}):
            if entry is None or message_id > entry.last_message_id:  # else the same once more
                entry = self._entries.of(message_id)
            if entry is None:
                try:
                    entry, before = await self._entry(message_id, before)
                except CorruptRecord as error:
                    log.error("message %d cannot be read: %s", message_id, error)
                    damaged.add(message_id)
            if entry is not None and message_id in entry.messages:
                found[message_id] = entry.messages[message_id]
                among = packs.likely if len(entry.messages) >= PACKED_MESSAGES_MIN else packs.others
                among[message_id] = pack_of(entry.sequence, message_id)
        return found

    async def _entry(self, message_id: int, before: int) -> tuple[DecodedEntry | None, int]:
        """The entry that may have this message, and the last sequence read.

        `before` is a sequence known to stand before it, or -1. Raises CorruptRecord.
        """
        if before >= 0 and message_id - before <= NEAR_ENTRIES:
            if self._log.recent(message_id) is None:
                before = await self._read_ahead(message_id, before)
            entry = self._entries.of(message_id)
            if entry is not None:
                return entry, entry.sequence
        while True:
            count = self._changes
            recent = self._log.recent(message_id)
            stored = (
                (recent.sequence, recent.value)
                if recent is not None
                else await self._log.stored(message_id)
            )
            if stored is None:
                return None, before
            entry = await decoded(*stored)
            if count == self._changes:
                # Else it may be the entry as it was, and nothing would ever remove it from here.
                self._entries.add(entry)
                return (entry if message_id <= entry.last_message_id else None), entry.sequence

    async def _read_ahead(self, message_id: int, before: int) -> int:
        """Keep the next entries up to this message's; gives the last sequence read."""
        span = log_range(before + 1, message_id)
        count = self._changes
        async for rows in self._database.scan(*span, limit=ENTRIES_AHEAD, durable=True):
            with suppress(CorruptRecord):  # told if it is the one that is looked for
                for key, value in rows:
                    entry = await decoded(parse_log_key(key), value)
                    if count != self._changes:
                        return before
                    self._entries.add(entry)
                    before = entry.sequence
        return before

    # --- Payloads -------------------------------------------------------------

    async def _payloads(
        self,
        message_ids: Sequence[int],
        packs: _Packs,
        records: dict[int, bytes] | None,
        damaged: set[int],
        slow: set[int],
    ) -> dict[int, bytes]:
        """The payloads of these messages; those that are gone, damaged or slow are left out.

        Their records as they are stored go into `records`, if it is given.
        """
        found: dict[int, bytes] = {}
        older: list[int] = []
        if records is not None or self._cache.has_none_of(message_ids):
            older.extend(message_ids)
        else:
            for message_id in message_ids:
                payload = self._cache.get(message_id)
                if payload is None:
                    older.append(message_id)
                else:
                    found[message_id] = payload
        if older:
            wanted, in_damaged = sorted(set(older)), set[int]()
            left = await self._read_packs(wanted, packs.likely, found, records, in_damaged)
            await self._read_payloads(left, found, records, damaged, slow)
            known = damaged | slow
            left = [one for one in left if one not in found and one not in known]
            await self._read_packs(left, packs.others, found, records, in_damaged)
            damaged |= in_damaged - found.keys()
        return found

    async def _read_packs(
        self,
        message_ids: list[int],
        packs: dict[int, int],
        found: dict[int, bytes],
        records: dict[int, bytes] | None,
        in_damaged: set[int],
    ) -> list[int]:
        """Those of these messages that are in none of the packs, as far as can be told.

        Those of damaged packs are among them, since they may have records of their own.
        """
        wanted: dict[int, list[int]] = {}
        for one in message_ids:
            if one in packs:
                wanted.setdefault(packs[one], []).append(one)
        async for rows in read_rows(self._database, PACKS, wanted):
            for first_id, value in rows:
                try:
                    payloads = decode_pack(first_id, value)
                except CorruptRecord as error:
                    log.error("the payloads from message %d on cannot be read: %s", first_id, error)
                    in_damaged.update(wanted[first_id])
                    continue
                for one in wanted[first_id]:
                    if one in payloads:
                        found[one] = payloads[one]
                        if records is not None:
                            records[one] = encode_inline(payloads[one])
        return [one for one in message_ids if one not in found]

    async def _read_payloads(
        self,
        message_ids: list[int],
        found: dict[int, bytes],
        records: dict[int, bytes] | None,
        damaged: set[int],
        slow: set[int],
    ) -> None:
        blobs: dict[int, PayloadUri] = {}

        def take(message_id: int, value: bytes) -> None:
            try:
                record = decode_payload(value)
            except CorruptRecord as error:
                log.error("the payload of message %d cannot be read: %s", message_id, error)
                damaged.add(message_id)
                return
            if isinstance(record, PayloadUri) and not self._blobs.owns(record.uri):
                log.error("the payload of message %d is not below this root", message_id)
                damaged.add(message_id)
                return
            if records is not None:
                records[message_id] = value
            if isinstance(record, PayloadUri):
                blobs[message_id] = record
            else:
                found[message_id] = record

        async for rows in read_rows(self._database, PAYLOADS, message_ids):
            for message_id, value in rows:
                take(message_id, value)
        await self._read_blobs(blobs, found, slow)

    async def _read_blobs(
        self, blobs: dict[int, PayloadUri], found: dict[int, bytes], slow: set[int]
    ) -> None:
        remaining = iter(blobs.items())
        while some := list(islice(remaining, BLOBS_AT_ONCE)):
            reads = {one: asyncio.create_task(self.read_blob(record)) for one, record in some}
            try:
                await asyncio.wait(reads.values(), timeout=BLOB_WAIT_S)
            finally:
                for read in reads.values():
                    read.cancel()
            failed = [read.exception() for read in reads.values() if read.done()]
            if any(failed):
                raise next(filter(None, failed))
            for message_id, read in reads.items():
                if not read.done():
                    slow.add(message_id)
                elif (payload := read.result()) is not None:
                    found[message_id] = payload
            if slow:
                slow.update(one for one, _ in remaining)

    async def read_blob(self, record: PayloadUri) -> bytes | None:
        """A payload that has an object of its own; None when that is gone."""
        return await self._blob_reads.read(record)
