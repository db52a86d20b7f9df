"""Reads the attempts records of many messages: of those near one another in one scan.

Most commands that need many records are about messages that came together and never failed: reading
a record that does not exist costs as much as reading one that does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

from libs.storage.layout.keys import attempts_key, attempts_range
from libs.storage.records.queues import FailedAttempt, decode_attempts
from services.broker.core.waiting.scan import AttemptsKey

READ_AT_ONCE = 100
"""Records read at the same time for one command: some ten milliseconds of the event loop."""

FEW = 4
"""This many records are read one by one: a scan costs no less."""

SCANNED_MAX = 200
"""Rows read in a scan for READ_AT_ONCE of them: others may lie in between."""


class Store(Protocol):
    """What is needed of a database: `libs.storage.database.slate.Database` has it."""

    async def get(self, key: bytes) -> bytes | None:
        """The value of a key."""

    def scan(
        self, start: bytes, end: bytes, limit: int | None = None
    ) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """Rows with start ≤ key < end in key order, at most `limit`, in lists."""


async def read_attempts(
    database: Store, keys: Iterable[AttemptsKey]
) -> dict[AttemptsKey, list[FailedAttempt]]:
    """The records of these keys; empty where there is none."""
    by_queue: dict[tuple[str, int], set[AttemptsKey]] = {}
    for key in keys:
        by_queue.setdefault(key[:2], set()).add(key)
    values: dict[AttemptsKey, bytes | None] = {}
    for wanted in map(sorted, by_queue.values()):
        for start in range(0, len(wanted), READ_AT_ONCE):
            part = wanted[start : start + READ_AT_ONCE]
            if len(part) > FEW:
                values.update(await _scanned(database, part))
                part = [key for key in part if key not in values]
            got = await asyncio.gather(*(database.get(_row_key(key)) for key in part))
            values.update(zip(part, got, strict=True))
    return {key: decode_attempts(value) if value else [] for key, value in values.items()}


async def _scanned(database: Store, part: Sequence[AttemptsKey]) -> dict[AttemptsKey, bytes | None]:
    """The values of the first of these keys, which are sorted and of one queue: maybe of all."""
    (queue_id, _, first), (_, _, last) = part[0], part[-1]
    span = attempts_range(queue_id, first, last)
    rows: dict[bytes, bytes] = {}
    async for some in database.scan(span.start, span.end, limit=SCANNED_MAX):
        rows.update(some)
    known_until = span.end if len(rows) < SCANNED_MAX else max(rows)
    return {key: rows.get(_row_key(key)) for key in part if _row_key(key) <= known_until}


def _row_key(key: AttemptsKey) -> bytes:
    queue_id, _, message_id = key
    return attempts_key(queue_id, message_id)
