"""Extends the leases of what streams delivered, as long as their consumers are heard of.

Leases are kept in batches, about one for each answer that a stream got. A batch is looked at when
half of what its leases have left is over: those that ended are dropped from it, the others extended
and put off again. So each running lease costs twice in its length, regardless of what waits in the
queue and of how often the consumer is heard of.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from services.broker.core.leases import Lease
from services.broker.delivery.waiters import Stream
from services.broker.shard.owner import ShardOwner

LOOK_MS_MIN = 100
"""Batches are looked at no oftener, and together with those that are due so soon after."""

COMPACT_AT = 10_000
"""Leases in batches from which on those that ended are looked for before their time."""

EXTEND_AT_ONCE = 2000
"""Leases extended, or looked for, in one go at most: some milliseconds, in which nothing else
runs."""


class _Batch(NamedTuple):
    look_ms: int
    number: int  # breaks ties
    stream: Stream
    leases: list[Lease]


class LeaseKeeper:
    def __init__(self, owner: ShardOwner) -> None:
        self._owner = owner
        self._batches: list[_Batch] = []  # a heap
        self._number = 0
        self.leases_count = 0  # in all batches, ended ones included
        self._compact_at = COMPACT_AT
        self._wake = asyncio.Event()

    def keep(self, stream: Stream, leases: Sequence[Lease]) -> None:
        """Keeps leases that this stream is being sent, until they end or the stream does."""
        now_ms = self._owner.clock.now_ms()
        for first in range(0, len(leases), EXTEND_AT_ONCE):
            self._put(stream, list(leases[first : first + EXTEND_AT_ONCE]), now_ms)

    async def run(self) -> None:
        while True:
            if not self._batches:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(LOOK_MS_MIN / 1000)
            await self.look()

    async def look(self) -> None:
        """Looks at the batches whose time has come; at all, if they may have many ended leases."""
        await self._renew_due()
        if self.leases_count > self._compact_at:
            await self._compact()

    async def _renew_due(self) -> None:
        now_ms = self._owner.clock.now_ms()
        while due := self._due(now_ms):
            await self._owner.run(partial(self._renew, due))
            await asyncio.sleep(0)

    def _due(self, now_ms: int) -> dict[Stream, list[Lease]]:
        due: dict[Stream, list[Lease]] = {}
        count = 0
        while self._batches and self._batches[0].look_ms <= now_ms and count < EXTEND_AT_ONCE:
            batch = heapq.heappop(self._batches)
            due.setdefault(batch.stream, []).extend(batch.leases)
            count += len(batch.leases)
        self.leases_count -= count
        return due

    def _renew(self, due: dict[Stream, list[Lease]], now_ms: int) -> None:
        """Extends the leases that run, if their consumer lives, and puts them off."""
        for stream, leases in due.items():
            running = self._running(stream, leases)
            if stream.is_alive(now_ms):
                # What its consumer has extended for longer is not shortened.
                tokens = [one.token for one in running if one.deadline_ms < now_ms + one.length_ms]
                self._owner.shard.leases.extend(tokens, 0, now_ms)
            left = [lease for lease in running if not _has_ended_total(lease)]
            if left:
                self._put(stream, left, now_ms)

    def _running(self, stream: Stream, leases: Sequence[Lease]) -> list[Lease]:
        if stream.is_closed:
            return []
        running = self._owner.shard.leases.running
        return [lease for lease in leases if running(lease.token) is lease]

    def _put(self, stream: Stream, leases: list[Lease], now_ms: int) -> None:
        left_ms = min(lease.deadline_ms for lease in leases) - now_ms
        self._number += 1
        look_ms = now_ms + max(left_ms // 2, LOOK_MS_MIN)
        heapq.heappush(self._batches, _Batch(look_ms, self._number, stream, leases))
        self.leases_count += len(leases)
        if len(self._batches) == 1:
            self._wake.set()

    async def _compact(self) -> None:
        """Lets go of what has ended, in steps: most leases end long before their deadline."""
        batches, self._batches = self._batches, []
        while batches:
            looked_at = 0
            while batches and looked_at < EXTEND_AT_ONCE:
                one = heapq.heappop(batches)  # The first to fall due, which some may meanwhile.
                running = self._running(one.stream, one.leases)
                if running:
                    heapq.heappush(self._batches, one._replace(leases=running))
                self.leases_count -= len(one.leases) - len(running)
                looked_at += len(one.leases)
            await asyncio.sleep(0)
            await self._renew_due()
        self._compact_at = max(COMPACT_AT, 2 * self.leases_count)


def _has_ended_total(lease: Lease) -> bool:
    """Whether a lease reaches to the end of its total: no extension moves it any more."""
    total_ms = lease.queue.settings.max_total_lease_ms
    return lease.deadline_ms >= lease.claimed_at_ms + total_ms
