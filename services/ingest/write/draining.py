"""A shard that takes no publishes, so that in the end it has nothing.

    serving ──drain──► draining ──messages routed, delivered, removed by the janitor──► drained
       ▲                  │                                                                │
       └──────cancel──────┴────────────────────────────────────────────────────────────────┘

Draining is a row of the database: it lasts over restarts, and a process that was replaced cannot
change it. It takes effect with the commit that has the row: what that commit, or a later one, would
store of publishes is refused, so nothing is accepted behind the answer. Pushes are stored, since a
broker has numbered them for this shard; brokers choose another one for those that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from libs.storage.database.clocks import Clock
from libs.storage.database.slate import Database
from libs.storage.layout.ids import MAX_SEQUENCE, message_id
from libs.storage.layout.keys import log_range
from libs.storage.layout.own_keys import DRAINING_KEY
from libs.storage.records.metadata import decode_log_entry
from libs.storage.records.states import encode_draining
from services.ingest.read.tailing import MetadataLog
from services.ingest.write.publishing import Publisher

COUNTED_ENTRIES_MAX: Final = 256
"""Log entries that are read to count what is left; of more, it is said that there are more."""


@dataclass(eq=False)
class Drain:
    _shard: int
    _database: Database
    _clock: Clock
    _publisher: Publisher
    _log: MetadataLog

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
        if not count:
            return []
        more = "more than " if entries > COUNTED_ENTRIES_MAX else ""
        left = [
            f"{more}{count} messages, which the jobs `retention` and `unreferenced` remove once no "
            "queue needs them and the replay window is over"
        ]
        if for_ever:
            left.append(
                f"of these {more}{for_ever} messages with retention 0, which are kept for ever"
            )
        return left
