"""Which logs this router routes at once, and which it leaves to another one that gets on.

All routers read all logs; a range that two of them send is applied once. So that four routers do
not do the work four times, each log has a first router, which all of them name alike: the one with
the lowest hash of both numbers. The others hold its entries unjudged, in reserve, look once a
second how far the broker is, and let go of what it has. Where a log has entries and has not moved
for three looks, they step in. Who has stepped in steps back once a range of its was
refused because another router had been faster.

A broker may have ended over the messages of a log, and the router that sent them waits then, for a
minute at most, before it sends them again. So a router that lost the broker while a log stood still
leaves that log alone for as long, and for some more such waits if the broker is lost again
meanwhile: not for ever, as that may be over other logs.

    first router of the log ─────────────────────────────► judges and sends at once
    another ── in reserve ──no move in 3 looks──► steps in ──refused for its place──► in reserve
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from hashlib import blake2b
from typing import Final

LOOK_S: Final = 1.0
"""From one look at the cursors of a broker to the next, while something is in reserve: one call for
all logs."""

LOOKS: Final = 3
"""Looks without a move after which a log stands still. A first router that gets on may hold pieces
without matches for 1.5 s (`hold_ms`), so two would be too few."""

WAITS: Final = 3
"""While a log has stood still for less than so many waits after a loss, another loss begins one
more."""


def is_first(router: int, routers: Collection[int], ingest_shard: int) -> bool:
    """Whether this router is the first one of a log, or there is no other that is known."""
    if router not in routers:
        return True
    return min(routers, key=lambda number: (_weight(number, ingest_shard), number)) == router


def _weight(router: int, ingest_shard: int) -> bytes:
    return blake2b(b"%d/%d" % (router, ingest_shard), digest_size=8).digest()


class Reserve:
    """The logs that one router leaves to others, on their way to one broker shard."""

    def __init__(self, looks_after_loss: int, now_s: Callable[[], float] = time.monotonic) -> None:
        """Step in `looks_after_loss` looks later where the broker was lost as a log stood still."""
        self._looks_after_loss = looks_after_loss
        self._now_s = now_s
        self._stepped_in: set[int] = set()
        self._standing = Counter[int]()
        self._after_loss = dict[int, float]()  # By log: when the first loss was.
        self._losses_count = 1  # Before this router began, perhaps.
        self._losses_before = Counter[int]()  # By log: those before it last moved.

    def has(self, ingest_shard: int) -> bool:
        """Whether a log that has another first router is left to it."""
        return ingest_shard not in self._stepped_in

    def moved(self, ingest_shard: int) -> None:
        """Another router gets on with the log."""
        self._losses_before[ingest_shard] = self._losses_count
        self._stepped_in.discard(ingest_shard)
        self._forget(ingest_shard)

    def moved_unseen(self, ingest_shard: int) -> None:
        """The log moved before the broker was lost, or while it was: its looks count from here."""
        self._forget(ingest_shard)

    def stands(self, ingest_shard: int) -> bool:
        """The log has entries, and a look found no move. Returns whether to step in."""
        self._standing[ingest_shard] += 1
        if self._standing[ingest_shard] < LOOKS:
            return False
        self._forget(ingest_shard)
        self._stepped_in.add(ingest_shard)
        return True

    def is_after_loss(self, ingest_shard: int) -> bool:
        """Whether the broker was lost since this router saw another one get on with the log."""
        return self._losses_count > self._losses_before[ingest_shard]

    def link_lost(self) -> None:
        """The broker is down, perhaps over a log that stood still.

        One that has waited for long waits no longer for this loss: its first router may be gone,
        and the broker lost over other logs again and again.
        """
        self._losses_count += 1
        now_s, long_s = self._now_s(), WAITS * self._looks_after_loss * LOOK_S
        for shard in self._standing:
            if now_s - self._after_loss.setdefault(shard, now_s) < long_s:
                self._standing[shard] = -self._looks_after_loss

    def step_back(self, ingest_shard: int) -> None:
        """The broker ended over this log, perhaps: leave it to its first router."""
        if ingest_shard in self._stepped_in:
            self._stepped_in.discard(ingest_shard)
            self._standing[ingest_shard] = 0

    def _forget(self, ingest_shard: int) -> None:
        self._standing.pop(ingest_shard, None)
        self._after_loss.pop(ingest_shard, None)
