"""A shard that takes no new queues, and is removed once it has nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from libs.serving.process.removal import ShardCounts, ShardDrain
from libs.storage.database.slate import Database
from libs.storage.layout.primitives import RowChange
from libs.storage.objects.removed_shards import RemovedShards
from services.broker.shard.load import ShardLoad
from services.broker.shard.owner import ShardOwner
from slatemq._counts import counted
from slatemq.errors import FailedPrecondition


class Drain(ShardDrain):
    def __init__(
        self,
        owner: ShardOwner,
        database: Database,
        load: ShardLoad,
        removed_shards: RemovedShards,
    ) -> None:
        super().__init__(database, owner.clock, owner.commits, owner.shard, removed_shards)
        self._owner = owner
        self._load = load

    def check_open(self) -> None:
        """Raises FailedPrecondition (SHARD_DRAINING) where the shard takes no new queues."""
        if self.is_draining:
            raise FailedPrecondition(
                "SHARD_DRAINING",
                f"{self._title} takes no new queues: it is being drained. Choose another shard, "
                "or end the drain with `slatemq shard drain --cancel`",
                subject=self.name,
            )

    def counts(self) -> ShardCounts:
        load = self._load
        return ShardCounts(load.queues_count, load.messages_count, load.load())

    async def _contents(self) -> list[str]:
        shard = self._owner.shard
        arrived_count = sum(one.has_arrived for one in shard.moves.departures.values())
        waiting_count = sum(map(shard.outbox.waiting_count, shard.outbox.ingest_shards))
        counts = {
            ("queue", "queues"): len(shard.queues),
            ("queue that is leaving", "queues that are leaving"): (
                len(shard.moves.departures) - arrived_count
            ),
            (
                "queue that has left, until each ingest is up and knows of it",
                "queues that have left, until each ingest is up and knows of it",
            ): arrived_count,
            ("queue that is arriving", "queues that are arriving"): len(shard.moves.arrivals),
            ("push that waits for an ingest", "pushes that wait for an ingest"): waiting_count,
            ("push that an ingest refused", "pushes that an ingest refused"): len(
                shard.outbox.refused
            ),
            (
                "request ID of a command, remembered for ten minutes",
                "request IDs of commands, remembered for ten minutes",
            ): shard.executed.count,
        }
        return [counted(count, one, many) for (one, many), count in counts.items() if count]

    async def _write(self, change: Callable[[int], Sequence[RowChange]]) -> None:
        shard = self._owner.shard
        await self._owner.run(lambda now_ms: shard.write_rows(change(now_ms)))
