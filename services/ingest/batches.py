"""What was accepted and what was committed, as columns: no object per message on the way."""

from __future__ import annotations

import asyncio
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, TypeVar

import xxhash

from libs.storage.records.states import FINGERPRINT_BYTES

T = TypeVar("T")

NOT_SET: Final = -1
"""Stands for "created when received" in the column of creation times."""

ENTRY_MESSAGES_MAX: Final = 1_024
"""Messages in one log entry: reading one of them reads them all."""

ENTRY_HEADERS_BYTES_MAX: Final = 1 << 20
"""Header bytes in one log entry, unless one message alone has more."""

HASH_INLINE_BYTES_MAX: Final = 4 << 20
"""Content up to this size is hashed on the event loop: in a millisecond."""

MESSAGE_OVERHEAD_BYTES: Final = 256
"""About what a message costs in memory and on disk beyond payload and headers."""


def select(column: Sequence[T], offsets: Sequence[int]) -> list[T]:
    """The values at these offsets of a list; a range of them has the step 1."""
    if type(offsets) is range:
        return column[offsets.start : offsets.stop]  # type: ignore[return-value]
    return list(map(column.__getitem__, offsets))


@dataclass(slots=True)
class Columns:
    """The metadata of messages in a row.

    Attributes:
        headers: As mappings, for those who tail the log.
        header_bytes: The same, encoded (libs.storage.records.metadata.encode_headers).
        created_at_ms: By the producers' clocks; NOT_SET = when received.
        retention_s: 0 = forever.
        payload_bytes: Sizes.

    What few messages have, by their offsets in the run; it costs nothing where none has it:

        visible_at_ms: From when on they may be claimed, where the producer said so.
        delay_ms: How long they stay unavailable in delayed queues, where the producer said so.
        direct_queue_id: The one queue that gets them, of those that were pushed.
        deadline_ms: Until when they may be delivered, of those that were pushed and are older: it
            becomes their retention when they are received.
    """

    headers: list[dict[str, str]] = field(default_factory=list)
    header_bytes: list[bytes] = field(default_factory=list)
    created_at_ms: list[int] = field(default_factory=list)
    retention_s: list[int] = field(default_factory=list)
    payload_bytes: list[int] = field(default_factory=list)
    visible_at_ms: dict[int, int] = field(default_factory=dict)
    delay_ms: dict[int, int] = field(default_factory=dict)
    direct_queue_id: dict[int, str] = field(default_factory=dict)
    deadline_ms: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.headers)

    def extend(self, other: Columns) -> None:
        if other.visible_at_ms or other.delay_ms or other.direct_queue_id:
            start = len(self)
            for mine, theirs in zip(self._few(), other._few(), strict=True):
                mine.update((start + at, value) for at, value in theirs.items())
        self.headers += other.headers
        self.header_bytes += other.header_bytes
        self.created_at_ms += other.created_at_ms
        self.retention_s += other.retention_s
        self.payload_bytes += other.payload_bytes

    def entries(self) -> Iterator[tuple[int, Columns]]:
        """Split into runs that fit into a log entry each, with the offsets of their first."""
        start, count = 0, len(self)
        while start < count:
            end = self._entry_end(start)
            yield start, self if end - start == count else self.only(range(start, end))
            start = end

    def _entry_end(self, start: int) -> int:
        """The end of the entry that begins at `start`; it has at least one message."""
        end = min(start + ENTRY_MESSAGES_MAX, len(self))
        sizes = list(map(len, self.header_bytes[start:end]))
        if sum(sizes) <= ENTRY_HEADERS_BYTES_MAX:
            return end
        fitting = bisect_right(list(accumulate(sizes)), ENTRY_HEADERS_BYTES_MAX)
        return start + max(1, fitting)

    def only(self, kept: Sequence[int]) -> Columns:
        """The messages at these ascending offsets."""
        few = (
            {to: values[at] for to, at in enumerate(kept) if at in values} if values else {}
            for values in self._few()
        )
        return Columns(
            select(self.headers, kept),
            select(self.header_bytes, kept),
            select(self.created_at_ms, kept),
            select(self.retention_s, kept),
            select(self.payload_bytes, kept),
            *few,
        )

    def _few(self) -> Sequence[dict[int, Any]]:
        return self.visible_at_ms, self.delay_ms, self.direct_queue_id, self.deadline_ms


@dataclass(slots=True)
class Accepted:
    """A publish whose content is right: its payloads and metadata, and who asked.

    Attributes:
        payloads: The bytes of each message.
        columns: Their metadata, in the same order.
        request_id: Empty = none.
        dedupe_keys: By offsets, in ascending order, of the messages that have one.
        elsewhere: Offsets of the messages whose payloads are stored already, and empty here.
        large: Offsets of the payloads that do not fit into a record.
        size_bytes: What it costs until it is durable.
        keyed_runs: Of the runs with dedupe keys the offset of the first message, and the run's
            number in the request, in ascending order: for errors about keys.
        request: What it was made of, where it is to become a task.
    """

    payloads: list[bytes]
    columns: Columns
    request_id: str
    large: list[int]
    size_bytes: int
    dedupe_keys: dict[int, str] = field(default_factory=dict)
    elsewhere: list[int] = field(default_factory=list)
    keyed_runs: list[tuple[int, int]] = field(default_factory=list)
    request: Any = None

    @property
    def is_plain(self) -> bool:
        """Whether it can be stored at once: nothing to look up, upload, or hash for long."""
        return not (self.dedupe_keys or self.large or self.size_bytes > HASH_INLINE_BYTES_MAX)

    def only(self, kept: Sequence[int]) -> Accepted:
        """The messages at these ascending offsets."""
        offsets = {at: to for to, at in enumerate(kept)}
        return Accepted(
            [self.payloads[at] for at in kept],
            self.columns.only(kept),
            self.request_id,
            [offsets[at] for at in self.large if at in offsets],
            self.size_bytes,
            {offsets[at]: key for at, key in self.dedupe_keys.items() if at in offsets},
            [offsets[at] for at in self.elsewhere if at in offsets],
        )

    def fingerprint(self) -> bytes:
        """A hash of every field of every message, lengths included: the same for a repeat.

        Guards against accidents, not against attackers: a caller that makes up two contents of one
        fingerprint has sent both. XXH3 takes a thirtieth of the time of SHA-256.
        """
        columns = self.columns
        count = len(self.payloads)
        numbers = struct.pack(
            f"<I{count}Q{count}I{count}q{count}I",
            count,
            *columns.payload_bytes,
            *map(len, columns.header_bytes),
            *columns.created_at_ms,
            *columns.retention_s,
        )
        digest = xxhash.xxh3_128(numbers)
        digest.update(b"".join(columns.header_bytes))
        if columns.visible_at_ms or columns.delay_ms:
            # Apart from those that all have, so that plain messages do not pay for them.
            visible, delay = columns.visible_at_ms, columns.delay_ms
            digest.update(struct.pack(f"<{count}q", *(visible.get(at, 0) for at in range(count))))
            digest.update(struct.pack(f"<{count}q", *(delay.get(at, -1) for at in range(count))))
        for at, key in self.dedupe_keys.items():
            digest.update(struct.pack("<II", at, len(key.encode())) + key.encode())
        if self.large:
            for payload in self.payloads:
                digest.update(payload)
        else:
            digest.update(b"".join(self.payloads))
        return bytes(digest.digest()[:FINGERPRINT_BYTES])


async def fingerprint_of(accepted: Accepted) -> bytes:
    """The fingerprint; computed in a thread where that may take long."""
    if accepted.size_bytes > HASH_INLINE_BYTES_MAX:
        return await asyncio.to_thread(accepted.fingerprint)
    return accepted.fingerprint()
