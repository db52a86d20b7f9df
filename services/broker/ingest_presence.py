"""Which ingests cannot be asked for payloads now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set

from libs.storage.ids import MAX_SEQUENCE, message_id, shard_of
from services.broker.payloads import Payloads

AWAY_MS = 200
"""How often an ingest that could not be asked is asked again."""


class IngestPresence:
    """Ingests that were found away are left alone by all but a probe, until they answer it."""

    def __init__(self, payloads: Payloads, on_back: Callable[[], None]) -> None:
        """Probe through this, and tell when an ingest is back."""
        self._payloads = payloads
        self._on_back = on_back
        self._probes: dict[int, asyncio.Task[None]] = {}

    @property
    def can_give_all(self) -> bool:
        """Whether every ingest may be asked."""
        return not self._probes

    def can_give(self, message_id: int) -> bool:
        """Whether this message's ingest may be asked."""
        return not self._probes or shard_of(message_id) not in self._probes

    def found_away(self, shards: Set[int]) -> None:
        """Notes that these did not answer."""
        for shard in shards - self._probes.keys():
            self._probes[shard] = asyncio.create_task(self._probe(shard))

    async def close(self) -> None:
        """Ends the probes."""
        probes = list(self._probes.values())
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    async def _probe(self, shard: int) -> None:
        # No ingest has this message: so none says more than that it is there.
        never = message_id(shard, MAX_SEQUENCE)
        try:
            is_away = True
            while is_away:
                await asyncio.sleep(AWAY_MS / 1000)
                is_away = shard in (await self._payloads.fetch([never])).away
        finally:
            del self._probes[shard]
            self._on_back()
