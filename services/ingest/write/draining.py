"""A shard that takes no publishes, and is removed once it has nothing.

Draining takes effect with the commit that has its row: what that commit, or a later one, would
store of publishes is refused, so nothing is accepted behind the answer. Pushes are stored, since a
broker has numbered them for this shard; brokers choose another one for those that follow.

Before a shard is removed, nothing more is stored, and no broker may have a row that is perhaps
stored here: a row that a broker numbers for this shard later was never stored, and goes to another
one. Then it is leaving.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final

from libs.serving.process.removal import ShardDrain
from libs.storage.database.clocks import Clock
from libs.storage.database.slate import Database
from libs.storage.layout.ids import MAX_SEQUENCE, message_id
from libs.storage.layout.keys import log_range, parse_log_key
from libs.storage.layout.own_keys import DRAINING_KEY, LEAVING_KEY, events_range
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.records.states import encode_draining, encode_leaving
from services.ingest.read.entries import ROWS_MIN, decoded
from services.ingest.read.tailing import MetadataLog
from services.ingest.write.publishing import Publisher
from slatemq.errors import Unavailable

COUNTED_ENTRIES_MAX: Final = 256
"""Log entries that are read to count what is left; of more, it is said that there are more."""


class Drain(ShardDrain):
    def __init__(
        self,
        database: Database,
        clock: Clock,
        publisher: Publisher,
        log: MetadataLog,
        removed_shards: RemovedShards,
    ) -> None:
        super().__init__(database, clock, publisher.commits, publisher, removed_shards)
        self._publisher = publisher
        self._log = log

    @property
    def is_draining(self) -> bool:
        return self._publisher.is_draining

    async def _set(self, *, draining: bool) -> None:
        self._check_may_stay()
        if self._publisher.is_leaving:
            raise Unavailable("the shard is being removed", reason="SHARD_LEAVING")
        if draining != self.is_draining:
            value = encode_draining(self._clock.now_ms()) if draining else None
            self._publisher.put([(DRAINING_KEY, value)])
            self._publisher.is_draining = draining
        await self._commits.durable()

    async def remaining(self) -> Sequence[str]:
        """As in ShardDrain; reads at most some entries."""
        await self._commits.durable()
        count = for_ever = entries_count = 0
        async for sequence, value in self._entries(COUNTED_ENTRIES_MAX + 1):
            entries_count += 1
            if entries_count <= COUNTED_ENTRIES_MAX:
                found = (await decoded(sequence, value)).messages.values()
                count += len(found)
                for_ever += sum(one.retention_s == 0 for one in found)
                await asyncio.sleep(0)  # Others have their turn between two entries.
        left = self._counted(count, for_ever, is_all=entries_count <= COUNTED_ENTRIES_MAX)
        events = events_range()
        if [rows async for rows in self._database.scan(events.start, events.end, limit=1)]:
            left.append("events that are not published yet")
        return left

    async def _entries(self, limit: int) -> AsyncIterator[tuple[int, bytes]]:
        """The log's first entries by their sequences, read a few at a time: one may have 16 MiB."""
        first = max(self._log.bounds.first_sequence, message_id(self._shard, 1))
        last = message_id(self._shard, MAX_SEQUENCE)
        while limit:
            rows_max = min(ROWS_MIN, limit)
            scan = self._database.scan(*log_range(first, last), limit=rows_max)
            rows = [(parse_log_key(key), value) async for some in scan for key, value in some]
            for row in rows:
                yield row
            if len(rows) < rows_max:
                return
            first = rows[-1][0] + 1
            limit -= rows_max

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

    async def _leave(self) -> None:
        self._publisher.put([(LEAVING_KEY, encode_leaving(self._clock.now_ms()))])
        self._is_certain = True
