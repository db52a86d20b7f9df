"""Fresh payloads in memory, for the brokers that will soon ask for them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

__all__ = ["PayloadCache"]


class PayloadCache:
    """Payloads of the last durable publishes, bounded in bytes; the oldest go first.

    Kept in the runs in which they were committed, so a message costs its payload and a pointer.
    """

    def __init__(self, bytes_max: int) -> None:
        """Keep at most `bytes_max` bytes."""
        self.size_bytes = 0
        self._bytes_max = bytes_max
        self._first_ids: list[int] = []
        self._runs: list[Sequence[bytes | None]] = []
        self._sizes: list[int] = []
        self._gone = 0  # runs at the front that are evicted already

    def add(self, first_id: int, payloads: Sequence[bytes], size_bytes: int) -> None:
        """Keep a run of payloads whose IDs go up by one; runs come in ascending order of ID."""
        if size_bytes > self._bytes_max:
            return
        self._first_ids.append(first_id)
        self._runs.append(payloads)
        self._sizes.append(size_bytes)
        self.size_bytes += size_bytes
        while self.size_bytes > self._bytes_max:
            self._evict()

    def get(self, message_id: int) -> bytes | None:
        """The payload of the message, if it is here."""
        at = bisect_right(self._first_ids, message_id) - 1
        if at < self._gone:
            return None
        run = self._runs[at]
        offset = message_id - self._first_ids[at]
        return run[offset] if offset < len(run) else None

    def forget(self, message_id: int) -> None:
        """Keep this payload no longer; its room stays taken until its run goes."""
        if self.get(message_id) is not None:
            at = bisect_right(self._first_ids, message_id) - 1
            run = list(self._runs[at])
            run[message_id - self._first_ids[at]] = None
            self._runs[at] = run

    def _evict(self) -> None:
        at = self._gone
        self.size_bytes -= self._sizes[at]
        self._runs[at] = ()
        self._gone += 1
        # Cutting the front off moves everything behind it: only when it is at least as long.
        if self._gone * 2 > len(self._runs):
            del self._first_ids[: self._gone], self._runs[: self._gone], self._sizes[: self._gone]
            self._gone = 0
