"""Before a log's first message comes to a broker shard, its ingest raises its purge epoch.

What was decided before that knew nothing of this shard: a message that its queues are about to get
might be purged under them. Decisions made later know of it, since it has announced itself before.
So nothing is asked when a queue is created, and an ingest that does not answer holds up nothing but
its own log, of which nothing comes anyway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Final

from services.broker.delivery.message_cache import Ingests
from services.broker.shard.owner import ShardOwner
from slatemq.errors import Unavailable

log = logging.getLogger(__name__)

WAIT_S: Final = 2.0
"""How long the other logs of a call wait for one whose ingest is slow to answer."""


@dataclass(eq=False)
class Introductions:
    """Which logs a broker shard may take messages from.

    The routing cursor of a log, which goes with the first of its ranges, says so durably. A shard
    that ends before that asks again, which does no harm.
    """

    _owner: ShardOwner
    _ingests: Ingests
    _known: set[int] = field(default_factory=set, init=False)
    _asking: dict[int, asyncio.Task[None]] = field(default_factory=dict, init=False)

    async def known(self, logs: Iterable[int]) -> Set[int]:
        """The logs, of these, whose ingests know of this shard by now."""
        logs = set(logs)
        unknown = {one for one in logs if not self._is_known(one)}
        if unknown:
            await asyncio.wait([self._ask(one) for one in unknown], timeout=WAIT_S)
        return {one for one in logs if self._is_known(one)}

    async def close(self) -> None:
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    def _is_known(self, ingest_shard: int) -> bool:
        return ingest_shard in self._known or ingest_shard in self._owner.shard.cursors

    def _ask(self, ingest_shard: int) -> asyncio.Task[None]:
        task = self._asking.get(ingest_shard)
        if task is None:
            task = self._asking[ingest_shard] = asyncio.create_task(self._introduce(ingest_shard))
        return task

    async def _introduce(self, ingest_shard: int) -> None:
        try:
            await self._ingests.raise_purge_epoch(ingest_shard)
            self._known.add(ingest_shard)
        except Unavailable as error:
            log.warning("messages of ingest %d wait for it: %s", ingest_shard, error.message)
        finally:
            del self._asking[ingest_shard]
