"""Walks the rows of a database, decodes each, and goes on behind what cannot be read."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from libs.storage.database.snapshots import BATCH_ROWS_MAX, SnapshotReader
from libs.storage.errors import CorruptRecord, StorageError
from libs.storage.layout.keys import LAST_NUMBER, key_head
from libs.storage.layout.primitives import KeyRange
from libs.storage.records.catalogue import KINDS, RecordKind, end_of_queue, kind_of_key
from services.janitor.verify.findings import Findings, Kind

EVERYTHING: Final = KeyRange(b"\x00", b"\xff")

KEY_SHOWN_BYTES: Final = 40

SEARCH_S: Final = 20.0
"""How long the end of damaged rows is looked for among the numbers of their keys: SlateDB repeats
some reads that fail for seconds. Then it is the next queue, or the next kind of record."""

READS_ALONE_MAX: Final = 10_000
"""Rows of a database that are read by their keys, since they lie beside what cannot be read: an S3
store takes minutes for this many."""

_NUMBER_BYTES: Final = 8
_TYPE_BYTES: Final = 2
_BEHIND_NUMBERS: Final = b"\xff" * (_NUMBER_BYTES + 1)
"""Behind the numbers of a head, and what begins with the last of them."""


class _Damage(Exception):
    def __init__(self, at: bytes) -> None:
        super().__init__(at.hex())
        self.at = at


class ReadRow(NamedTuple):
    """A row whose key and value were read; `parsed` is what its key says."""

    kind: RecordKind
    key: bytes
    parsed: Any
    value: Any
    value_bytes: int


@dataclass
class Walk:
    """A database on its way to be verified."""

    name: str
    reader: SnapshotReader
    findings: Findings
    check: Callable[[], Awaitable[None]]
    """Raises StoreUnavailable where the store cannot be used: then nothing is damaged."""
    report: Callable[[int], None] = lambda _: None
    rows_count: int = field(default=0, init=False)
    _alone_count: int = field(default=0, init=False)

    @property
    def service(self) -> str:
        return self.name.partition("/")[0]

    @property
    def shard(self) -> int:
        return int(self.name.partition("/")[2])

    async def rows(self, span: KeyRange = EVERYTHING) -> AsyncGenerator[ReadRow, None]:
        """The rows of a range that decode; the others are findings."""
        async for key, value in self._stored(span):
            self.rows_count += 1
            self.report(self.rows_count)
            row = self._decoded(key, value)
            if row is not None:
                self.findings.counts[f"rows/{row.kind.name}"] += 1
                yield row

    @property
    def may_read_alone(self) -> bool:
        """Whether more rows may be read by their keys."""
        return self._alone_count < READS_ALONE_MAX

    async def row_at(self, key: bytes) -> ReadRow | None:
        """The row of a key, read alone: that works beside damage, where reads of ranges fail.

        None where there is no such row, or it cannot be read or decoded. `rows` has its finding.
        """
        self._alone_count += 1
        self.rows_count += 1
        self.report(self.rows_count)
        try:
            value = await self.reader.get(key)
        except StorageError:
            await self.check()
            return None
        return None if value is None else self._decoded(key, value)

    def _decoded(self, key: bytes, value: bytes) -> ReadRow | None:
        name = "row"
        try:
            kind = kind_of_key(key)
            name = kind.name
            parsed = kind.parse_key(key)
            if self.service not in kind.services:
                raise CorruptRecord(kind.name, f"does not belong in a database of {self.service}")
            return ReadRow(kind, key, parsed, kind.decode(value), len(value))
        except CorruptRecord as error:
            self.findings.add(Kind.ROW, self.name, name, shown(key), error.detail)
            self.findings.unreadable.add(self.name)
            return None

    async def _stored(self, span: KeyRange) -> AsyncGenerator[tuple[bytes, bytes], None]:
        start, last = span.start, span.start
        while start < span.end:
            try:
                async for rows in self.reader.scan(start, span.end):
                    for row in rows:
                        yield row
                    last = rows[-1][0]
                    start = last + b"\x00"
                return
            except StorageError as error:
                why = str(error)
            await self.check()
            left = BATCH_ROWS_MAX
            try:
                async with aclosing(self._narrowly(last, start, span.end)) as found:
                    async for row in found:
                        yield row
                        last, left = row[0], left - 1
                        start = last + b"\x00"
                        if not left:
                            break
            except _Damage as damage:
                start = max(start, await self._behind(damage.at, span.end))
                until = shown(start) if start < span.end else "the end"
                self.findings.unreadable.add(self.name)
                where = f"behind {shown(last)}, before {until}"
                self.findings.add(Kind.FILE, self.name, "rows", where, why)
                last = start
            else:
                if left:
                    return

    async def _narrowly(
        self, last: bytes, start: bytes, end: bytes
    ) -> AsyncGenerator[tuple[bytes, bytes], None]:
        """The rows of a range of which a read failed. Raises _Damage at what cannot be read.

        A read fetches ahead, and fails long before the damage. So each is for some numbers of the
        keys: for twice as many as the one before, or for half as many where that one failed.
        """
        failed_s = 0.0
        while start < end:
            head, number = last[:-_NUMBER_BYTES], _number_of(last) + (start > last)
            count = 1
            while len(head) >= _TYPE_BYTES and start < end and number <= LAST_NUMBER:
                behind = min(number + count, LAST_NUMBER + 1)
                stop = head + (_packed(behind) if behind <= LAST_NUMBER else _BEHIND_NUMBERS)
                began_s = time.monotonic()
                try:
                    async for rows in self.reader.scan(start, min(stop, end)):
                        for row in rows:
                            yield row
                        last = rows[-1][0]
                        start, began_s = last + b"\x00", time.monotonic()
                except StorageError:
                    failed_s += time.monotonic() - began_s
                    if count == 1 or failed_s > SEARCH_S:
                        raise _Damage(head + _packed(number)) from None
                    count //= 2
                else:
                    start, number, count = max(start, stop), behind, 2 * count
            if start >= end:
                return
            try:
                found = await self._first(start, end)
            except StorageError:
                raise _Damage(last) from None
            if found is None:
                return
            yield found
            last, start = found[0], found[0] + b"\x00"

    async def _first(self, start: bytes, end: bytes) -> tuple[bytes, bytes] | None:
        """The first row of a range, if there is one. Raises StorageError."""
        async for rows in self.reader.scan(start, end, limit=1):
            return rows[0]
        return None

    async def _can_read(self, start: bytes, end: bytes) -> bool:
        try:
            await self._first(start, end)
        except StorageError:
            return False
        return True

    async def _can_read_at(self, head: bytes, number: int, end: bytes) -> bool:
        """Whether rows of this number can be read, whatever is behind them."""
        stop = head + (_packed(number + 1) if number < LAST_NUMBER else _BEHIND_NUMBERS)
        return await self._can_read(head + _packed(number), min(stop, end))

    async def _behind(self, last: bytes, end: bytes) -> bytes:
        """Where rows can be read again: behind some numbers, or with the next queue or kind."""
        until = time.monotonic() + SEARCH_S
        head, value = last[:-_NUMBER_BYTES], _number_of(last)
        if len(head) >= _TYPE_BYTES:
            bits = 0  # the damage ends within 2**bits numbers
            while value + (1 << bits) <= LAST_NUMBER and time.monotonic() < until:
                if await self._can_read_at(head, value + (1 << bits), end):
                    low, high = (1 << bits) >> 1, 1 << bits
                    while high - low > 1 and time.monotonic() < until:
                        middle = (low + high) // 2
                        if await self._can_read_at(head, value + middle, end):
                            high = middle
                        else:
                            low = middle
                    return min(head + _packed(value + high), end)
                bits += 1
        queue_end = end_of_queue(last)
        if queue_end is not None and await self._can_read(queue_end, end):
            return min(queue_end, end)
        for kind in sorted(KINDS):
            start = key_head(kind)
            if start > last and await self._can_read(start, end):
                return min(start, end)
        return end


def _number_of(key: bytes) -> int:
    return int.from_bytes(key[-_NUMBER_BYTES:], "big")


def _packed(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "big")


def shown(key: bytes) -> str:
    """A key for people: what it says, else its bytes."""
    try:
        kind = kind_of_key(key)
        parsed = kind.parse_key(key)
    except (CorruptRecord, ValueError, IndexError):
        return key[:KEY_SHOWN_BYTES].hex() + ("…" if len(key) > KEY_SHOWN_BYTES else "")
    if parsed is None:
        return "(the only one)"
    parts = parsed if isinstance(parsed, tuple) else (parsed,)
    names = getattr(parsed, "_fields", ("",) * len(parts))
    words = (
        f"{name} {part.hex() if isinstance(part, bytes) else part}".strip()
        for name, part in zip(names, parts, strict=True)
    )
    return ", ".join(words)
