"""What tasks in lists and tasks in a stream share: the delayed ones, and the dead letters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from redis import asyncio as aioredis

from libs.events.redis.connection import BLOCK_MS
from libs.events.redis.dead_letters import DeadLetters, Pipeline
from libs.events.redis.gathered import GatheredCommands
from libs.events.settings import RedisSettings
from libs.events.tasks import FailedTask, UnreadableTask, WriteTask, encode_task
from libs.events.wall_clock import now_ms

PROMOTE = """
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, 100)
for _, task in ipairs(due) do
    redis.call('ZREM', KEYS[1], task)
    {append}
end
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
return first[2]
"""
"""Moves delayed tasks that are due to the others; returns when the next one is."""


class DelayedTasks(ABC):
    """Tasks in some structure of Redis, of which failed ones wait in a sorted set of their own."""

    APPEND_SCRIPT: ClassVar[str]
    """Appends `task` to the structure KEYS[2], in Lua."""

    def __init__(self, client: aioredis.Redis, settings: RedisSettings, dead: DeadLetters) -> None:
        """Nothing is read or written yet."""
        self._client: Any = client
        self._settings = settings
        self._key = f"{settings.stream_prefix}:tasks"
        self._delayed = f"{self._key}:delayed"
        self._dead = dead
        self._enqueues = GatheredCommands(client, transaction=False)
        self._completions = GatheredCommands(client, transaction=True)
        self._promote = self._client.register_script(PROMOTE.format(append=self.APPEND_SCRIPT))
        self._promote_at_ms = 0

    @abstractmethod
    def _append(self, pipeline: Pipeline, encoded: bytes) -> None:
        """Append a task as a part of a pipeline."""

    @abstractmethod
    async def _count(self) -> int:
        """Tasks that are waiting or given out."""

    async def enqueue(self, task: WriteTask) -> None:
        """Append a task."""
        encoded = encode_task(task)
        await self._enqueues.execute(lambda pipeline: self._append(pipeline, encoded), len(encoded))

    async def _promoted(self) -> int:
        """Move what is due; how long to wait for a task then, in ms, at least 1."""
        if now_ms() >= self._promote_at_ms:
            due_at = await self._promote(keys=[self._delayed, self._key], args=[now_ms()])
            # What others put there meanwhile is seen a second later at most.
            next_ms = now_ms() + BLOCK_MS
            self._promote_at_ms = next_ms if due_at is None else min(next_ms, int(float(due_at)))
        return max(1, min(BLOCK_MS, self._promote_at_ms - now_ms()))

    def _put_aside(self, pipeline: Pipeline, task: WriteTask, error: str) -> None:
        """Put a task that failed behind its delay, or among the dead letters."""
        if task.has_retries_left:
            due_ms = now_ms() + self._settings.retry_delay_ms
            self._promote_at_ms = min(self._promote_at_ms, due_ms)
            pipeline.zadd(self._delayed, {encode_task(task.after_failure()): due_ms})
        else:
            self._dead.add_task(pipeline, task.after_failure(), error)

    async def retry_all(self) -> int:
        """Move every task among the dead letters back; returns how many."""
        return await self._dead.retry_tasks(self._retry)

    async def _retry(self, task: WriteTask, dead_letter: bytes) -> None:
        async with self._client.pipeline(transaction=True) as pipeline:
            pipeline.xdel(self._dead.key, dead_letter)
            self._append(pipeline, encode_task(task))
            await pipeline.execute()

    async def failed(self, limit: int) -> list[FailedTask | UnreadableTask]:
        """Tasks among the dead letters, and what is none; they stay there."""
        return await self._dead.tasks(limit)

    async def counts(self) -> tuple[int, int]:
        """Tasks that are waiting, delayed or given out, and dead letters."""
        delayed = int(await self._client.zcard(self._delayed))
        return await self._count() + delayed, await self._dead.count()
