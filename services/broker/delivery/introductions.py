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
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from services.broker.delivery.message_cache import Ingests
from services.broker.shard.owner import ShardOwner
from slatemq._cancelling import end_all
from slatemq.errors import Unavailable

log = logging.getLogger(__name__)

WAIT_S: Final = 2.0
"""How long a call that has nothing else to do waits for ingests that it is the first to ask."""


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
        """The logs, of these, whose ingests know of this shard; the others are asked.

        Waits only where none of them is known, and some were not asked before, for the first.
        """
        logs = set(logs)
        new = {
            self._ask(one) for one in logs if not self._is_known(one) and one not in self._asking
        }
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while new and not any(map(self._is_known, logs)):
                    _, new = await asyncio.wait(new, return_when=asyncio.FIRST_COMPLETED)
        return set(filter(self._is_known, logs))

    async def close(self) -> None:
        await end_all(self._asking.values())

    def _is_known(self, ingest_shard: int) -> bool:
        return ingest_shard in self._known or ingest_shard in self._owner.shard.cursors

    def _ask(self, ingest_shard: int) -> asyncio.Task[None]:
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
