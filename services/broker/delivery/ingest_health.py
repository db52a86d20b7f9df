"""Which messages cannot be had now: their ingest does not answer, or still reads their payload."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Set
from contextvars import Context
from functools import partial

from libs.storage.layout.ids import shard_of
from services.broker.delivery.message_cache import Fetch, Payloads
from slatemq._cancelling import end_all

PROBE_MS = 200
"""How often an ingest that could not be asked is asked again."""

SILENT_S = 1.0
"""Claims that would not wait do wait for an ingest that is late, unless it was down for so long."""

SLOW_AT_ONCE = 4
"""Slow messages of one ingest that are asked for at once, by the time that they became slow: each
answer is as large as its message, and the ingest reads only so many bytes at once."""

ASKS_A_TURN = 20
"""How often one of these is asked for before others have their turn: a minute or so."""


class IngestHealth:
    """Which ingests are down: only a probe asks them, until they answer it.

    The same holds for single messages whose payloads take long to read: others overtake them. Both
    are asked for in no claim's trace, since they may outlast any.
    """

    def __init__(self, payloads: Payloads, on_back: Callable[[int], None]) -> None:
        """Probe by `payloads`; call `on_back` when an ingest, or a message of it, is back."""
        self._payloads = payloads
        self._on_back = on_back
        self._probes: dict[int, asyncio.Task[None]] = {}
        self._down_since_s: dict[int, float] = {}
        self._late: set[int] = set()  # of those that are probed: no call to them has failed
        self._slow: dict[int, asyncio.Task[None]] = {}
        self._turns: dict[int, asyncio.Semaphore] = {}  # by ingest

    @property
    def can_serve_all(self) -> bool:
        return not self._probes and not self._slow

    def cause(self, message_id: int) -> int | None:
        """Why a message cannot be had now: its ingest's shard, or minus its ID; None: it can."""
        if self._probes and (shard := shard_of(message_id)) in self._probes:
            return shard
        return -message_id if self._slow and message_id in self._slow else None

    def holds(self, cause: int) -> bool:
        """Whether this is still the cause of messages that cannot be had."""
        return cause in self._probes or -cause in self._slow

    def is_silent(self, shard: int) -> bool:
        """Whether an ingest has been down for a while."""
        since_s = self._down_since_s.get(shard)
        return since_s is not None and asyncio.get_running_loop().time() - since_s >= SILENT_S

    def may_be_up(self, shard: int) -> bool:
        """Whether an ingest counts as down only because it is late, and not for a while yet."""
        return shard in self._late and not self.is_silent(shard)

    def mark_down(self, shards: Set[int]) -> None:
        self._late -= shards
        for shard in shards:
            self._pass_over(shard, partial(asyncio.sleep, PROBE_MS / 1000))

    def mark_late(self, fetch: Fetch, *, until_done: bool) -> None:
        """Notes that an ingest does not answer a fetch: it may be down, or busy with that alone.

        It counts as down until it answers a probe, or, `until_done`, not before the fetch ends.
        """
        if fetch.shard not in self._probes:
            self._late.add(fetch.shard)
        wait = partial(asyncio.wait, [fetch.task]) if until_done else partial(asyncio.sleep, 0)
        self._pass_over(fetch.shard, wait)

    def _pass_over(self, shard: int, wait: Callable[[], Awaitable[object]]) -> None:
        if shard not in self._probes:
            self._down_since_s[shard] = asyncio.get_running_loop().time()
            probing = self._probe(shard, wait)
            self._probes[shard] = asyncio.create_task(probing, context=Context())

    def mark_slow(self, message_ids: Set[int]) -> None:
        """Notes that the payloads of these are still being read."""
        for message_id in message_ids - self._slow.keys():
            waiting = self._wait_for(message_id)
            self._slow[message_id] = asyncio.create_task(waiting, context=Context())

    async def close(self) -> None:
        await end_all([*self._probes.values(), *self._slow.values()])

    async def _probe(self, shard: int, wait: Callable[[], Awaitable[object]]) -> None:
        """Asks an ingest until it answers, first after a wait."""
        try:
            await wait()
            is_down = True
            while is_down:
                is_down = not await self._payloads.reaches(shard)
                if is_down:
                    self._late.discard(shard)
                await asyncio.sleep(PROBE_MS / 1000 if is_down else 0)
        finally:
            del self._probes[shard], self._down_since_s[shard]
            self._late.discard(shard)
            self._on_back(shard)

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
            self._on_back(shard_of(message_id))

    async def _is_slow_for_a_turn(self, message_id: int) -> bool:
        for asks in range(1, ASKS_A_TURN + 1):
            fetched = await self._payloads.fetch([message_id])
            if not fetched.slow and not fetched.down:
                return False
            if asks < ASKS_A_TURN:
                await asyncio.sleep(PROBE_MS / 1000)
        return True
