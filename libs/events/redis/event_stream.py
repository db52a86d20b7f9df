"""Events in a Redis stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from redis import asyncio as aioredis

from libs.events.deliveries import Handler, read_event, run_handler
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
    """Publishes to the stream, and delivers from it as one consumer of a group."""

    def __init__(
        self, client: aioredis.Redis, settings: RedisSettings, consumer: str, dead: DeadLetters
    ) -> None:
        self._client: Any = client
        self._settings = settings
        self._key = f"{settings.stream_prefix}:events"
        self._group = Group(client, self._key, settings.consumer_group, consumer)
        self._dead = dead
        self._add = StreamAppends(client, self._key, ["type", "data"])
        self._transactions = Transactions(client)
        self._firsts = self._client.register_script(FIRSTS)
        self._held: dict[str, _Held] = {}
        self._finished_count = 0

    async def publish(self, events: Sequence[Event]) -> None:
        await self._add.append([(event.type, encode_event(event)) for event in events])

    async def start(self, types: frozenset[str]) -> None:
        """Create the group: it gets every event that is published from now on."""
        await self._group.create("$")

    async def deliver(
        self, types: frozenset[str], handler: Handler, note_up: Callable[[], None]
    ) -> None:
        # What was read as a connection broke comes before all that is newer.
        async for lost in self._group.own({held.entry_id for held in self._held.values()}):
            await self._deliver_each(lost, types, handler)
        note_up()
        while True:
            await self._deliver_some(types, handler)
            note_up()

    async def _deliver_some(self, types: frozenset[str], handler: Handler) -> None:
        delay_ms = self._settings.retry_delay_ms
        deliveries = await self._group.reclaim_one(max(1, delay_ms))
        if not deliveries:
            block_ms = min(BLOCK_MS, delay_ms) if self._held else BLOCK_MS
            deliveries = await self._group.read(block_ms)
        await self._deliver_each(deliveries, types, handler)

    async def _deliver_each(
        self, deliveries: Sequence[Delivery], types: frozenset[str], handler: Handler
    ) -> None:
        waiting = {delivery.entry_id for delivery in deliveries}
        for delivery in deliveries:
            await self._group.keep(waiting)
            waiting.discard(delivery.entry_id)
            await self._deliver(delivery, types, handler, waiting)

    async def _deliver(
        self, delivery: Delivery, types: frozenset[str], handler: Handler, waiting: set[bytes]
    ) -> None:
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
                del self._held[event.id]
            return
        self._held[event.id] = _Held(delivery.entry_id, deliveries)

        async def keep() -> None:
            with translated():
                await self._group.keep({delivery.entry_id, *waiting})

        await run_handler(handler, event, keep)

    async def acknowledge(self, event_id: str) -> None:
        held = self._held.get(event_id)
        if held is None:
            return
        await self._finish(held.entry_id)
        if self._held.get(event_id) is held:  # else a copy of it was delivered meanwhile
            del self._held[event_id]

    async def stop(self) -> None:
        """Give what is not acknowledged to other consumers of the group."""
        await self._group.leave()

    async def _finish(self, entry_id: bytes) -> None:
        await self._client.xack(self._key, self._settings.consumer_group, entry_id)
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
