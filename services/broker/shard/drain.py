"""A shard that takes no new queues, and is removed once it has nothing.

    serving ──drain──► draining ──queues, pushes, events gone──► drained ──remove──► removed
       ▲                  │
       └──────cancel──────┘

Draining is a row of the database: it lasts over restarts, and a process that was replaced cannot
change it. That a shard is removed is an object beside the databases, since the shard's own goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from libs.serving.process.removal import check_drained
from libs.storage.database.slate import Database
from libs.storage.layout.own_keys import DRAINING_KEY, events_range
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.records.states import encode_draining
from services.broker.shard.owner import ShardOwner
from slatemq.errors import FailedPrecondition


@dataclass(eq=False)
class Drain:
    _owner: ShardOwner
    _database: Database
    _removed_shards: RemovedShards
    removed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set once the shard is removed: its process ends."""

    @property
    def is_draining(self) -> bool:
        return self._owner.shard.draining_since_ms is not None

    def check_open(self) -> None:
        """Raises FailedPrecondition (SHARD_DRAINING) where the shard takes no new queues."""
        if self.is_draining:
            raise FailedPrecondition(
                "SHARD_DRAINING",
                f"broker shard {self._shard} takes no new queues: it is being drained. Create the "
                "queue on another shard, or end the drain with `slatemq shard drain --cancel`",
                subject=self._database.name,
            )

    async def begin(self) -> None:
        """Take no new queues from now on, durably."""
        await self._set(draining=True)

    async def cancel(self) -> None:
        """Take new queues again, durably."""
        await self._set(draining=False)

    async def _set(self, *, draining: bool) -> None:
        def change(now_ms: int) -> None:
            shard = self._owner.shard
            shard.check_stays()
            if draining != self.is_draining:
                shard.draining_since_ms = now_ms if draining else None
                value = encode_draining(now_ms) if draining else None
                shard.put(DRAINING_KEY, value)

        await self._owner.run(change)
        await self._owner.durable()

    async def remaining(self) -> Sequence[str]:
        """What has to go before the shard can be removed, for people."""
        shard = self._owner.shard
        counts = {
            "queues": len(shard.queues),
            "queues that are leaving": len(shard.moves.departures),
            "queues that are arriving": len(shard.moves.arrivals),
            "pushes that wait for an ingest": sum(
                map(shard.outbox.waiting_count, shard.outbox.ingest_shards)
            ),
            "pushes that an ingest refused": len(shard.outbox.refused),
            "request IDs of commands, remembered for ten minutes": shard.executed.count,
        }
        found = [f"{count} {what}" for what, count in counts.items() if count]
        span = events_range()
        if [rows async for rows in self._database.scan(span.start, span.end, limit=1)]:
            found.append("events that are not published yet")
        return found

    async def remove(self, now_ms: int) -> None:
        """Remove the shard. Raises FailedPrecondition (SHARD_NOT_DRAINED), StoreUnavailable."""
        self._owner.shard.is_leaving = True
        try:
            # What was answered before is durable then; no other process owns the shard.
            await self._owner.commits.prove_ownership()
            remaining = await self.remaining()
            check_drained(self._database.name, remaining, is_draining=self.is_draining)
            await self._removed_shards.add(self._database.name, now_ms)
            self.removed.set()
        finally:
            self._owner.shard.is_leaving = self.removed.is_set()

    @property
    def _shard(self) -> str:
        return self._database.name.rpartition("/")[2]
