"""How much a stream may have on its way: little at first, more while the link carries it."""

from __future__ import annotations

from typing import Final

FIRST_BYTES: Final = 1 << 20
"""What is on its way over a slow link delays the answers to pings, and leases run meanwhile."""

TRANSIT_S: Final = 2.0
"""What comes within this time after it was granted does neither, nor would twice as much. The
broker's commit is part of it."""


class CreditWindow:
    """The bytes that are granted beyond those received and not taken, one message aside.

    They double each time that all that was granted until then has come within `TRANSIT_S`::

        granted    ├──────── 1 MiB ────────┤  ├──────────────── 2 MiB ────────────────┤
        received   ├── … ───── all of it ──┤ soon: twice as much may be on its way
    """

    def __init__(self, limit_bytes: int) -> None:
        self.size_bytes = min(FIRST_BYTES, limit_bytes)
        self._limit_bytes = limit_bytes
        self._granted_bytes = 0
        self._received_bytes = 0
        self._awaited: tuple[int, float] | None = None

    def granted(self, size_bytes: int, now_s: float) -> None:
        """Counts credit that was granted."""
        self._granted_bytes += size_bytes
        if size_bytes and self._awaited is None:
            self._awaited = self._granted_bytes, now_s

    def received(self, size_bytes: int, now_s: float) -> None:
        """Counts what came, and may double the window."""
        self._received_bytes += size_bytes
        if self._awaited is None:
            return
        awaited_bytes, since_s = self._awaited
        if self._received_bytes >= awaited_bytes:
            self._awaited = None
            if now_s - since_s <= TRANSIT_S:
                self.size_bytes = min(2 * self.size_bytes, self._limit_bytes)
