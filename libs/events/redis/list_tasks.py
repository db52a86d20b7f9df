"""Tasks in Redis lists: each consumer moves what it takes into a list of its own.

A task is always in one list: a crash between two commands loses nothing. A consumer shows that it
is alive by a key with a lifetime; what a dead one has in its list goes back to the queue.
"""

from __future__ import annotations

import time
from typing import Any

from redis import asyncio as aioredis

from libs.events.redis.connection import BLOCK_MS, HOLD_MS, RECLAIM_S
from libs.events.redis.dead_letters import DeadLetters
from libs.events.settings import RedisSettings
from libs.events.tasks import FailedTask, WriteTask, decode_task, encode_task
from libs.events.wall_clock import now_ms

PROMOTE = """
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, 100)
for _, task in ipairs(due) do
    redis.call('ZREM', KEYS[1], task)
    redis.call('RPUSH', KEYS[2], task)
end
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
return first[2]
"""
"""Moves delayed tasks that are due into the list; returns when the next one is."""

_ALIVE_S = HOLD_MS / 1000 / 3


class ListTasks:
    """The tasks of one consumer."""

    def __init__(
        self, client: aioredis.Redis, settings: RedisSettings, consumer: str, dead: DeadLetters
    ) -> None:
        """Nothing is read or written yet."""
        self._client: Any = client
        self._settings = settings
        self._key = f"{settings.stream_prefix}:tasks"
        self._delayed = f"{self._key}:delayed"
        self._consumer = consumer
        self._processing = f"{self._key}:processing:{consumer}"
        self._dead = dead
        self._promote = self._client.register_script(PROMOTE)
        self._held: dict[str, bytes] = {}
        self._alive_at = 0.0
        self._reclaimed_at = 0.0

    async def connect(self) -> None:
        """Lists come into being when they are written."""
        await self._client.lpos(self._key, "")

    async def enqueue(self, task: WriteTask) -> None:
        """Append a task."""
        await self._client.rpush(self._key, encode_task(task))

    async def dequeue(self) -> WriteTask | None:
        """The next task that is due, or None when none comes within a second."""
        await self._show_alive()
        await self._reclaim()
        due_at = await self._promote(keys=[self._delayed, self._key], args=[now_ms()])
        wait_ms = BLOCK_MS if due_at is None else int(float(due_at)) - now_ms()
        encoded = await self._client.blmove(
            self._key, self._processing, max(1, min(BLOCK_MS, wait_ms)) / 1000, "LEFT", "RIGHT"
        )
        if encoded is None:
            return None
        task = decode_task(encoded)
        self._held[task.task_id] = encoded
        return task

    async def complete(self, task_id: str) -> None:
        """Remove a task."""
        encoded = self._held.pop(task_id, None)
        if encoded is not None:
            await self._client.lrem(self._processing, 1, encoded)

    async def fail(self, task_id: str, error: str) -> None:
        """Put a task behind its delay, or among the dead letters."""
        encoded = self._held.get(task_id)
        if encoded is None:
            return
        task = decode_task(encoded)
        async with self._client.pipeline(transaction=True) as pipeline:
            if task.has_retries_left:
                due_ms = now_ms() + self._settings.retry_delay_ms
                pipeline.zadd(self._delayed, {encode_task(task.after_failure()): due_ms})
            else:
                self._dead.add_task(pipeline, task.after_failure(), error)
            pipeline.lrem(self._processing, 1, encoded)
            await pipeline.execute()
        self._held.pop(task_id, None)

    async def retry_all(self) -> int:
        """Move every task among the dead letters back; returns how many."""
        return await self._dead.retry_tasks(self._retry)

    async def failed(self, limit: int) -> list[FailedTask]:
        """Tasks among the dead letters; they stay there."""
        return [dead_letter for _, dead_letter in await self._dead.tasks(limit)]

    async def counts(self) -> tuple[int, int]:
        """Tasks that are waiting, delayed or given out, and dead letters."""
        return await self._pending(), await self._dead.count()

    async def _retry(self, task: WriteTask, dead_letter: bytes) -> None:
        async with self._client.pipeline(transaction=True) as pipeline:
            pipeline.xdel(self._dead.key, dead_letter)
            pipeline.rpush(self._key, encode_task(task))
            await pipeline.execute()

    async def _pending(self) -> int:
        total = int(await self._client.llen(self._key)) + int(
            await self._client.zcard(self._delayed)
        )
        async for key in self._client.scan_iter(match=f"{self._key}:processing:*"):
            total += int(await self._client.llen(key))
        return total

    async def stop(self) -> None:
        """Give what was taken back to the queue."""
        await self._client.delete(self._alive_key(self._consumer))
        await self._give_back(self._processing)

    async def _show_alive(self) -> None:
        if time.monotonic() - self._alive_at >= _ALIVE_S:
            await self._client.set(self._alive_key(self._consumer), "1", px=HOLD_MS)
            self._alive_at = time.monotonic()

    async def _reclaim(self) -> None:
        if time.monotonic() - self._reclaimed_at < RECLAIM_S:
            return
        self._reclaimed_at = time.monotonic()
        async for key in self._client.scan_iter(match=f"{self._key}:processing:*"):
            consumer = key.decode().rpartition(":processing:")[2]
            if not await self._client.exists(self._alive_key(consumer)):
                await self._give_back(key)

    async def _give_back(self, processing: str | bytes) -> None:
        while await self._client.lmove(processing, self._key, "RIGHT", "LEFT") is not None:
            pass

    def _alive_key(self, consumer: str) -> str:
        return f"{self._key}:consumers:{consumer}"
