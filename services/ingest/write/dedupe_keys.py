"""Which message each dedupe key stands for: makes publishing a message twice safe for days.

::

    hold ──▶ held: being read, or known ──put, in a commit──▶ held until that is durable
                ▲                │                                      │
                │                └────── release: no holder left ◀──────┘
      database, or cached ◀──────────────────────┘

All holders of a key share one object with its state, so of concurrent publishes with a key the
first one drained gets it. A key without a holder is durable: it is in the database, and a bounded
number of them in memory. A window of days costs rows on disk, and no memory.

A row states its own end. What has ended is removed in the background, minute by minute.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Final

from libs.storage.database.slate import Batch, Database
from libs.storage.errors import StorageError, encoding
from libs.storage.layout.own_keys import (
    MINUTE_MS,
    dedupe_ends_key,
    dedupe_ends_range,
    dedupe_key,
)
from libs.storage.records.dedupe_records import (
    DedupeRecord,
    decode_dedupe,
    decode_dedupe_ends,
    encode_dedupe,
    encode_dedupe_ends,
)

log = logging.getLogger(__name__)

ROW_KEYS_MAX: Final = 1000
"""Keys in one row of those that end together: they are removed together."""

READS_AT_ONCE: Final = 32
"""Keys read at the same time; with 256 the event loop was held up for 67 ms, not 10."""

ENDED_KEYS: Final = 2000
"""Keys that `find_ended` looks at, about: some 150 ms, in slices of the event loop."""

ENDED_ROWS_MIN: Final = 2
ENDED_ROWS_MAX: Final = 1000


class _Known:
    """The state of a key; message 0 stands for none. `read` is awaited before `message` is used."""

    __slots__ = ("end_ms", "holders", "message_id", "read")

    def __init__(self) -> None:
        self.message_id = 0
        self.end_ms = 0
        self.holders = 0
        self.read: asyncio.Task[None] | None = None


class DedupeKeys:
    """The dedupe keys of one shard. One event loop; the commit loop calls `put` and `settle`."""

    def __init__(self, database: Database, window_ms: int, cached_max: int) -> None:
        """Keys stand for their messages for `window_ms`; `cached_max` of them stay in memory."""
        self._database = database
        self._window_ms = window_ms
        self._cached_max = cached_max
        self._held: dict[str, _Known] = {}
        self._cached: dict[str, _Known] = {}  # the one used last at the end
        self._candidates: dict[str, None] = {}
        self._ended: dict[str, None] = {}
        self._ended_rows: list[bytes] = []
        self._rows_max = ENDED_ROWS_MIN
        self._looked_at = b""
        self._looked_minute = -1

    # --- Holding --------------------------------------------------------------

    async def hold(self, keys: Collection[str]) -> None:
        """Make sure of what these keys, each named once, stand for until they are released.

        Holds none of them when it raises: errors of the store.
        """
        unknown: dict[str, _Known] = {}
        for key in keys:
            known = self._held.get(key)
            if known is None:
                known = self._cached.pop(key, None)
                if known is None:
                    known = unknown[key] = _Known()
                self._held[key] = known
            known.holders += 1
        if unknown:
            read = asyncio.create_task(self._read(unknown))
            read.add_done_callback(_look_at_error)
            for known in unknown.values():
                known.read = read
        reads = {self._held[key].read: None for key in keys}
        try:
            for read_one in reads:
                if read_one is not None:
                    await asyncio.shield(read_one)
        except BaseException:
            self.release(keys)
            raise

    def release(self, keys: Iterable[str]) -> None:
        for key in keys:
            known = self._held[key]
            known.holders -= 1
            if not known.holders:
                del self._held[key]
                if known.read is None and known.message_id:
                    self._cached[key] = known
        if len(self._cached) > self._cached_max:
            for key in list(islice(self._cached, len(self._cached) - self._cached_max)):
                del self._cached[key]

    def message_id(self, key: str, now_ms: int) -> int:
        """The message that a held key stands for now; 0 = none."""
        known = self._held[key]
        return known.message_id if now_ms < known.end_ms else 0

    async def _read(self, unknown: dict[str, _Known]) -> None:
        remaining = iter(unknown.items())
        while some := list(islice(remaining, READS_AT_ONCE)):
            keys = (dedupe_key(key) for key, _ in some)
            # What is not durable yet is held by its commit, and not read.
            values = await self._database.get_many(keys, durable=True)
            for (_, known), value in zip(some, values, strict=True):
                if value is not None:
                    known.message_id, known.end_ms = decode_dedupe(value)
        for known in unknown.values():
            known.read = None

    # --- Commits --------------------------------------------------------------

    def take(self, key: str, message_id: int, now_ms: int) -> None:
        """Let a held key stand for this message from now on; `put` and `settle` follow."""
        known = self._held[key]
        known.message_id, known.end_ms = message_id, now_ms + self._window_ms
        known.holders += 1

    def put(self, batch: Batch, taken: list[tuple[str, int]], now_ms: int) -> None:
        """Put the rows of the keys taken in one commit, and delete some expired ones."""
        end_ms = now_ms + self._window_ms
        for start in range(0, len(taken), ROW_KEYS_MAX):
            part = taken[start : start + ROW_KEYS_MAX]
            with encoding("dedupe keys"):
                row = dedupe_ends_key(end_ms // MINUTE_MS, part[0][1])
                batch.put(row, encode_dedupe_ends([key for key, _ in part]))
                for key, message_id in part:
                    batch.put(dedupe_key(key), encode_dedupe(DedupeRecord(message_id, end_ms)))
        for key, _ in taken:
            self._candidates.pop(key, None)
            self._ended.pop(key, None)
        for key in self._ended:
            batch.delete(dedupe_key(key))
        for row in self._ended_rows:
            batch.delete(row)
        self._ended.clear()
        self._ended_rows.clear()

    def settle(self, taken: list[tuple[str, int]]) -> None:
        self.release(key for key, _ in taken)

    # --- What has ended -------------------------------------------------------

    async def find_ended(self, now_ms: int) -> bool:
        """Find expired rows, with their keys but those used again since; False for none."""
        minute = now_ms // MINUTE_MS - 1
        if self._ended_rows or minute <= self._looked_minute:
            return bool(self._ended_rows)
        try:
            found = await self._find_ended(minute, now_ms)
        except StorageError as error:
            log.warning("dedupe keys that have ended cannot be read, trying later: %s", error)
            found = False
        if not found:
            self._looked_minute = minute
        return found

    async def _find_ended(self, minute: int, now_ms: int) -> bool:
        rows: list[bytes] = []
        span = dedupe_ends_range(0, minute)
        start = max(span.start, self._looked_at)
        self._candidates.clear()
        async for some in self._database.scan(start, span.end, limit=self._rows_max):
            for row, value in some:
                if len(self._candidates) >= ENDED_KEYS:
                    break
                for key in decode_dedupe_ends(value):
                    # One taken again may not be written yet; `put` sees to those taken from now on.
                    held = self._held.get(key)
                    if held is None or held.end_ms <= now_ms:
                        self._candidates[key] = None
                rows.append(row)
        if not rows:
            return False
        if len(self._candidates) < ENDED_KEYS // 2:
            self._rows_max = min(ENDED_ROWS_MAX, self._rows_max * 2)
        else:
            self._rows_max = max(ENDED_ROWS_MIN, self._rows_max // 2)
        await self._check_candidates(now_ms)
        # No row comes before these any more, and those deleted are not passed again.
        self._looked_at = rows[-1] + b"\x00"
        self._ended, self._candidates = self._candidates, {}
        self._ended_rows = rows
        return True

    async def _check_candidates(self, now_ms: int) -> None:
        """Keep the candidates whose rows have expired; `put` removes those used meanwhile."""
        remaining = iter(list(self._candidates))
        while some := list(islice(remaining, READS_AT_ONCE)):
            values = await self._database.get_many(map(dedupe_key, some))
            for key, value in zip(some, values, strict=True):
                if value is None or decode_dedupe(value).end_ms > now_ms:
                    self._candidates.pop(key, None)


def _look_at_error(read: asyncio.Task[None]) -> None:
    """Mark the error as seen: its waiters may all be gone."""
    if not read.cancelled():
        read.exception()


_BESIDE: int = 0
"""Stands for the ID of a message that is stored by the same publish."""


class Duplicates:
    """The dedupe keys of one publish, from its begin to its commit.

    Attributes:
        found: The places of those that are not to be stored, with the IDs that they get; complete
            once `take` was called.
    """

    def __init__(self, known: DedupeKeys, keys: Mapping[int, str]) -> None:
        self.found: dict[int, int] = {}
        self._known = known
        self._keys = keys
        self._names = dict.fromkeys(keys.values())

    async def hold(self) -> None:
        """Hold the keys, and read what is stored of them; `release` follows."""
        await self._known.hold(self._names)

    def release(self) -> None:
        self._known.release(self._names)

    def look(self, now_ms: int) -> None:
        """Find the messages that are stored already, beside those found before."""
        firsts: set[str] = set()
        for at, key in self._keys.items():
            if at in self.found:
                continue
            message_id = self._known.message_id(key, now_ms)
            if message_id:
                self.found[at] = message_id
            elif key in firsts:
                self.found[at] = _BESIDE
            firsts.add(key)

    def take(self, first_id: int, now_ms: int) -> list[tuple[str, int]]:
        """Let the keys of those that are stored, from this ID on, stand for them.

        Gives them for `DedupeKeys.put`.
        """
        taken: list[tuple[str, int]] = []
        before = sorted(self.found)
        passed = 0
        for at, key in self._keys.items():
            while passed < len(before) and before[passed] < at:
                passed += 1
            if at not in self.found:
                taken.append((key, first_id + at - passed))
                self._known.take(*taken[-1], now_ms)
            elif self.found[at] == _BESIDE:
                self.found[at] = self._known.message_id(key, now_ms)
        return taken

    def in_order(self) -> tuple[tuple[int, int], ...]:
        """The places and IDs of the duplicates, by ascending place."""
        return tuple(sorted(self.found.items()))
