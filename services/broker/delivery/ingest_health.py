"""Which messages cannot be had now: their ingest does not answer, or still reads their payload."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set

from libs.storage.layout.ids import shard_of
from services.broker.delivery.message_cache import Payloads

PROBE_MS = 200
"""How often an ingest that could not be asked is asked again."""

SLOW_AT_ONCE = 4
"""Slow messages of one ingest that are asked for at once, by the time that they became slow: each
answer is as large as its message, and the ingest reads only so many bytes at once."""

ASKS_A_TURN = 20
"""How often one of these is asked for before others have their turn: a minute or so."""


class IngestHealth:
    """Which ingests are down: only a probe asks them, until they answer it.

    The same holds for single messages whose payloads take long to read: others overtake them.
    """

    def __init__(self, payloads: Payloads, on_back: Callable[[], None]) -> None:
        """Probe by `payloads`; call `on_back` when an ingest or a message is available again."""
        self._payloads = payloads
        self._on_back = on_back
        self._probes: dict[int, asyncio.Task[None]] = {}
        self._slow: dict[int, asyncio.Task[None]] = {}
        self._turns: dict[int, asyncio.Semaphore] = {}  # by ingest

    @property
    def can_serve_all(self) -> bool:
        return not self._probes and not self._slow

    def can_serve(self, message_id: int) -> bool:
        if self._slow and message_id in self._slow:
            return False
        return not self._probes or shard_of(message_id) not in self._probes

    def mark_down(self, shards: Set[int]) -> None:
        for shard in shards - self._probes.keys():
            self._probes[shard] = asyncio.create_task(self._probe(shard))

    def mark_slow(self, message_ids: Set[int]) -> None:
        """Notes that the payloads of these are still being read."""
        for message_id in message_ids - self._slow.keys():
            self._slow[message_id] = asyncio.create_task(self._wait_for(message_id))

    async def close(self) -> None:
        probes = [*self._probes.values(), *self._slow.values()]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    async def _probe(self, shard: int) -> None:
        try:
            is_down = True
            while is_down:
                await asyncio.sleep(PROBE_MS / 1000)
                is_down = not await self._payloads.reaches(shard)
        finally:
            del self._probes[shard]
            self._on_back()

    async def _wait_for(self, message_id: int) -> None:
        turn = self._turns.setdefault(shard_of(message_id), asyncio.Semaphore(SLOW_AT_ONCE))
        try:
            is_slow = True
            while is_slow:
                await asyncio.sleep(PROBE_MS / 1000)
                async with turn:
                    is_slow = await self._is_slow_for_a_turn(message_id)
        finally:
            del self._slow[message_id]
            self._on_back()

    async def _is_slow_for_a_turn(self, message_id: int) -> bool:
        for asks in range(1, ASKS_A_TURN + 1):
            fetched = await self._payloads.fetch([message_id])
            if not fetched.slow and not fetched.down:
                return False
            if asks < ASKS_A_TURN:
                await asyncio.sleep(PROBE_MS / 1000)
        return True
