"""Queues that have arrived on another shard: their rows go once each ingest was asked since."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from libs.serving.peers.calls import Backoff
from libs.storage.errors import StorageError
from services.broker.moves.targets import PurgeEpochs
from services.broker.shard.owner import ShardOwner
from services.broker.shard.sweeper import Sweeper
from slatemq.errors import SlateMQError

log = logging.getLogger(__name__)

WAIT_MS_MAX: Final = 30_000


@dataclass(eq=False)
class ArrivedQueues:
    """Gives the rows to the sweeper, of all such queues in rounds.

    From the arrival to the deletion an ingest's purge epoch has to rise: one snapshot of the target
    from before the one, and one of this shard from after the other, would both lack the queue. Each
    raise costs the ingest a commit and every decision that a janitor has made, so an ingest is
    raised once for all queues that have arrived, and again only for others.
    """

    _owner: ShardOwner
    _sweeper: Sweeper
    _epochs: PurgeEpochs
    _raised: dict[str, set[int]] = field(default_factory=dict, init=False)
    """By queue, the ingests whose epoch has risen since it arrived; a restart raises them again."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def came(self) -> None:
        """One more has arrived."""
        self._wake.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        backoff = Backoff(WAIT_MS_MAX)
        while True:
            self._wake.clear()
            for queue_id, one in self._owner.shard.moves.departures.items():
                if one.has_arrived:
                    self._raised.setdefault(queue_id, set())
            if not self._raised:
                backoff.reset()
                await self._wake.wait()
                continue
            try:
                await self._round()
            except (SlateMQError, StorageError) as error:
                log.warning("queues that have left wait: %s", error)
            if self._raised:
                await asyncio.sleep(backoff.next_seconds())

    async def _round(self) -> None:
        """Raises the epochs where that is left to do, and forgets the queues that are done with."""
        arrived = dict(self._raised)
        ingests = await self._epochs.raise_all(list(arrived.values()))
        done = [queue_id for queue_id, raised in arrived.items() if ingests <= raised]
        for queue_id in done:
            await self._owner.run(partial(self._forget, queue_id))
        if done:
            await self._owner.durable()

    def _forget(self, queue_id: str, _: int) -> None:
        self._owner.shard.forget_departed(queue_id)
        self._sweeper.deleted(queue_id)
        del self._raised[queue_id]
