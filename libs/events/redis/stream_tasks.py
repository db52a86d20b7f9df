"""Tasks in a Redis stream with a consumer group."""

from __future__ import annotations

from collections import deque
from typing import Any

from redis import asyncio as aioredis

from libs.events.redis.connection import BLOCK_MS
from libs.events.redis.dead_letters import DeadLetters
from libs.events.redis.held import Delivery, Group
from libs.events.settings import RedisSettings
from libs.events.tasks import FailedTask, WriteTask, decode_task, encode_task
from libs.events.wall_clock import now_ms

PROMOTE = """
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, 100)
for _, task in ipairs(due) do
    redis.call('ZREM', KEYS[1], task)
    redis.call('XADD', KEYS[2], '*', 'task', task)
end
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
return first[2]
"""
"""Moves delayed tasks that are due into the stream; returns when the next one is."""


class StreamTasks:
    """The tasks of one consumer of a group."""

    def __init__(
        self, client: aioredis.Redis, settings: RedisSettings, consumer: str, dead: DeadLetters
    ) -> None:
        """Nothing is read or written yet."""
        self._client: Any = client
        self._settings = settings
        self._key = f"{settings.stream_prefix}:tasks"
        self._delayed = f"{self._key}:delayed"
        self._group = Group(client, self._key, settings.consumer_group, consumer)
        self._dead = dead
        self._promote = self._client.register_script(PROMOTE)
        self._read: deque[Delivery] = deque()
        self._held: dict[str, tuple[bytes, WriteTask]] = {}

    async def connect(self) -> None:
        """Create the group; it gets every task that is in the stream."""
        await self._group.create("0")

    async def enqueue(self, task: WriteTask) -> None:
        """Append a task."""
        await self._client.xadd(self._key, {"task": encode_task(task)})

    async def dequeue(self) -> WriteTask | None:
        """The next task that is due, or None when none comes within a second."""
        await self._group.keep(self._entry_ids())
        if not self._read:
            due_at = await self._promote(keys=[self._delayed, self._key], args=[now_ms()])
            block_ms = BLOCK_MS if due_at is None else int(float(due_at)) - now_ms()
            self._read.extend(await self._group.reclaim())
            if not self._read:
                self._read.extend(await self._group.read(max(1, min(BLOCK_MS, block_ms))))
        if not self._read:
            return None
        delivery = self._read.popleft()
        task = decode_task(delivery.fields[b"task"])
        self._held[task.task_id] = delivery.entry_id, task
        return task

    async def complete(self, task_id: str) -> None:
        """Remove a task."""
        held = self._held.pop(task_id, None)
        if held is not None:
            async with self._client.pipeline(transaction=True) as pipeline:
                self._group.finish(pipeline, held[0], remove=True)
                await pipeline.execute()

    async def fail(self, task_id: str, error: str) -> None:
        """Put a task behind its delay, or among the dead letters."""
        held = self._held.get(task_id)
        if held is None:
            return
        entry_id, task = held
        async with self._client.pipeline(transaction=True) as pipeline:
            if task.has_retries_left:
                due_ms = now_ms() + self._settings.retry_delay_ms
                pipeline.zadd(self._delayed, {encode_task(task.after_failure()): due_ms})
            else:
                self._dead.add_task(pipeline, task.after_failure(), error)
            self._group.finish(pipeline, entry_id, remove=True)
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
            pipeline.xadd(self._key, {"task": encode_task(task)})
            await pipeline.execute()

    async def _pending(self) -> int:
        return int(await self._client.xlen(self._key)) + int(
            await self._client.zcard(self._delayed)
        )

    async def stop(self) -> None:
        """Give what was read to other consumers at once."""
        await self._group.leave()

    def _entry_ids(self) -> set[bytes]:
        held = {entry_id for entry_id, _ in self._held.values()}
        return held | {delivery.entry_id for delivery in self._read}
