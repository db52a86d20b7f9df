"""A shard that takes no new queues, and is removed once it has nothing.

    serving ──drain──► draining ──queues, pushes, events gone──► drained ──► leaving ──► removed
       ▲                  │                                         │
       └──────cancel──────┴─────────────────────────────────────────┘

Draining is a row of the database: it lasts over restarts, and a process that was replaced cannot
change it. So is leaving, from which there is no way back. That a shard is removed is an object
beside the databases, since the shard's own goes. Every process can write an object, at any time,
without an answer, too: so leaving is durable before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from libs.serving.process.removal import check_drained, check_may_stay
from libs.storage.database.slate import Database
from libs.storage.layout.own_keys import DRAINING_KEY, LEAVING_KEY, events_range
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.records.states import encode_draining, encode_leaving
from services.broker.shard.owner import ShardOwner
from slatemq.errors import FailedPrecondition


@dataclass(eq=False)
class Drain:
    _owner: ShardOwner
    _database: Database
    _removed_shards: RemovedShards
    removed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set once the shard is removed: its process ends."""
    _is_certain: bool = field(init=False)
    _deciding: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        self._is_certain = self._owner.shard.is_leaving

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
        """Take no new queues from now on, durably. Raises as `cancel`."""
        await self._set(draining=True)

    async def cancel(self) -> None:
        """Take new queues again, durably.

        Raises FailedPrecondition (SHARD_LEAVING), and Unavailable while the shard may be removed.
        """
        await self._set(draining=False)

    async def _set(self, *, draining: bool) -> None:
        def change(now_ms: int) -> None:
            shard = self._owner.shard
            check_may_stay(self._database.name, is_certain=self._is_certain)
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
        arrived_count = sum(one.has_arrived for one in shard.moves.departures.values())
        counts = {
            "queue" if len(shard.queues) == 1 else "queues": len(shard.queues),
            "queues that are leaving": len(shard.moves.departures) - arrived_count,
            "queues that have left, until each ingest is up and knows of it": arrived_count,
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
        """Remove the shard. Raises FailedPrecondition (SHARD_NOT_DRAINED), StoreUnavailable.

        After StoreUnavailable the shard takes nothing more, and the call is to be repeated.
        """
        async with self._deciding:
            if not self._is_certain:
                await self._decide()
        await self.finish(now_ms)

    async def finish(self, now_ms: int) -> None:
        """Finish a removal that is certain, be it since a former process. Raises StoreUnavailable.

        Does nothing where none is.
        """
        if self._is_certain:
            await self._owner.durable()
            await self._removed_shards.add(self._database.name, now_ms)
            self.removed.set()

    async def _decide(self) -> None:
        """Make it certain that the shard is removed, with the next commit."""
        self._owner.shard.is_leaving = True
        try:
            # What was answered before is durable then.
            await self._owner.commits.prove_ownership()
            remaining = await self.remaining()
            check_drained(self._database.name, remaining, is_draining=self.is_draining)
            await self._owner.run(self._leave)
        finally:
            self._owner.shard.is_leaving = self._is_certain

    def _leave(self, now_ms: int) -> None:
        self._is_certain = True
        self._owner.shard.put(LEAVING_KEY, encode_leaving(now_ms))

    @property
    def _shard(self) -> str:
        return self._database.name.rpartition("/")[2]
