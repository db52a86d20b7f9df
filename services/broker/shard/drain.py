"""A shard that takes no new queues, and is removed once it has nothing."""

from __future__ import annotations

from collections.abc import Sequence

from libs.serving.process.removal import ShardDrain
from libs.storage.database.slate import Database
from libs.storage.layout.own_keys import DRAINING_KEY, LEAVING_KEY, events_range
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.records.states import encode_draining, encode_leaving
from services.broker.shard.owner import ShardOwner
from slatemq.errors import FailedPrecondition


class Drain(ShardDrain):
    def __init__(
        self, owner: ShardOwner, database: Database, removed_shards: RemovedShards
    ) -> None:
        super().__init__(database, owner.clock, owner.commits, owner.shard, removed_shards)
        self._owner = owner

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

    async def _set(self, *, draining: bool) -> None:
        def change(now_ms: int) -> None:
            shard = self._owner.shard
            self._check_may_stay()
            shard.check_stays()
            if draining != self.is_draining:
                shard.draining_since_ms = now_ms if draining else None
                value = encode_draining(now_ms) if draining else None
                shard.write_rows([(DRAINING_KEY, value)])

        await self._owner.run(change)
        await self._owner.durable()

    async def remaining(self) -> Sequence[str]:
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

    async def _leave(self) -> None:
        def leave(now_ms: int) -> None:
            self._is_certain = True
            self._owner.shard.write_rows([(LEAVING_KEY, encode_leaving(now_ms))])

        await self._owner.run(leave)
