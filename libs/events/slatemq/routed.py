"""Which published tasks are not in their queue yet: the routers bring them there."""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right, insort
from collections.abc import Collection, Mapping
from typing import Final

import slatemq

log = logging.getLogger(__name__)

SEQUENCE_BITS: Final = 48
"""Of a message ID; those above are the ingest shard."""

Reached = Mapping[tuple[int, int], int]
"""By ingest shard and broker shard, the last message whose way is decided."""


class Unrouted:
    """The messages that one process has published, as far as they are not known to be routed."""

    def __init__(self, client: slatemq.Client, *, knows_earlier: bool) -> None:
        """`knows_earlier`: nothing is of interest that was published before."""
        self._client = client
        self._knows_earlier = knows_earlier
        self._waiting: dict[int, array[int]] = {}
        self._may_see = True

    def note(self, message_id: int) -> None:
        """Notes a message that was published now."""
        if self._may_see:
            shard = message_id >> SEQUENCE_BITS
            insort(self._waiting.setdefault(shard, array("q")), message_id)

    async def look(self) -> Reached:
        """How far the routers are, where that is of interest; to be asked before the queue is."""
        if not self._may_see or (self._knows_earlier and not self._waiting):
            return {}
        status = await self._client.status(settings=False, queues=False)
        if status.refusals:
            log.info("tasks that are not routed are not counted: %s", status.refusals[0])
            self._may_see = False
            self._waiting.clear()
            return {}
        there = {one.shard for one in status.services if one.service == "ingest"}
        for shard in self._waiting.keys() - there:
            del self._waiting[shard]  # It was removed, and so all of its log is routed.
        if not self._knows_earlier and status.routes:
            for route in status.routes:
                self.note(route.durable_sequence)
            self._knows_earlier = True
        return {(one.ingest_shard, one.broker_shard): one.cursor for one in status.routes}

    def count(self, reached: Reached, broker_shards: Collection[int]) -> int:
        """How many are perhaps not in the queue that is on these broker shards.

        What was published by an earlier process counts as one message for each ingest shard, and
        for one as long as no router has answered.
        """
        for shard, waiting in [*self._waiting.items()]:
            ends = [reached.get((shard, broker), 0) for broker in broker_shards]
            del waiting[: bisect_right(waiting, min(ends, default=0))]
            if not waiting:
                del self._waiting[shard]
        count = sum(map(len, self._waiting.values()))
        return count if self._knows_earlier or not self._may_see else max(count, 1)
