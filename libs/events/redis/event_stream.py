"""Events in a Redis stream."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from redis import asyncio as aioredis

from libs.events.deliveries import Handler, group_of, read_event, run_handler
from libs.events.redis.connection import BLOCK_MS, translated
from libs.events.redis.dead_letters import DeadLetters
from libs.events.redis.streams import Delivery, Group, StreamAppends
from libs.events.redis.transactions import Transactions
from libs.events.settings import RedisSettings
from slatemq.events.envelope import Event, encode_event

TRIM_AFTER = 1_000
"""Acknowledged events after which a consumer removes what every group has finished."""

FIRSTS = """
local firsts = {}
if redis.call('EXISTS', KEYS[1]) == 1 then
    for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
        local name, last_delivered = group[2], group[8]
        firsts[#firsts + 1] = redis.call('XPENDING', KEYS[1], name)[2] or last_delivered
    end
end
return firsts
"""
"""The entry of each group before which it has finished all.

One script: groups acknowledge, and are removed, between two commands.
"""


class _Held(NamedTuple):
    """An event that a handler has got and not acknowledged, and how often it has got it."""

    entry_id: bytes
    deliveries: int


class EventStream:
    """Publishes to the stream, and delivers from it as one consumer of a group.

    Events wait for their next attempt here. In Redis they look like those that are being delivered,
    so that no other consumer takes them while this one is alive.
    """

    def __init__(
        self, client: aioredis.Redis, settings: RedisSettings, consumer: str, dead: DeadLetters
    ) -> None:
        self._client: Any = client
        self._settings = settings
        self._key = f"{settings.stream_prefix}:events"
        self._consumer = consumer
        self._group = self._group_of(frozenset())
        self._dead = dead
        self._add = StreamAppends(client, self._key, ["type", "data"])
        self._transactions = Transactions(client)
        self._firsts = self._client.register_script(FIRSTS)
        self._held: dict[str, _Held] = {}
        self._delivering: set[bytes] = set()
        self._due_at: dict[bytes, float] = {}  # of entries that wait for their next attempt
        self._finished_count = 0

    async def publish(self, events: Sequence[Event]) -> None:
        await self._add.append([(event.type, encode_event(event)) for event in events])

    def _group_of(self, types: frozenset[str]) -> Group:
        name = group_of(self._settings.consumer_group, types)
        return Group(self._client, self._key, name, self._consumer)

    async def start(self, types: frozenset[str]) -> None:
        """Create the group: it gets every event that is published from now on."""
        self._group = self._group_of(types)
        await self._group.create("$")

    async def deliver(
        self, types: frozenset[str], handler: Handler, note_up: Callable[[], None]
    ) -> None:
        # What was read as a connection broke comes before all that is newer.
        async for lost in self._group.own(self._due_at):
            await self._deliver_each(lost, types, handler)
        note_up()
        while True:
            await self._deliver_some(types, handler)
            note_up()

    async def _deliver_some(self, types: frozenset[str], handler: Handler) -> None:
        await self._keep()
        deliveries = await self._take_due() or await self._group.reclaim_one()
        if not deliveries:
            deliveries = await self._group.read(self._block_ms())
        await self._deliver_each(deliveries, types, handler)

    async def _take_due(self) -> list[Delivery]:
        """The event whose next attempt is due first, if it is due."""
        while self._due_at:
            entry_id, due_at = next(iter(self._due_at.items()))  # all have the same delay
            if due_at > time.monotonic():
                break
            del self._due_at[entry_id]  # if the claim fails, it is among those that were lost
            if found := await self._group.claim_again(entry_id):
                return found
            self._let_go({entry_id})
        return []

    def _block_ms(self) -> int:
        """How long to wait for a new event: until another attempt is due."""
        due_at = next(iter(self._due_at.values()), math.inf)
        return math.ceil(min(BLOCK_MS, (due_at - time.monotonic()) * 1000))

    async def _keep(self) -> None:
        """Now and then show that this consumer still has what it delivers, or will again."""
        if self._group.is_keep_due:
            shown = {*self._delivering, *self._due_at}
            self._let_go(shown - await self._group.keep(shown))

    def _let_go(self, entry_ids: Set[bytes]) -> None:
        """Hold entries no more: another consumer has them, or they are acknowledged.

        The answer of that acknowledgement may have been lost.
        """
        for entry_id in entry_ids:
            self._delivering.discard(entry_id)
            self._due_at.pop(entry_id, None)
        for event_id, held in [*self._held.items()]:
            if held.entry_id in entry_ids:
                del self._held[event_id]

    async def _deliver_each(
        self, deliveries: Sequence[Delivery], types: frozenset[str], handler: Handler
    ) -> None:
        self._delivering = {delivery.entry_id for delivery in deliveries}
        for delivery in deliveries:
            await self._keep()
            if delivery.entry_id not in self._delivering:
                continue
            await self._deliver(delivery, types, handler)
            self._delivering.discard(delivery.entry_id)

    async def _deliver(self, delivery: Delivery, types: frozenset[str], handler: Handler) -> None:
        self._due_at.pop(delivery.entry_id, None)
        if not is_of(types, delivery.fields):
            await self._finish(delivery.entry_id)
            return
        encoded = delivery.fields.get(b"data", b"")
        event = read_event(self._key, encoded)
        if isinstance(event, str):
            await self._bury(delivery.entry_id, encoded, delivery.deliveries - 1)
            return
        deliveries = delivery.deliveries
        held = self._held.get(event.id)
        if held is not None and held.entry_id != delivery.entry_id:
            held = None  # It is of another entry: the event was published twice.
        if held is not None:
            deliveries = max(deliveries, held.deliveries + 1)
        if deliveries > self._settings.max_retries + 1:
            await self._bury(delivery.entry_id, encoded, deliveries - 1)
            if held is not None:
                self._held.pop(event.id, None)  # perhaps it was acknowledged meanwhile
            return
        held = self._held[event.id] = _Held(delivery.entry_id, deliveries)

        async def keep() -> None:
            with translated():
                await self._keep()

        try:
            await run_handler(handler, event, keep)
        finally:
            if self._held.get(event.id) is held:
                delay_s = self._settings.retry_delay_ms / 1000
                self._due_at[delivery.entry_id] = time.monotonic() + delay_s

    async def acknowledge(self, event_id: str) -> None:
        held = self._held.get(event_id)
        if held is None:
            return
        await self._finish(held.entry_id)
        self._due_at.pop(held.entry_id, None)
        if self._held.get(event_id) is held:  # else a copy of it was delivered meanwhile
            del self._held[event_id]

    async def stop(self) -> None:
        """Give what is not acknowledged to other consumers of the group."""
        await self._group.leave()

    async def _finish(self, entry_id: bytes) -> None:
        await self._group.acknowledge(entry_id)
        self._finished_count += 1
        if self._finished_count % TRIM_AFTER == 0:
            await self._trim()

    async def _bury(self, entry_id: bytes, encoded: bytes, deliveries: int) -> None:
        commands = [
            self._dead.event_command(encoded, deliveries),
            *self._group.finish_commands(entry_id, remove=False),
        ]
        await self._transactions.execute(self._key, commands)

    async def _trim(self) -> None:
        """Remove what every group has finished; new groups begin at the end anyway."""
        firsts = await self._firsts(keys=[self._key])
        if firsts:
            await self._client.xtrim(self._key, minid=min(firsts, key=_order), approximate=False)


def is_of(types: frozenset[str], fields: Mapping[bytes, bytes]) -> bool:
    """Whether the fields of an entry say that it is an event of these types; none: of any."""
    return not types or fields.get(b"type", b"").decode(errors="replace") in types


def _order(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.decode().partition("-")
    return int(milliseconds), int(sequence or 0)
