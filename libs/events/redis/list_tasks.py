"""Tasks in Redis lists: each consumer moves the tasks that it takes into its own list.

A task is always in one list, so a crash between two commands loses nothing. A sorted set has the
consumers, by when each last showed that it is alive (ms, by the clock of Redis). A consumer is in
it before it takes a task, and the tasks of a silent one go back to the queue.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from redis import asyncio as aioredis
from redis import exceptions

from libs.events.redis.connection import FORGET_CONSUMER_MS, HOLD_MS, KEEP_S, RECLAIM_S
from libs.events.redis.dead_letters import DeadLetters
from libs.events.redis.delayed_tasks import READ_BYTES, DelayedTasks, TaskReading, pages
from libs.events.redis.transactions import BEGIN, Command
from libs.events.settings import RedisSettings

UNDO = """
if redis.call('LREM', KEYS[1], -1, ARGV[1]) == 1 then
    redis.call('LPUSH', KEYS[2], ARGV[1])
end
"""
"""Moves a task back to the head of the queue, unless it has been finished."""

_NOW = f"""{BEGIN}
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + time[2] / 1000
"""

SIGN = f"""{_NOW}
redis.call('ZADD', KEYS[1], now_ms - ARGV[2], ARGV[1])
"""
"""Shows that a consumer was alive, a while ago."""

TAKE = f"""{_NOW}
redis.call('ZADD', KEYS[3], 'NX', now_ms, ARGV[3])
local taken, size = {{}}, 0
while #taken < tonumber(ARGV[1]) and size < tonumber(ARGV[2]) do
    local task = redis.call('LMOVE', KEYS[1], KEYS[2], 'LEFT', 'RIGHT')
    if not task then break end
    taken[#taken + 1] = task
    size = size + #task
end
return taken
"""
"""Moves tasks from the head of the queue to a consumer, in order, as one write.

Adds the consumer first, which Redis may have lost with its data.
"""

RECLAIM = f"""{_NOW}
for _, name in ipairs(redis.call('ZREVRANGEBYSCORE', KEYS[1], now_ms - ARGV[2], '-inf')) do
    if name ~= ARGV[1] then
        local processing = KEYS[2] .. ':processing:' .. name
        while redis.call('LMOVE', processing, KEYS[2], 'RIGHT', 'LEFT') do end
    end
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms - ARGV[3])
"""
"""Moves the tasks of silent consumers back to the head of the queue; forgets those long silent.

The one that fell silent first has the oldest tasks, which go there last.
"""

COUNT = """
local count = redis.call('LLEN', KEYS[2])
for _, name in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
    count = count + redis.call('LLEN', KEYS[2] .. ':processing:' .. name)
end
return count
"""
"""How many tasks wait, or are a consumer's."""


async def processing_keys(client: Any, key: str) -> list[str]:
    """The lists of what consumers have taken from this one; asks for no more where none has."""
    return [_processing_of(key, name.decode()) for name in await _names(client, key)]


async def forget_consumers(client: Any, key: str) -> None:
    """Once none of their lists has tasks, and none takes any more."""
    if names := await _names(client, key):
        await client.zrem(_consumers_of(key), *names)


async def _names(client: Any, key: str) -> list[bytes]:
    consumers = _consumers_of(key)
    if await client.type(consumers) != b"zset":
        return []
    names: list[bytes] = await client.zrange(consumers, 0, -1)
    return names


def _consumers_of(key: str) -> str:
    return f"{key}:consumers"


def _processing_of(key: str, consumer: str) -> str:
    return f"{key}:processing:{consumer}"


class ListTasks(DelayedTasks[bytes]):
    """The tasks of one consumer."""

    APPEND_SCRIPT = "redis.call('RPUSH', KEYS[2], task)"

    def __init__(
        self,
        client: aioredis.Redis,
        settings: RedisSettings,
        consumer: str,
        dead: DeadLetters,
        reading: TaskReading,
    ) -> None:
        super().__init__(client, settings, dead, reading)
        self._consumer = consumer
        self._consumers = _consumers_of(self._key)
        self._processing = _processing_of(self._key, consumer)
        self._undo = self._client.register_script(UNDO)
        self._sign = self._client.register_script(SIGN)
        self._take = self._client.register_script(TAKE)
        self._reclaim = self._client.register_script(RECLAIM)
        self._count_all = self._client.register_script(COUNT)
        self._alive_at = 0.0
        self._reclaimed_at = 0.0
        self._is_to_take_over = reading.is_sole_consumer

    async def _prepare(self) -> None:
        """Check the type of the key; lists are created when they are written."""
        await self._client.lpos(self._key, "")

    def _append_command(self, encoded: bytes) -> Command:
        return "RPUSH", self._key, encoded

    async def _append_all(self, encoded: Sequence[bytes]) -> None:
        await self._client.rpush(self._key, *encoded)

    async def _show_alive(self) -> None:
        if time.monotonic() - self._alive_at >= KEEP_S:
            await self._sign(keys=[self._consumers], args=[self._consumer, 0])
            self._alive_at = time.monotonic()

    async def _take_over(self) -> None:
        if time.monotonic() - self._reclaimed_at >= RECLAIM_S:
            await self._recover()
            # Where it takes over: of all others, whatever the clock of Redis says.
            silent_ms = -math.inf if self._is_to_take_over else HOLD_MS
            await self._requeue_of_silent(silent_ms, spared=self._consumer)
            self._reclaimed_at = time.monotonic()
            self._is_to_take_over = False

    async def _read_some(self) -> None:
        await self._until_next_read()
        wait_ms = await self._promoted()
        keys, count = [self._key, self._processing], self._read_count
        found = await self._take(
            keys=[*keys, self._consumers], args=[count, READ_BYTES, self._consumer]
        )
        if not found:
            try:
                first = await self._client.blmove(*keys, wait_ms / 1000, "LEFT", "RIGHT")
            except exceptions.OutOfMemoryError:
                await asyncio.sleep(wait_ms / 1000)  # New tasks are refused, too.
            else:
                found = [] if first is None else [first]
        self._read.extend(found)
        sizes = [len(task) for task in found]
        self._note_read(sizes, is_all=len(sizes) < count and sum(sizes) < READ_BYTES)

    async def _recover(self) -> None:
        """Requeue tasks that were moved for this consumer by a command whose answer was lost."""
        held = Counter((*self._held, *self._read))
        if int(await self._client.llen(self._processing)) <= held.total():
            return
        moved = Counter(await self._client.lrange(self._processing, 0, -1))
        for encoded in reversed([*(moved - held).elements()]):  # each goes to the head
            await self._undo(keys=[self._processing, self._key], args=[encoded])

    def _encoded(self, delivery: bytes) -> bytes:
        return delivery

    def _finish_commands(self, deliveries: Sequence[bytes]) -> Sequence[Command]:
        return [("LREM", self._processing, 1, task) for task in deliveries]

    async def _all(self) -> AsyncGenerator[bytes, None]:
        for key in (*await processing_keys(self._client, self._key), self._key):
            async for task in pages(partial(self._client.lrange, key)):
                yield task

    async def _count(self) -> int:
        return int(await self._count_all(keys=[self._consumers, self._key]))

    async def _leave(self) -> None:
        """Move the tasks of this consumer back to the queue.

        It counts as silent: what a command that is under way still brings it goes back, too.
        """
        if self._alive_at:
            await self._sign(keys=[self._consumers], args=[self._consumer, HOLD_MS])
            await self._requeue_of_silent(HOLD_MS, spared="")

    async def _requeue_of_silent(self, silent_ms: float, spared: str) -> None:
        await self._reclaim(
            keys=[self._consumers, self._key], args=[spared, silent_ms, FORGET_CONSUMER_MS]
        )
