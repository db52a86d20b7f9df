"""A shard that takes no publishes, and is removed once it has nothing.

    serving ──drain──► draining ──the janitor has removed all──► drained ──remove──► removed
       ▲                  │                                         │
       └──────cancel──────┴─────────────────────────────────────────┘

Draining is a row of the database: it lasts over restarts, and a process that was replaced cannot
change it. It takes effect with the commit that has the row: what that commit, or a later one, would
store of publishes is refused, so nothing is accepted behind the answer. Pushes are stored, since a
broker has numbered them for this shard; brokers choose another one for those that follow.

That a shard is removed is an object beside the databases, since its own goes. Before, nothing more
is stored, and no broker may have a row that is perhaps stored here: a row that a broker numbers for
this shard later was never stored, and goes to another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from libs.serving.process.removal import check_drained
from libs.storage.database.clocks import Clock
from libs.storage.database.slate import Database
from libs.storage.layout.ids import MAX_SEQUENCE, message_id
from libs.storage.layout.keys import log_range
from libs.storage.layout.own_keys import DRAINING_KEY, events_range
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.records.metadata import decode_log_entry
from libs.storage.records.states import encode_draining
from services.ingest.read.tailing import MetadataLog
from services.ingest.write.publishing import Publisher
from slatemq.errors import Unavailable

COUNTED_ENTRIES_MAX: Final = 256
"""Log entries that are read to count what is left; of more, it is said that there are more."""


@dataclass(eq=False)
class Drain:
    _shard: int
    _database: Database
    _clock: Clock
    _publisher: Publisher
    _log: MetadataLog
    removed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set once the shard is removed: its process ends."""

    @classmethod
    async def load(
        cls,
        shard: int,
        database: Database,
        clock: Clock,
        publisher: Publisher,
        log: MetadataLog,
    ) -> Drain:
        publisher.is_draining = await database.get(DRAINING_KEY) is not None
        return cls(shard, database, clock, publisher, log)

    @property
    def is_draining(self) -> bool:
        return self._publisher.is_draining

    async def begin(self) -> None:
        """Take no publishes from now on, durably. Raises the errors of the store."""
        await self._set(draining=True)

    async def cancel(self) -> None:
        """Take publishes again, durably. Raises the errors of the store."""
        await self._set(draining=False)

    async def _set(self, *, draining: bool) -> None:
        if self._publisher.is_leaving:
            raise Unavailable("the shard is being removed", reason="SHARD_LEAVING")
        if draining != self.is_draining:
            value = encode_draining(self._clock.now_ms()) if draining else None
            self._publisher.put([(DRAINING_KEY, value)])
            self._publisher.is_draining = draining
        await self._publisher.commits.durable()

    async def remaining(self) -> Sequence[str]:
        """What the shard still has, for people; empty = nothing. Reads at most some entries."""
        await self._publisher.commits.durable()
        first = max(self._log.bounds.first_sequence, message_id(self._shard, 1))
        span = log_range(first, message_id(self._shard, MAX_SEQUENCE))
        count = entries = for_ever = 0
        async for rows in self._database.scan(*span, limit=COUNTED_ENTRIES_MAX + 1):
            for _, value in rows:
                entries += 1
                if entries <= COUNTED_ENTRIES_MAX:
                    found = decode_log_entry(value)
                    count += len(found)
                    for_ever += sum(one.retention_s == 0 for one in found)
        left = self._counted(count, for_ever, is_all=entries <= COUNTED_ENTRIES_MAX)
        events = events_range()
        if [rows async for rows in self._database.scan(events.start, events.end, limit=1)]:
            left.append("events that are not published yet")
        return left

    @staticmethod
    def _counted(count: int, for_ever: int, *, is_all: bool) -> list[str]:
        if not count:
            return []
        more = "" if is_all else "more than "
        left = [
            f"{more}{count} messages, which `slatemq janitor run retention` and "
            "`slatemq janitor run unreferenced` remove once no queue needs them and the replay "
            "window is over"
        ]
        if for_ever:
            left.append(
                f"of these {more}{for_ever} messages with retention 0, which are kept for ever"
            )
        return left

    async def remove(
        self,
        removed_shards: RemovedShards,
        others_have: Callable[[], Awaitable[Sequence[str]]],
    ) -> None:
        """Remove the shard; `others_have` says what others have for it.

        Raises FailedPrecondition (SHARD_NOT_DRAINED), Unavailable, the errors of the store.
        """
        publisher = self._publisher
        publisher.is_leaving = True
        try:
            # What was accepted before is durable then; no other process owns the shard.
            await publisher.commits.prove_ownership()
            left = [*await self.remaining(), *await others_have()]
            check_drained(self._database.name, left, is_draining=self.is_draining)
            await removed_shards.add(self._database.name, self._clock.now_ms())
            self.removed.set()
        finally:
            publisher.is_leaving = self.removed.is_set()
