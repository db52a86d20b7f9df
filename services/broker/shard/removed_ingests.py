"""What a broker shard has of the logs of ingest shards that were removed is removed, too.

An ingest shard is removed once its log has no messages. So its cursor and the replays of its log
say nothing any more; they would hold up a queue that moves, and replays would never end.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Final

from libs.serving.peers.topology import TopologyDirectory
from libs.storage.errors import StorageError
from services.broker.shard.owner import ShardOwner

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""How often the topology that is known is compared: whatever is done reads it again."""

AGE_MS_MAX: Final = 600_000
"""How old it may be while nothing is done: a store is paid by the request."""


@dataclass(eq=False)
class RemovedIngests:
    _owner: ShardOwner
    _directory: TopologyDirectory

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                await self.look()
            except StorageError as error:
                log.info("cannot look for removed ingest shards: %s", error)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Forget the logs of ingest shards that were removed. Raises StoreUnavailable."""
        shard = self._owner.shard
        known = (await self._directory.read(AGE_MS_MAX)).ingests
        for ingest in sorted((shard.cursors.keys() | shard.replays.logs) - known.keys()):
            # An entry may also be damaged, or gone by mistake.
            if await self._directory.is_removed("ingest", ingest):
                await self._owner.run_alone(partial(self._forget, ingest))
                log.info("ingest shard %d was removed: its log is forgotten", ingest)

    def _forget(self, ingest_shard: int, _: int) -> None:
        self._owner.shard.forget_log(ingest_shard)
