"""Log entries as a router holds them, whole or in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from libs.storage.records.log_runs import LogRun
from slatemq.v1.ingest_pb2 import StoredRun

ENTRY_BYTES = 512
"""Memory of an entry besides its bytes."""

RUN_BYTES = 1_024
"""Memory of a run while it is not stored: its headers and numbers, and the IDs made of it."""


class FreshMessages(NamedTuple):
    """Messages that came with their log entry, for the brokers that they are assigned to.

    Attributes:
        runs: The messages.
        size_bytes: About what they take in memory.
    """

    runs: Sequence[StoredRun]
    size_bytes: int


class LogEntry:
    """What one commit of ingest added to the log, or some messages of it in a row.

    A router that is behind holds a hundred thousand messages. Read, each that is unlike the others
    takes a kilobyte, stored a tenth of that; and once it is judged it is not read again, unless it
    must be judged again.

    Attributes:
        first: The ID of its first message.
        last: The ID of its last message.
        received_at_ms: When ingest received its first message.
        messages_count: How many messages it has.
        size_bytes: Its size on the wire.
        memory_bytes: About what it takes in memory until it is judged.
        fresh: Its messages, if they came with it.
    """

    __slots__ = (
        "_held_count",
        "_is_kept",
        "_read",
        "_runs",
        "first",
        "fresh",
        "last",
        "memory_bytes",
        "messages_count",
        "received_at_ms",
        "size_bytes",
    )

    def __init__(
        self,
        runs: Sequence[LogRun],
        size_bytes: int,
        read: Callable[[], Sequence[LogRun]] | None = None,
    ) -> None:
        """It has at least one message. With `read`, which reads them again, they need not stay."""
        self.first, _, self.received_at_ms, *_ = runs[0][0]
        (first_of_last_run, *_), _, _, sizes, _ = runs[-1]
        self.last = first_of_last_run + len(sizes) - 1
        self.messages_count = sum(len(sizes) for _, _, _, sizes, _ in runs)
        self.size_bytes = size_bytes
        self.memory_bytes = size_bytes + ENTRY_BYTES + RUN_BYTES * len(runs)
        self.fresh: FreshMessages | None = None
        self._is_kept = True
        self._runs: Sequence[LogRun] | None = runs
        self._read = read
        self._held_count = 0

    @property
    def runs(self) -> Sequence[LogRun]:
        """Its messages; read again where they were let go of."""
        if self._runs is None:
            assert self._read is not None, "only what can be read again is let go of"
            self._runs = self._read()
        return self._runs

    def peek(self) -> Sequence[LogRun]:
        """Its messages, which are let go of again where they were."""
        if self._runs is not None:
            return self._runs
        assert self._read is not None, "only what can be read again is let go of"
        return self._read()

    def hold(self) -> None:
        """Keeps its messages until `release`, to be judged."""
        self._held_count += 1

    def release(self) -> None:
        """Ends a `hold`: after the last one the messages need not stay."""
        self._held_count -= 1
        if (not self._held_count or not self._is_kept) and self._read is not None:
            self._runs = None

    def keep_fresh(self, fresh: FreshMessages) -> None:
        self.fresh = fresh
        self.memory_bytes += fresh.size_bytes

    @property
    def stored_bytes(self) -> int:
        """About what it takes in memory once it is judged."""
        return self.size_bytes + ENTRY_BYTES + (self.fresh.size_bytes if self.fresh else 0)

    def discard_runs(self) -> None:
        """Keep its messages only while one route judges it, not until all have: memory is short."""
        if self._read is not None:
            self._is_kept, self._runs, self.fresh = False, None, None
            self.memory_bytes = self.stored_bytes

    def between(self, after: int, last: int) -> LogEntry:
        """Its messages with IDs above one, up to another one; there must be some."""
        before = sum(min(max(after - run[0][0] + 1, 0), len(run[3])) for run in self.runs)
        until = sum(min(max(last - run[0][0] + 1, 0), len(run[3])) for run in self.runs)
        [part] = self._cut([before, until])
        if not self._is_kept:
            part.discard_runs()
        return part

    def parts(self, messages_max: int) -> list[LogEntry]:
        return self._cut([*range(0, self.messages_count, messages_max), self.messages_count])

    def _cut(self, places: Sequence[int]) -> list[LogEntry]:
        """The parts between these places, which ascend, by offsets of messages."""
        self.hold()
        parts = []
        for start, end in pairwise(places):
            parts.append(
                LogEntry(
                    runs=_sliced(self.runs, start, end),
                    size_bytes=self.size_bytes * end // self.messages_count
                    - self.size_bytes * start // self.messages_count,
                    read=partial(self._slice_again, start, end),
                )
            )
        self.release()
        return parts

    def _slice_again(self, start: int, end: int) -> Sequence[LogRun]:
        return _sliced(self.peek(), start, end)


def _sliced(runs: Sequence[LogRun], start: int, end: int) -> list[LogRun]:
    """The runs of the messages from one offset up to another one."""
    found: list[LogRun] = []
    at = 0
    for run in runs:
        (first_id, *rest), headers, delay, sizes, queue = run
        low, high = max(start - at, 0), min(end - at, len(sizes))
        if high - low == len(sizes):
            found.append(run)
        elif low < high:
            created, received, visible, retention = rest
            numbers = (first_id + low, created, received, visible, retention)
            found.append((numbers, headers, delay, sizes[low:high], queue))
        at += len(sizes)
        if at >= end:
            break
    return found
