"""Removing messages permanently, on behalf of the janitor.

::

    IDs ─► entries, a piece at a time ─► their turn ─► what may go? ─► epoch ─► commit ─► blobs
                                          (edits wait)  clock, stored   │       log entries and
                                                        metadata        │       payloads, in one
                                                                        └ no wait in between

Ingest does not know what queues need. It checks what it can know: that the decision is as young as
its purge epoch, that its reason holds by the shard's own clock, with a grace period for clocks that
differ, and that the message is there. Between two pieces other changes have their turns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Final, NamedTuple

from libs.storage.database.blobs import Blobs
from libs.storage.database.clocks import Clock
from libs.storage.database.slate import Database
from libs.storage.errors import CorruptRecord, ForeignUri, StorageError
from libs.storage.layout.keys import log_key, payload_key
from libs.storage.layout.own_keys import LOG_BOUNDS_KEY
from libs.storage.records.log_bounds import encode_log_bounds
from libs.storage.records.metadata import Removal, decode_log_entry, remove_messages
from libs.storage.records.payload_packs import (
    PACK_MESSAGES,
    PACKED_MESSAGES_MIN,
    decode_pack,
    pack_of,
    rest_of_pack,
)
from libs.storage.records.payloads import INLINE_PAYLOAD_MAX_BYTES, PayloadUri, decode_payload
from services.ingest.edit.changes import Change, Changes, Turns
from services.ingest.edit.purge_rules import ALL_ANNOUNCED, PurgeEpoch, Reason, Rules, Unannounced
from services.ingest.read.entries import StoredEntry, entries_of
from services.ingest.read.rows import PACKS, read_rows
from services.ingest.read.tailing import MetadataLog

log = logging.getLogger(__name__)

PIECE_ENTRIES: Final = 512
PIECE_MESSAGES: Final = 2_000
PIECE_BYTES: Final = 1 << 20
"""Log entries in one commit, the messages that are to go out of them, and their bytes, unless one
alone has more: publishes wait for it."""

PACKS_BYTES: Final = 1 << 20
"""Bytes of payloads that stay and are rewritten in one commit, about; never over 5 MiB."""

PACKS_AT_ONCE: Final = 64
"""Packs that are looked at together: 4 MiB at most."""

AT_ONCE: Final = 1
"""Calls that work at the same time: the others wait, and publishes do not."""

BLOBS_AT_ONCE: Final = 8


class Purge(NamedTuple):
    """The messages to remove, and what the decision was based on."""

    epoch: int
    reason: Reason
    message_ids: Sequence[int]


@dataclass
class Purged:
    """What has become of it.

    Attributes:
        count: Messages removed.
        size_bytes: Their payloads.
        refused_ids: Stay where they are; ascending.
    """

    count: int = 0
    size_bytes: int = 0
    refused_ids: list[int] = field(default_factory=list)


class _EntryRewrite(NamedTuple):
    """One rewrite of an entry; an entry that loses many messages takes several."""

    sequence: int
    value: bytes | None
    removed: list[tuple[int, int]]


class _PurgePlan(NamedTuple):
    steps: list[_EntryRewrite]
    refused_ids: list[int]


@dataclass
class _Going:
    entries: dict[int, bytes | None] = field(default_factory=dict)
    packs: dict[int, bytes | None] = field(default_factory=dict)
    single_ids: list[int] = field(default_factory=list)
    records: dict[int, bytes] = field(default_factory=dict)
    """Of payloads that stay, out of packs that go."""
    removed: list[tuple[int, int]] = field(default_factory=list)
    packs_bytes: int = 0


class Purger:
    """Removes messages of one shard.

    Attributes:
        unannounced: The messages that wait for their events, at the shard's time in ms.
        on_lost: Called with the number of messages removed before their events were published.
    """

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        clock: Clock,
        log: MetadataLog,
        changes: Changes,
        turns: Turns,
        epoch: PurgeEpoch,
        rules: Rules,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._clock = clock
        self._log = log
        self._changes = changes
        self._turns = turns
        self._epoch = epoch
        self._rules = rules
        self._places = asyncio.Semaphore(AT_ONCE)
        self.unannounced: Callable[[int], Unannounced] = lambda now_ms: ALL_ANNOUNCED
        self.on_lost: Callable[[int], None] = lambda count: None

    async def purge(self, wanted: Purge) -> Purged:
        """Remove messages; durable on return. IDs that ascend cost least; none stands twice.

        Raises FailedPrecondition, ResourceExhausted and the errors of the store; some of the
        messages may be gone then.
        """
        self._epoch.check(wanted.epoch)
        ids = sorted(wanted.message_ids)
        stored = bisect_right(ids, self._log.end.last_message_id)
        purged = Purged(refused_ids=ids[stored:])
        own = 0  # rewrites of this call: none is of an entry that is read later, or was before
        entries = entries_of(self._database, ids[:stored], lambda: self._log.rewrites_count - own)
        async with self._places, aclosing(entries):
            began = time.monotonic()
            while piece := await _next_piece(entries, ids):
                work = self._purge_piece(wanted, ids, piece, purged, own)
                own += await self._turns.to_the_end(work)
                # As long as it took: half of the commits are everybody else's alone.
                await asyncio.sleep(time.monotonic() - began)
                began = time.monotonic()
        purged.refused_ids.sort()
        return purged

    async def _purge_piece(
        self, wanted: Purge, ids: list[int], piece: list[StoredEntry], purged: Purged, own: int
    ) -> int:
        """Purge a piece, after `own` commits of the call. Returns the number of its commits."""
        commits, uris, is_first = 0, list[str](), False
        try:
            async with self._turns.of(found.sequence for found in piece):
                piece = await self._as_now(piece, self._log.rewrites_count - own)
                now_ms = self._clock.now_ms()
                holds = self._rules.holds(wanted.reason, now_ms)
                waiting = self.unannounced(now_ms)
                result = await asyncio.to_thread(_sort_out, piece, ids, holds, waiting)
                purged.refused_ids += result.refused_ids
                steps = iter(result.steps)
                while (going := await self._next_going(steps)).removed:
                    uris += await self._remove(wanted, going, purged)
                    is_first = is_first or None in going.entries.values()
                    commits += 1
        finally:
            # For the commits that succeeded, also if the next one failed.
            if is_first:
                await self._log.look_for_first()
            await self._delete(uris)
        return commits

    async def _next_going(self, steps: Iterator[_EntryRewrite]) -> _Going:
        """The next steps that fit into one commit; empty when none is left."""
        going = _Going()
        for step in steps:
            going.entries[step.sequence] = step.value
            going.removed += step.removed
            await self._rewrite_entry(going, step)
            if going.packs_bytes >= PACKS_BYTES:
                break
        return going

    async def _rewrite_entry(self, going: _Going, step: _EntryRewrite) -> None:
        """Find where the payloads of the removed messages are stored."""
        by_pack: dict[int, list[int]] = {}
        for one, _ in step.removed:
            by_pack.setdefault(pack_of(step.sequence, one), []).append(one)
        if step.value is None and len(step.removed) < PACKED_MESSAGES_MIN:
            # Cheaper to delete rows that may not exist than to look for them.
            going.packs.update(dict.fromkeys(by_pack))
            going.single_ids += [one for one, _ in step.removed]
            return
        first_ids = iter(by_pack)
        while at_once := list(islice(first_ids, PACKS_AT_ONCE)):
            read = read_rows(self._database, PACKS, at_once)
            stored = {first_id: value async for rows in read for first_id, value in rows}
            self._remove_from(going, step, {one: by_pack[one] for one in at_once}, stored)

    def _remove_from(
        self,
        going: _Going,
        step: _EntryRewrite,
        by_pack: dict[int, list[int]],
        stored: dict[int, bytes],
    ) -> None:
        for first_id, some in by_pack.items():
            try:
                packed = decode_pack(first_id, stored[first_id]) if first_id in stored else {}
            except CorruptRecord as error:
                log.error("the payloads from message %d on are damaged: %s", first_id, error)
                packed = {}
                # What it has is unknown; it goes once none of its messages is left in the entry.
                left = decode_log_entry(step.value) if step.value is not None else ()
                if not any(pack_of(step.sequence, one.message_id) == first_id for one in left):
                    going.packs[first_id] = None
            going.single_ids += [one for one in some if one not in packed]
            if not packed.keys().isdisjoint(some):
                rest, records = rest_of_pack(first_id, packed, set(some))
                going.packs[first_id] = rest
                going.records.update(records)
                going.packs_bytes += len(rest or b"") + sum(map(len, records.values()))

    async def _remove(self, wanted: Purge, going: _Going, purged: Purged) -> list[str]:
        """Commit the removal. Returns the URIs of objects that no record names any more."""
        uris = await self._uris(going)
        self._epoch.check(wanted.epoch)
        gone = [message_id for message_id, _ in going.removed]
        payloads = {**dict.fromkeys(going.single_ids), **going.records}
        change = Change(going.entries, payloads, gone, going.packs)
        bounds = (LOG_BOUNDS_KEY, encode_log_bounds(self._log.bounds))
        await self._changes.make(change, [bounds])
        purged.count += len(gone)
        lost = sum(message_id > self.unannounced(0).after_id for message_id in gone)
        if lost:
            self.on_lost(lost)
        purged.size_bytes += sum(size_bytes for _, size_bytes in going.removed)
        return uris

    async def _as_now(self, piece: list[StoredEntry], number: int) -> list[StoredEntry]:
        """The entries as they are now that we hold their turns, without those removed."""
        old = [found.sequence for found in piece if found.number != number]
        if not old:
            return piece
        values = await self._database.get_many(map(log_key, old), durable=True)
        now = dict(zip(old, values, strict=True))
        return [
            found._replace(value=value)
            for found in piece
            if (value := now.get(found.sequence, found.value)) is not None
        ]

    async def _uris(self, going: _Going) -> list[str]:
        uris: list[str] = []
        large = [one for one, size_bytes in going.removed if size_bytes > INLINE_PAYLOAD_MAX_BYTES]
        records = await self._database.get_many(map(payload_key, large), durable=True)
        for message_id, record in zip(large, records, strict=True):
            try:
                payload = b"" if record is None else decode_payload(record)
            except CorruptRecord as error:
                log.error("the payload record of message %d goes as it is: %s", message_id, error)
                continue
            if isinstance(payload, PayloadUri):
                uris.append(payload.uri)
        return uris

    async def _delete(self, uris: list[str]) -> None:
        """Delete objects that no record names any more. The janitor removes those left over."""
        remaining = iter(uris)
        while some := list(islice(remaining, BLOBS_AT_ONCE)):
            await asyncio.gather(*map(self._delete_one, some))

    async def _delete_one(self, uri: str) -> None:
        try:
            await self._blobs.delete(uri)
        except (StorageError, ForeignUri) as error:
            log.warning("a purged payload is left to the janitor: %s", error)


async def _next_piece(entries: AsyncIterator[StoredEntry], ids: list[int]) -> list[StoredEntry]:
    piece: list[StoredEntry] = []
    size_bytes = messages_count = 0
    async for found in entries:
        piece.append(found)
        size_bytes += len(found.value)
        messages_count += bisect_right(ids, found.last_message_id)
        messages_count -= bisect_left(ids, found.sequence)
        full = len(piece) >= PIECE_ENTRIES or messages_count >= PIECE_MESSAGES
        if full or size_bytes >= PIECE_BYTES:
            break
    return piece


def _sort_out(
    piece: list[StoredEntry],
    ids: list[int],
    holds: Callable[[int, int], bool],
    waiting: Unannounced,
) -> _PurgePlan:
    """Plan which of the wanted messages leave their entries, and which are refused."""
    result = _PurgePlan([], [])
    for sequence, value, last_id, _ in piece:
        wanted = set(ids[bisect_left(ids, sequence) : bisect_right(ids, last_id)])
        refused: list[int] = []

        def goes(
            message_id: int,
            received_at_ms: int,
            retention_s: int,
            refused: list[int] = refused,
        ) -> bool:
            stays = message_id > waiting.after_id and received_at_ms > waiting.since_ms
            if not stays and holds(received_at_ms, retention_s):
                return True
            refused.append(message_id)
            return False

        try:
            removal = remove_messages(value, wanted, goes)
        except CorruptRecord as error:
            log.error("the log entry %d stays as it is: %s", sequence, error)
            result.refused_ids.extend(wanted)
            continue
        result.refused_ids.extend(refused)
        if removal.removed:
            result.steps.extend(_steps(sequence, value, removal))
    return result


def _steps(sequence: int, value: bytes, removal: Removal) -> Iterator[_EntryRewrite]:
    """Split a partial removal, so that each commit rewrites about PACKS_BYTES of packs."""
    removed = removal.removed
    if removal.kept is None:
        yield _EntryRewrite(sequence, None, removed)
        return
    pack_bytes = PACK_MESSAGES * sum(size for _, size in removed) // len(removed)
    width = PACK_MESSAGES * max(1, min(PACKS_AT_ONCE, PACKS_BYTES // max(pack_bytes, 1)))
    for _, some in groupby(removed, lambda one: (one[0] - sequence) // width):
        gone = list(some)
        if gone[-1] == removed[-1]:
            yield _EntryRewrite(sequence, removal.kept, gone)
            return
        kept = remove_messages(value, {one for one, _ in gone}, lambda *_: True).kept
        assert kept is not None, "more of it goes in the next step"
        value = kept
        yield _EntryRewrite(sequence, value, gone)
