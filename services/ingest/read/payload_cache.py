"""Fresh messages in memory, for the brokers that will soon ask for them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from services.ingest.batches import Columns


class CachedRun(NamedTuple):
    """Messages of one commit, with IDs in a row; None stands for a payload not cached."""

    first_id: int
    received_at_ms: int
    payloads: Sequence[bytes | None]
    columns: Columns


_NOTHING = CachedRun(0, 0, [], Columns())


class PayloadCache:
    """Messages of the last durable publishes, bounded in bytes; the oldest go first.

    Kept in the runs in which they were committed, so a message costs its bytes and some pointers.
    """

    def __init__(self, bytes_max: int) -> None:
        self.size_bytes = 0
        self._bytes_max = bytes_max
        self._first_ids: list[int] = []
        self._runs: list[CachedRun] = []
        self._sizes: list[int] = []
        self._gone = 0  # runs at the front that are evicted already

    def add(self, run: CachedRun, size_bytes: int) -> None:
        """Add a run; runs come in ascending order of ID."""
        if size_bytes > self._bytes_max:
            return
        self._first_ids.append(run.first_id)
        self._runs.append(run)
        self._sizes.append(size_bytes)
        self.size_bytes += size_bytes
        while self.size_bytes > self._bytes_max:
            self._evict()

    def run(self, message_id: int) -> CachedRun | None:
        """The cached run that has the message; its payload may be None."""
        at = bisect_right(self._first_ids, message_id) - 1
        if at < self._gone:
            return None
        run = self._runs[at]
        return run if message_id - run.first_id < len(run.payloads) else None

    def has_none_of(self, message_ids: Sequence[int]) -> bool:
        """Whether all of them are older than the cache, as in most of a long backlog."""
        return (
            not message_ids
            or self._gone >= len(self._first_ids)
            or (max(message_ids) < self._first_ids[self._gone])
        )

    def get(self, message_id: int) -> bytes | None:
        run = self.run(message_id)
        return None if run is None else run.payloads[message_id - run.first_id]

    def forget(self, message_ids: Iterable[int]) -> None:
        """Drop these payloads; their bytes count until their runs are evicted."""
        by_run: dict[int, list[int]] = {}
        for message_id in message_ids:
            if self.get(message_id) is not None:
                at = bisect_right(self._first_ids, message_id) - 1
                by_run.setdefault(at, []).append(message_id)
        for at, forgotten in by_run.items():
            run = self._runs[at]
            payloads = list(run.payloads)
            for message_id in forgotten:
                payloads[message_id - run.first_id] = None
            self._runs[at] = run._replace(payloads=payloads)

    def _evict(self) -> None:
        at = self._gone
        self.size_bytes -= self._sizes[at]
        self._runs[at] = _NOTHING
        self._gone += 1
        # Cutting the front off moves everything behind it: only when it is at least as long.
        if self._gone * 2 > len(self._runs):
            del self._first_ids[: self._gone], self._runs[: self._gone], self._sizes[: self._gone]
            self._gone = 0
