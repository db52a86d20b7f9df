"""Which lists of commands took effect in the last minutes: makes repeating an Execute safe.

The request IDs of one commit are one row, keyed by the minute of the commit. In memory an ID is a
hash of 16 bytes and the fingerprint of its commands. Pure: no I/O, no clock, no asyncio.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from libs.storage.layout.own_keys import MINUTE_MS, executed_key
from libs.storage.layout.primitives import RowChange
from libs.storage.records.execution_records import ExecutedRecord, encode_executed
from slatemq.errors import ResourceExhausted

WINDOW_MINUTES = 10
"""How long a request ID is remembered at least; a minute more at most."""

REQUEST_IDS_MAX = 500_000
"""Request IDs remembered at most, some 100 MB: 800 calls a second over the whole window."""

ROW_REQUEST_IDS_MAX = 1000
"""Request IDs in one row at most: 150 KB."""

Stored = tuple[int, int, Sequence[ExecutedRecord]]
"""A row: its minute, its number, and its records."""


@dataclass(slots=True)
class _Minute:
    minute: int
    numbers: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)


class Executed:
    def __init__(self, stored: Iterable[Stored] = ()) -> None:
        """Restore from stored rows, in the order of their keys."""
        self._fingerprints: dict[int, bytes] = {}
        self._minutes: deque[_Minute] = deque()
        self._open: list[ExecutedRecord] = []
        self._expired: list[RowChange] = []
        self._number = 0
        for minute, number, records in stored:
            self._number = max(self._number, number)
            self._fingerprints.update((_hash(one.request_id), one.fingerprint) for one in records)
            self._note(minute, number, records)

    @property
    def count(self) -> int:
        """How many IDs are remembered."""
        return len(self._fingerprints)

    def fingerprint(self, request_id: str) -> bytes | None:
        """The fingerprint of the commands that took effect under this ID; None if none did."""
        return self._fingerprints.get(_hash(request_id))

    def check_capacity(self) -> None:
        """Raises ResourceExhausted if no further ID can be remembered."""
        if len(self._fingerprints) >= REQUEST_IDS_MAX:
            raise ResourceExhausted(
                f"too many request IDs within ten minutes (limit {REQUEST_IDS_MAX}); retry",
                reason="TOO_MANY_REQUEST_IDS",
                retry_after_ms=MINUTE_MS,
            )

    def add(self, request_id: str, fingerprint: bytes) -> None:
        """Remembers with the next commit that these commands took effect. See `check_capacity`."""
        self._fingerprints[_hash(request_id)] = fingerprint
        self._open.append(ExecutedRecord(request_id, fingerprint))

    def forget(self, now_ms: int) -> None:
        """Drops what is older than the window, and its rows with the next commit."""
        oldest = now_ms // MINUTE_MS - WINDOW_MINUTES
        while self._minutes and self._minutes[0].minute < oldest:
            minute = self._minutes.popleft()
            for hashed in minute.hashes:
                self._fingerprints.pop(hashed, None)
            self._expired += (
                (executed_key(minute.minute, number), None) for number in minute.numbers
            )

    # --- Records ------------------------------------------------------------

    @property
    def has_changes(self) -> bool:
        return bool(self._open or self._expired)

    def drain(self, now_ms: int) -> Iterator[RowChange]:
        expired, self._expired = self._expired, []
        yield from expired
        records, self._open = self._open, []
        minute = now_ms // MINUTE_MS
        for start in range(0, len(records), ROW_REQUEST_IDS_MAX):
            part = records[start : start + ROW_REQUEST_IDS_MAX]
            self._number += 1
            self._note(minute, self._number, part)
            yield executed_key(minute, self._number), encode_executed(part)

    def _note(self, minute: int, number: int, records: Iterable[ExecutedRecord]) -> None:
        if not self._minutes or self._minutes[-1].minute < minute:
            self._minutes.append(_Minute(minute))
        self._minutes[-1].numbers.append(number)
        self._minutes[-1].hashes += (_hash(record.request_id) for record in records)


def _hash(request_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=16).digest())
