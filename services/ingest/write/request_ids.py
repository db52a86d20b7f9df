"""Who published what in the last minutes: makes repeating a publish safe.

::

    begin ──▶ pending, by request ID ──commit durable──▶ open tables of the minute (dicts)
                 │ publish fails: forgotten                  │ minute over: one by one
                 ▼                                           ▼
              a repeat waits for the outcome             sealed tables (sorted arrays)

What is durable is known by 8 bytes of hash and the row that it stands in: 16 bytes per request ID
in a sealed table, so three million of them take 50 MB. A hit reads the row to be sure. A minute is
64 tables by hash, and sealing does one table at a time, so nothing holds the loop up for long.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Final, NamedTuple

from libs.storage.database.slate import Batch, Database
from libs.storage.errors import encoding
from libs.storage.layout.own_keys import (
    MINUTE_MS,
    RequestIdsKey,
    parse_request_ids_key,
    request_ids_key,
    request_ids_range,
)
from libs.storage.records.states import RequestIdRecord, decode_request_ids, encode_request_ids
from libs.storage.records.task_records import AppliedTask
from slatemq.errors import InvalidArgument

ROW_REQUESTS_MAX: Final = 1000
"""Request IDs in one row: a repeat reads a whole row."""

ROW_DUPLICATES_MAX: Final = 50_000
"""Duplicates in one row but for those of its last request, which has at most 10,000."""

DELETIONS_PER_COMMIT: Final = 8
"""Rows of the past deleted with each commit: more than the one that a commit adds."""

DELETIONS_WHEN_IDLE: Final = 1000
"""Rows deleted by a commit that has nothing else to do."""

NAMES_FROM: Final = 1 << 63
"""The names of rows that begin with a publish without a new message; above every message ID."""

TABLES: Final = 64
_MASK: Final = (1 << 64) - 1


class Answered(NamedTuple):
    """What a publish is answered.

    Attributes:
        first_message_id: Of those that were stored, whose IDs stand in a row; 0 where none was.
        message_count: How many were published.
        duplicates: Places in the request, ascending, of those not stored, and the IDs they got.
        received_at_ms: When they were accepted; 0 = not known here, or none was stored.
    """

    first_message_id: int
    message_count: int
    duplicates: tuple[tuple[int, int], ...] = ()
    received_at_ms: int = 0

    @property
    def message_ids(self) -> Sequence[int]:
        """The IDs of all messages, in the order of the request."""
        first = self.first_message_id
        if not self.duplicates:
            return range(first, first + self.message_count)
        known = dict(self.duplicates)
        fresh = count(first)
        return [known.get(at) or next(fresh) for at in range(self.message_count)]


def answered_of(record: RequestIdRecord | AppliedTask) -> Answered:
    """The answer that a record keeps."""
    received_at_ms = record.received_at_ms if isinstance(record, AppliedTask) else 0
    return Answered(
        record.first_message_id, record.message_count, record.duplicates, received_at_ms
    )


class _Sealed(NamedTuple):
    """An immutable table: ascending hashes, and the row of each."""

    hashes: array[int]
    rows: array[int]


class _Minute:
    """The durable request IDs of a minute; `tables[n]` has the hashes with the top bits n."""

    __slots__ = ("more", "number", "rows", "sealed_count", "tables")

    def __init__(self, number: int) -> None:
        self.number = number
        self.tables: list[dict[int, int] | _Sealed] = [{} for _ in range(TABLES)]
        self.sealed_count = 0
        self.rows = array("Q")
        self.more: list[tuple[int, int]] = []  # hashes that were there already, or came too late

    def add(self, hashed: int, row: int) -> None:
        table = self.tables[hashed >> 58]
        if isinstance(table, _Sealed) or table.setdefault(hashed, row) != row:
            self.more.append((hashed, row))

    def find(self, hashed: int) -> Iterator[RequestIdsKey]:
        table = self.tables[hashed >> 58]
        if isinstance(table, _Sealed):
            at = bisect_left(table.hashes, hashed)
            found = at < len(table.hashes) and table.hashes[at] == hashed
            row = table.rows[at] if found else None
        else:
            row = table.get(hashed)
        if row is not None:
            yield RequestIdsKey(self.number, row)
        for other, row in self.more:
            if other == hashed:
                yield RequestIdsKey(self.number, row)

    def seal_one(self) -> None:
        if self.sealed_count == TABLES:
            return
        table = self.tables[self.sealed_count]
        if not isinstance(table, _Sealed):
            hashes = sorted(table)
            rows = array("Q", map(table.__getitem__, hashes))
            self.tables[self.sealed_count] = _Sealed(array("Q", hashes), rows)
        self.sealed_count += 1


class _Pending(NamedTuple):
    """A publish in flight; its outcome is None when it failed."""

    fingerprint: bytes
    outcome: asyncio.Future[Answered | None]


class RequestIds:
    """The request IDs of one shard. One event loop; the commit loop calls `put` and `settle`."""

    def __init__(self, database: Database, window_ms: int) -> None:
        """Keep IDs for `window_ms` at least, and a minute more at most."""
        self.window_ms = window_ms
        self._database = database
        self._window_minutes = -(-window_ms // MINUTE_MS)
        self._pending: dict[str, _Pending] = {}
        self._minutes: deque[_Minute] = deque()
        self._expired: deque[RequestIdsKey] = deque()
        self._next_name = NAMES_FROM

    @property
    def has_expired(self) -> bool:
        return bool(self._expired)

    async def load(self, last_commit_ms: int, now_ms: int) -> None:
        """Read the rows that the process before this one left.

        It deleted older rows within a minute or two of their expiry, so a range from a little
        before the window of its last commit has all of them, and begins after those deleted.
        """
        first = max(last_commit_ms // MINUTE_MS - self._window_minutes - 3, 0)
        oldest = self._oldest_minute(now_ms)
        span = request_ids_range(first, (1 << 32) - 1)
        async for rows in self._database.scan(*span):
            for key, value in rows:
                at = parse_request_ids_key(key)
                self._next_name = max(self._next_name, at.first_sequence + 1)
                if at.minute < oldest:
                    self._expired.append(at)
                    continue
                self._add(at, (record.request_id for record in decode_request_ids(value)))
            await asyncio.sleep(0)

    async def begin(
        self,
        request_id: str,
        fingerprint: bytes,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Answered | None:
        """The answer of the first publish with this ID; None: there is none, the caller is first.

        The caller must then get it committed (see `put`), or call `forget`. Waits within `waiting`
        for a first one that is on its way. Raises InvalidArgument when that had other content.
        """
        hashed = hash(request_id) & _MASK
        others: set[RequestIdsKey] = set()
        while True:
            pending = self._pending.get(request_id)
            if pending is not None:
                with waiting():
                    answered = await asyncio.shield(pending.outcome)
                if answered is None:
                    continue
                check_same(pending.fingerprint, fingerprint)
                return answered
            row = next((row for row in self._find(hashed) if row not in others), None)
            if row is None:
                self._add_pending(request_id, fingerprint)
                return None
            record = await self._read(row, request_id)
            if record is not None:
                check_same(record.fingerprint, fingerprint)
                return answered_of(record)
            others.add(row)

    def begin_new(self, request_id: str, fingerprint: bytes) -> bool:
        """Like `begin`, without waiting: False, and nothing begun, where the ID may be known."""
        if request_id in self._pending or any(self._find(hash(request_id) & _MASK)):
            return False
        self._add_pending(request_id, fingerprint)
        return True

    def _add_pending(self, request_id: str, fingerprint: bytes) -> None:
        outcome = asyncio.get_running_loop().create_future()
        self._pending[request_id] = _Pending(fingerprint, outcome)

    def fingerprint(self, request_id: str) -> bytes:
        """The fingerprint of a publish that is on its way."""
        return self._pending[request_id].fingerprint

    def forget(self, request_id: str) -> None:
        """The publish failed: its ID is free again."""
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            pending.outcome.set_result(None)

    def put(
        self, batch: Batch, answers: list[tuple[str, Answered]], now_ms: int
    ) -> list[RequestIdsKey]:
        """Put the rows of one commit, and delete old ones. Returns these rows for `settle`."""
        rows: list[RequestIdsKey] = []
        for part in _row_parts(answers):
            records = [
                RequestIdRecord(
                    request_id,
                    answered.first_message_id,
                    answered.message_count,
                    self.fingerprint(request_id),
                    answered.duplicates,
                )
                for request_id, answered in part
            ]
            name = part[0][1].first_message_id
            if not name:
                name, self._next_name = self._next_name, self._next_name + 1
            rows.append(RequestIdsKey(now_ms // MINUTE_MS, name))
            with encoding("request IDs"):
                batch.put(request_ids_key(*rows[-1]), encode_request_ids(records))
        self._expire(now_ms)
        for _ in range(DELETIONS_PER_COMMIT if len(batch) else DELETIONS_WHEN_IDLE):
            if not self._expired:
                break
            batch.delete(request_ids_key(*self._expired.popleft()))
        return rows

    def settle(self, rows: list[RequestIdsKey], answers: list[tuple[str, Answered]]) -> None:
        """The commit with these rows of request IDs is durable: resolve their waiters."""
        for row, part in zip(rows, _row_parts(answers), strict=True):
            self._add(row, (request_id for request_id, _ in part))
        for request_id, answered in answers:
            pending = self._pending.pop(request_id)
            pending.outcome.set_result(answered)

    def clean_up(self, now_ms: int) -> None:
        """Seal one table of a minute that is over."""
        self._expire(now_ms)
        for minute in self._minutes:
            # A commit of the minute just over may still be settled: late ones cost more memory.
            if minute.number < now_ms // MINUTE_MS - 1 and minute.sealed_count < TABLES:
                minute.seal_one()
                return

    def _find(self, hashed: int) -> Iterator[RequestIdsKey]:
        for minute in self._minutes:
            yield from minute.find(hashed)

    async def _read(self, row: RequestIdsKey, request_id: str) -> RequestIdRecord | None:
        value = await self._database.get(request_ids_key(*row), durable=True)
        if value is None:
            return None
        records = decode_request_ids(value)
        return next((record for record in records if record.request_id == request_id), None)

    def _add(self, row: RequestIdsKey, request_ids: Iterable[str]) -> None:
        if not self._minutes or self._minutes[-1].number < row.minute:
            self._minutes.append(_Minute(row.minute))
        minute = self._minutes[-1]
        minute.rows.append(row.first_sequence)
        for request_id in request_ids:
            minute.add(hash(request_id) & _MASK, row.first_sequence)

    def _oldest_minute(self, now_ms: int) -> int:
        return now_ms // MINUTE_MS - self._window_minutes

    def _expire(self, now_ms: int) -> None:
        while self._minutes and self._minutes[0].number < self._oldest_minute(now_ms):
            minute = self._minutes.popleft()
            self._expired.extend(RequestIdsKey(minute.number, row) for row in minute.rows)


def _row_parts(
    answers: list[tuple[str, Answered]],
) -> Iterator[list[tuple[str, Answered]]]:
    start = duplicates = 0
    for at, (_, answered) in enumerate(answers):
        if at - start == ROW_REQUESTS_MAX or duplicates > ROW_DUPLICATES_MAX:
            yield answers[start:at]
            start, duplicates = at, 0
        duplicates += len(answered.duplicates)
    if start < len(answers):
        yield answers[start:]


def check_same(first: bytes, second: bytes) -> None:
    """Raise InvalidArgument (REQUEST_ID_REUSED) unless two fingerprints are the same."""
    if first != second:
        raise InvalidArgument(
            "request_id",
            "was used before with other content",
            reason="REQUEST_ID_REUSED",
        )
