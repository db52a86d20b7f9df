"""Walks the rows of a database, decodes each, and goes on behind what cannot be read."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
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

_NUMBER_BYTES: Final = 8
_TYPE_BYTES: Final = 2


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
            # One by one up to the damage: a batch that meets it is lost as a whole.
            with suppress(StorageError):
                for _ in range(BATCH_ROWS_MAX + 1):
                    found = await self._first(start, span.end)
                    if found is None:
                        return
                    yield found
                    last = found[0]
                    start = last + b"\x00"
                continue  # the store has answered after all
            start = await self._behind(last, span.end)
            until = shown(start) if start < span.end else "the end"
            self.findings.unreadable.add(self.name)
            where = f"behind {shown(last)}, before {until}"
            self.findings.add(Kind.FILE, self.name, "rows", where, why)
            last = start

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

    async def _behind(self, last: bytes, end: bytes) -> bytes:
        """Where rows can be read again: behind some numbers, or with the next queue or kind."""
        until = time.monotonic() + SEARCH_S
        head, value = last[:-_NUMBER_BYTES], int.from_bytes(last[-_NUMBER_BYTES:], "big")
        if len(head) >= _TYPE_BYTES:
            bits = 0  # the damage ends within 2**bits numbers
            while value + (1 << bits) <= LAST_NUMBER and time.monotonic() < until:
                if await self._can_read(head + _packed(value + (1 << bits)), end):
                    low, high = (1 << bits) >> 1, 1 << bits
                    while high - low > 1 and time.monotonic() < until:
                        middle = (low + high) // 2
                        if await self._can_read(head + _packed(value + middle), end):
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
