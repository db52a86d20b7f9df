"""Tasks in Redis lists: each consumer moves the tasks that it takes into its own list.

A task is always in one list, so a crash between two commands loses nothing. A consumer shows that
it is alive by a key that expires; the tasks in the list of a dead one go back to the queue.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from redis import asyncio as aioredis

from libs.events.redis.connection import HOLD_MS, RECLAIM_S
from libs.events.redis.dead_letters import DeadLetters, Pipeline
from libs.events.redis.delayed_tasks import READ_BYTES, DelayedTasks, TaskReading, pages
from libs.events.settings import RedisSettings

_ALIVE_S = HOLD_MS / 1000 / 3

UNDO = """
if redis.call('LREM', KEYS[1], -1, ARGV[1]) == 1 then
    redis.call('LPUSH', KEYS[2], ARGV[1])
end
"""
"""Moves a task back to the head of the queue, unless it has been finished."""

TAKE = """
local taken, size = {}, 0
while #taken < tonumber(ARGV[1]) and size < tonumber(ARGV[2]) do
    local task = redis.call('LMOVE', KEYS[1], KEYS[2], 'LEFT', 'RIGHT')
    if not task then break end
    taken[#taken + 1] = task
    size = size + #task
end
return taken
"""
"""Moves tasks from the head of the queue to a consumer, in order, as one write."""


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
        self._processing = f"{self._key}:processing:{consumer}"
        self._undo = self._client.register_script(UNDO)
        self._take = self._client.register_script(TAKE)
        self._alive_at = 0.0
        self._reclaimed_at = 0.0
        self._is_to_take_over = reading.is_sole_consumer

    async def connect(self) -> None:
        """Check the type of the key; lists are created when they are written."""
        await self._client.lpos(self._key, "")

    def _append(self, pipeline: Pipeline, encoded: bytes) -> None:
        pipeline.rpush(self._key, encoded)

    async def _append_all(self, encoded: Sequence[bytes]) -> None:
        await self._client.rpush(self._key, *encoded)

    async def _keep(self) -> None:
        if time.monotonic() - self._alive_at >= _ALIVE_S:
            await self._client.set(self._alive_key(self._consumer), "1", px=HOLD_MS)
            self._alive_at = time.monotonic()
        await self._reclaim()

    async def _read_some(self) -> None:
        await self._until_next_read()
        wait_ms = await self._promoted()
        keys, count = [self._key, self._processing], self._read_count
        found = await self._take(keys=keys, args=[count, READ_BYTES])
        if not found:
            first = await self._client.blmove(*keys, wait_ms / 1000, "LEFT", "RIGHT")
            found = [] if first is None else [first]
        self._read.extend(found)
        sizes = [len(task) for task in found]
        self._note_read(sizes, is_all=len(sizes) < count and sum(sizes) < READ_BYTES)

    def _encoded(self, delivery: bytes) -> bytes:
        return delivery

    def _finish(self, pipeline: Pipeline, deliveries: Sequence[bytes]) -> None:
        for task in deliveries:
            pipeline.lrem(self._processing, 1, task)

    async def _all(self) -> AsyncGenerator[bytes, None]:
        processing = [
            key async for key in self._client.scan_iter(match=f"{self._key}:processing:*")
        ]
        for key in (*processing, self._key):
            async for task in pages(partial(self._client.lrange, key)):
                yield task

    async def _count(self) -> int:
        total = int(await self._client.llen(self._key))
        async for key in self._client.scan_iter(match=f"{self._key}:processing:*"):
            total += int(await self._client.llen(key))
        return total

    async def stop(self) -> None:
        """Move the tasks of this consumer back to the queue."""
        await self._client.delete(self._alive_key(self._consumer))
        await self._requeue(self._processing)

    async def _reclaim(self) -> None:
        if time.monotonic() - self._reclaimed_at < RECLAIM_S:
            return
        self._reclaimed_at = time.monotonic()
        await self._requeue_unheard()
        async for key in self._client.scan_iter(match=f"{self._key}:processing:*"):
            consumer = key.decode().rpartition(":processing:")[2]
            is_gone = self._is_to_take_over and consumer != self._consumer
            if is_gone or not await self._client.exists(self._alive_key(consumer)):
                await self._requeue(key)
        self._is_to_take_over = False

    async def _requeue_unheard(self) -> None:
        """Requeue tasks that were moved for this consumer by a command whose answer was lost."""
        held = Counter((*self._held, *self._read))
        if int(await self._client.llen(self._processing)) <= held.total():
            return
        moved = Counter(await self._client.lrange(self._processing, 0, -1))
        for encoded in reversed([*(moved - held).elements()]):  # each goes to the head
            await self._undo(keys=[self._processing, self._key], args=[encoded])

    async def _requeue(self, processing: str | bytes) -> None:
        while await self._client.lmove(processing, self._key, "RIGHT", "LEFT") is not None:
            pass

    def _alive_key(self, consumer: str) -> str:
        return f"{self._key}:consumers:{consumer}"
