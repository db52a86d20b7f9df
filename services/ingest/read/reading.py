"""Messages by ID: fresh ones from memory, the others from the database and the blobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, islice, takewhile
from typing import Final, cast

from libs.storage.database.blobs import Blobs
from libs.storage.database.slate import Database
from libs.storage.errors import CorruptRecord, DamagedObject, DamagedStore
from libs.storage.layout.keys import log_range, parse_log_key
from libs.storage.records.metadata import MessageMetadata
from libs.storage.records.payload_packs import PACKED_MESSAGES_MIN, decode_pack, pack_of
from libs.storage.records.payloads import PayloadUri, decode_payload, encode_inline
from services.ingest.batches import select
from services.ingest.read.blob_reads import BlobReads
from services.ingest.read.entries import DecodedEntry, EntryCache, decoded, entry_before
from services.ingest.read.etags import etag_of
from services.ingest.read.message_runs import (
    MessageRun,
    ReadResult,
    ResponseBudget,
    common_of,
    common_stretches,
    fitting,
)
from services.ingest.read.payload_cache import CachedRun, PayloadCache
from services.ingest.read.rows import PACKS, PAYLOADS, read_rows
from services.ingest.read.tailing import MetadataLog, Unsettled
from slatemq._counts import counted

log = logging.getLogger(__name__)

WINDOW: Final = 256
"""IDs looked up at once in the database; a full response ends the read between two windows."""

NEAR_ENTRIES: Final = 4096
"""An entry at most this many IDs after the one before is looked for by reading on from there."""

ENTRIES_AHEAD: Final = 8
ENTRIES_BYTES_MAX: Final = 64 << 20
"""Decoded entries in memory: one has up to 65,535 messages, which take some 20 MB."""

BLOBS_AT_ONCE: Final = 8

BLOB_WAIT_S: Final = 4.0
"""A payload whose object takes longer is left out of the answer, so that the others come in time;
it goes on being read, and comes with a later answer."""


class Reader:
    """Reads durable messages: fresh ones straight from the cache, the others from the database.

    Attributes:
        changing: Messages that the next commit changes or removes; `changed` follows.
    """

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        log: MetadataLog,
        cache: PayloadCache,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self.blob_reads = BlobReads(blobs)
        self._log = log
        self.cache = cache
        self._entries = EntryCache(ENTRIES_BYTES_MAX)
        self._changes = 0
        self.changing = Unsettled()
        self._reading: dict[int, set[int]] = {}  # by read, what has changed since it began
        self._reads = 0
        self.cached_count = self.stored_count = 0
        """Messages given from the cache and from the database, since the start."""

    async def read(
        self, message_ids: Sequence[int], room: ResponseBudget, *, with_etags: bool = False
    ) -> ReadResult:
        """The messages with these IDs, up to the first that no longer fits into `room`."""
        result = ReadResult([], [], [], [])
        at, count = 0, len(message_ids)
        while at < count:
            # An etag comes from the payload's record, which the cache has not.
            run = None if with_etags else self.cache.run(message_ids[at])
            took = 0 if run is None else self._take_cached(run, message_ids, at, room, result)
            if took == 0:
                if result.slow_ids:
                    break  # The response is late already.
                stored = list(message_ids[at : at + WINDOW])
                if not with_etags and not self.cache.has_none_of(stored):
                    stored = list(takewhile(self._is_stored_only, stored))
                try:
                    took = await self._read_stored(stored, room, result, with_etags)
                except DamagedStore:
                    if result.runs or result.missing_ids:
                        break  # They are asked for again, and then alone.
                    raise
                self.stored_count += max(took, 0)
            else:
                self.cached_count += max(took, 0)
            if took < 0:
                break
            at += took
        return result

    def cached(self, message_ids: Sequence[int], bytes_max: int) -> list[MessageRun]:
        """Messages with these IDs: up to the first that is not cached, or does not fit."""
        result = ReadResult([], [], [], [])
        room = ResponseBudget(bytes_max, bytes_max)
        room.take(0, 0)  # No message is so important that it may have any size.
        at = 0
        while at < len(message_ids) and (run := self.cache.run(message_ids[at])) is not None:
            took = self._take_cached(run, message_ids, at, room, result)
            if took <= 0:
                break
            at += took
        return result.runs

    # --- The cache ------------------------------------------------------------

    def _take_cached(
        self,
        run: CachedRun,
        message_ids: Sequence[int],
        at: int,
        room: ResponseBudget,
        result: ReadResult,
    ) -> int:
        """Add the next messages of this run. Returns their number, or -1 when no more fit."""
        first_id, count, asked = run.first_id, len(run.payloads), len(message_ids)
        first = message_ids[at] - first_id
        offsets: Sequence[int] = range(first, min(count, first + asked - at))
        wanted = range(first_id + offsets[0], first_id + offsets[-1] + 1)
        end = at + len(wanted)
        if message_ids[end - 1] != wanted[-1] or message_ids[at:end] != list(wanted):
            rest = (message_ids[index] - first_id for index in range(at, asked))
            offsets = list(takewhile(range(count).__contains__, rest))
        payloads = _up_to_none(select(run.payloads, offsets))
        if self.changing:
            ids = message_ids[at : at + len(payloads)]
            changing = (n for n, one in enumerate(ids) if one in self.changing)
            payloads = payloads[: next(changing, len(payloads))]
        offsets = offsets[: len(payloads)]
        if not payloads:
            return 0
        start = 0
        for end, common in common_stretches(run, offsets):
            alike = payloads[start:end]
            fit = _fitting(alike, common, room)
            if fit:
                ids = message_ids[at + start : at + start + fit]
                result.add(common, list(ids), alike[:fit], ())
            if fit < len(alike):
                return -1
            start = end
        return len(payloads)

    def _is_stored_only(self, message_id: int) -> bool:
        return message_id in self.changing or self.cache.get(message_id) is None

    # --- The database ---------------------------------------------------------

    async def _read_stored(
        self,
        message_ids: Sequence[int],
        room: ResponseBudget,
        result: ReadResult,
        with_etags: bool,
    ) -> int:
        """Add messages out of the database; their number, or -1: no more fits.

        What changes meanwhile is read again: headers from before a change and a payload from after
        it belong to no message.
        """
        self._reads += 1
        number = self._reads
        try:
            while True:
                changed = self._reading[number] = set()
                left = room.copy()
                found = await self._read_once(message_ids, left, with_etags)
                being = self.changing and [i for i in message_ids if i in self.changing]
                if being:
                    settled = {self.changing[i] for i in being}
                    await asyncio.wait(settled)
                    for one in settled:
                        one.result()
                elif changed.isdisjoint(message_ids):
                    break
        finally:
            del self._reading[number]
        room.become(left)
        for run in found.runs:
            result.add(*run)
        result.missing_ids.extend(found.missing_ids)
        result.damaged_ids.extend(found.damaged_ids)
        result.slow_ids.extend(found.slow_ids)
        count = sum(len(run.message_ids) for run in found.runs)
        count += len(found.missing_ids) + len(found.slow_ids)
        return count if count == len(message_ids) else -1

    async def _read_once(
        self, message_ids: Sequence[int], room: ResponseBudget, with_etags: bool
    ) -> ReadResult:
        result = ReadResult([], [], [], [])
        damaged: set[int] = set()
        slow: set[int] = set()
        packs: dict[int, int] = {}
        metadata = await self._metadata(message_ids, packs, damaged)
        wanted = list(fitting(message_ids, metadata, room))
        records: dict[int, bytes] | None = {} if with_etags else None
        stored = [i for i in wanted if i in metadata]
        payloads = await self._payloads(stored, metadata, packs, records, damaged, slow)
        read: list[int] = []
        for message_id in wanted:
            if message_id in payloads:
                read.append(message_id)
            elif message_id not in slow:
                result.missing_ids.append(message_id)
                if message_id in damaged:
                    result.damaged_ids.append(message_id)
        result.slow_ids.extend(sorted(slow))
        # Neighbours of one log entry share their headers, and are mostly alike in the rest.
        for _, group in groupby(read, lambda message_id: _shared(metadata[message_id])):
            ids = list(group)
            etags: list[str] = []
            if records is not None:
                etags = [str(etag_of(records[one], metadata[one].headers)) for one in ids]
            result.add(common_of(metadata[ids[0]]), ids, [payloads[one] for one in ids], etags)
        return result

    async def close(self) -> None:
        await self.blob_reads.close()

    def changed(self, message_ids: Sequence[int], sequences: Iterable[int]) -> None:
        """The commit is durable: these messages, of these entries, have changed or are gone."""
        self._changes += 1
        self.cache.forget(message_ids)
        self._entries.forget(sequences)
        for changed in self._reading.values():
            changed.update(message_ids)
        self.changing.settle(message_ids)

    # --- Metadata -------------------------------------------------------------

    async def metadata(self, message_id: int) -> MessageMetadata | None:
        """What is stored of a durable message beside its payload. Raises CorruptRecord."""
        damaged: set[int] = set()
        found = await self._metadata([message_id], {}, damaged)
        if message_id in damaged:
            raise CorruptRecord("log entry", f"message {message_id} cannot be read")
        return found.get(message_id)

    async def _metadata(
        self, message_ids: Iterable[int], packs: dict[int, int], damaged: set[int]
    ) -> dict[int, MessageMetadata]:
        """The metadata of those of the messages that are stored and durable.

        Adds to `packs`, by message, the pack that has its payload unless a record of its own does.
        """
        found: dict[int, MessageMetadata] = {}
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
                if len(entry.messages) >= PACKED_MESSAGES_MIN:
                    packs[message_id] = pack_of(entry.sequence, message_id)
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
                else await entry_before(self._database, message_id)
            )
            if stored is None:
                return None, before
            entry = await decoded(*stored)
            if count == self._changes:
                # Else it may be the entry as it was, and nothing would ever remove it from here.
                self._entries.add(entry)
                return (entry if message_id <= entry.last_message_id else None), entry.sequence

    async def _read_ahead(self, message_id: int, before: int) -> int:
        """Cache the next entries up to this message's. Returns the last sequence read."""
        span = log_range(before + 1, message_id)
        count = self._changes
        async for rows in self._database.scan(*span, limit=ENTRIES_AHEAD, durable=True):
            with suppress(CorruptRecord):  # raised by `_entry` if it is the one looked for
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
        metadata: Mapping[int, MessageMetadata],
        packs: dict[int, int],
        records: dict[int, bytes] | None,
        damaged: set[int],
        slow: set[int],
    ) -> dict[int, bytes]:
        """The payloads of these messages; those that are gone, damaged or slow are left out.

        Those in a damaged table count as slow: they come once its file is restored. Where there are
        no others, this raises DamagedStore.

        Their records as they are stored go into `records`, if it is given.
        """
        found: dict[int, bytes] = {}
        unreadable: dict[int, DamagedStore] = {}
        wanted = sorted(set(message_ids))
        await self._read_packs(wanted, packs, found, records, unreadable)
        left = [one for one in wanted if one not in found]
        await self._read_records(left, metadata, found, records, damaged, slow, unreadable)
        if unreadable:
            error = next(iter(unreadable.values()))
            if len(unreadable) == len(wanted):
                raise error
            named = counted(len(unreadable), "message")
            log.error("the payloads of %s cannot be read: %s", named, error)
            slow.update(unreadable)
        return found

    async def _read_packs(
        self,
        message_ids: list[int],
        packs: dict[int, int],
        found: dict[int, bytes],
        records: dict[int, bytes] | None,
        unreadable: dict[int, DamagedStore],
    ) -> None:
        wanted: dict[int, list[int]] = {}
        damaged: dict[int, DamagedStore] = {}
        for one in message_ids:
            if one in packs:
                wanted.setdefault(packs[one], []).append(one)
        async for rows in read_rows(self._database, PACKS, wanted, damaged):
            for first_id, value in rows:
                try:
                    payloads = decode_pack(first_id, value)
                except CorruptRecord as error:
                    log.error("the payloads from message %d on cannot be read: %s", first_id, error)
                    continue
                for one in wanted[first_id]:
                    if one in payloads:
                        found[one] = payloads[one]
                        if records is not None:
                            records[one] = encode_inline(payloads[one])
        for first_id, damage in damaged.items():
            unreadable.update(dict.fromkeys(wanted[first_id], damage))

    async def _read_records(
        self,
        message_ids: list[int],
        metadata: Mapping[int, MessageMetadata],
        found: dict[int, bytes],
        records: dict[int, bytes] | None,
        damaged: set[int],
        slow: set[int],
        unreadable: dict[int, DamagedStore],
    ) -> None:
        # A message of the log has a payload: one without a record was in a pack that is damaged.
        lost = set(message_ids)
        blobs: dict[int, PayloadUri] = {}

        def take(message_id: int, value: bytes) -> None:
            lost.discard(message_id)
            unreadable.pop(message_id, None)  # Its pack is, and it has a record of its own.
            try:
                record = decode_payload(value)
            except CorruptRecord as error:
                log.error("the payload of message %d cannot be read: %s", message_id, error)
                damaged.add(message_id)
                return
            if isinstance(record, PayloadUri) and not self._blobs.owns(record.uri):
                log.error("the payload of message %d has no payload's URI", message_id)
                damaged.add(message_id)
                return
            if records is not None:
                records[message_id] = value
            if isinstance(record, PayloadUri):
                blobs[message_id] = record
            else:
                found[message_id] = record

        async for rows in read_rows(self._database, PAYLOADS, message_ids, unreadable):
            for message_id, value in rows:
                take(message_id, value)
        damaged.update(lost.difference(unreadable))
        await self._read_blobs(blobs, metadata, found, damaged, slow)

    async def _read_blobs(
        self,
        blobs: dict[int, PayloadUri],
        metadata: Mapping[int, MessageMetadata],
        found: dict[int, bytes],
        damaged: set[int],
        slow: set[int],
    ) -> None:
        remaining = iter(blobs.items())
        while some := list(islice(remaining, BLOBS_AT_ONCE)):
            reads = {
                one: asyncio.create_task(self.blob_reads.read(record, metadata[one].payload_bytes))
                for one, record in some
            }
            try:
                await asyncio.wait(reads.values(), timeout=BLOB_WAIT_S)
            finally:
                for read in reads.values():
                    read.cancel()
            for message_id, read in reads.items():
                error = read.exception() if read.done() else None
                if isinstance(error, DamagedObject):
                    log.error("the payload of message %d cannot be read: %s", message_id, error)
                    damaged.add(message_id)
                elif error is not None:
                    raise error
                elif not read.done():
                    slow.add(message_id)
                elif (payload := read.result()) is not None:
                    found[message_id] = payload
            if slow:
                slow.update(one for one, _ in remaining)


def _shared(metadata: MessageMetadata) -> tuple[Mapping[str, str], int, int, int]:
    return (
        metadata.headers,
        metadata.created_at_ms,
        metadata.received_at_ms,
        metadata.retention_s,
    )


def _up_to_none(payloads: Sequence[bytes | None]) -> list[bytes]:
    if not all(payloads) and None in payloads:
        payloads = payloads[: payloads.index(None)]
    return cast("list[bytes]", payloads)


def _fitting(payloads: list[bytes], common: bytes, room: ResponseBudget) -> int:
    """How many of these fit, the first ones; takes their places.

    What they have in common counts for each: the broker may keep any of them alone.
    """
    count = len(payloads)
    if count > 1 and room.take_all(sum(map(len, payloads)), count * len(common), count):
        return count
    for at, payload in enumerate(payloads):
        if not room.take(len(payload), len(common)):
            return at
    return count
