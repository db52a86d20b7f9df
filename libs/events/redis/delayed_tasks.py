"""What tasks in lists and tasks in a stream share: delayed ones, dead letters, when to read."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final, NamedTuple

from redis import asyncio as aioredis

from libs.events.redis.connection import BLOCK_MS, READ_COUNT
from libs.events.redis.dead_letters import DeadLetters, Pipeline
from libs.events.redis.gathered import Gathered
from libs.events.settings import RedisSettings
from libs.events.tasks import FailedTask, UnreadableTask, WriteTask, cut_error, encode_task
from libs.events.wall_clock import now_ms

log = logging.getLogger(__name__)

SOLE_READ_COUNT: Final = 64
"""How many tasks a sole consumer reads at once, fewer where they are large."""

READ_BYTES: Final = 2 << 20
"""What one read should bring at most; a task with a body of 512 KiB has some 700 KB."""

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


class TaskReading(NamedTuple):
    """How one consumer reads tasks; see `open_backend`."""

    is_sole_consumer: bool = False
    gather_s: float = 0.0

    @property
    def count_max(self) -> int:
        """Tasks of one read: consumers that share tasks take few, so that all get some."""
        return SOLE_READ_COUNT if self.is_sole_consumer else READ_COUNT


class DelayedTasks(ABC):
    """Tasks in some structure of Redis, of which failed ones wait in a sorted set of their own."""

    APPEND_SCRIPT: ClassVar[str]
    """Appends `task` to the structure KEYS[2], in Lua."""

    def __init__(
        self,
        client: aioredis.Redis,
        settings: RedisSettings,
        dead: DeadLetters,
        reading: TaskReading,
    ) -> None:
        self._client: Any = client
        self._settings = settings
        self._key = f"{settings.stream_prefix}:tasks"
        self._delayed = f"{self._key}:delayed"
        self._dead = dead
        self._reading = reading
        self._read_count = reading.count_max
        self._read_again_at = 0.0
        self._enqueues = Gathered(self._append_all)
        self._promote = self._client.register_script(PROMOTE.format(append=self.APPEND_SCRIPT))
        self._promote_at_ms = 0

    @abstractmethod
    def _append(self, pipeline: Pipeline, encoded: bytes) -> None:
        """Append a task as a part of a pipeline."""

    @abstractmethod
    async def _append_all(self, encoded: Sequence[bytes]) -> None:
        """Append tasks, in order, by one command."""

    @abstractmethod
    async def _count(self) -> int:
        """Tasks that are waiting or given out."""

    async def enqueue(self, task: WriteTask) -> None:
        """Append a task."""
        encoded = encode_task(task)
        await self._enqueues.execute(encoded, len(encoded))

    async def _until_next_read(self) -> None:
        await asyncio.sleep(max(0.0, self._read_again_at - time.monotonic()))

    def _note_read(self, sizes: Sequence[int], *, is_all: bool) -> None:
        """Settle when to read again, and how much; `is_all`: nothing more waited."""
        if not sizes:
            return
        self._read_again_at = time.monotonic() + self._reading.gather_s if is_all else 0.0
        fitting = READ_BYTES * len(sizes) // max(sum(sizes), 1)
        self._read_count = max(READ_COUNT, min(fitting, self._reading.count_max))

    def _bury_unreadable(self, pipeline: Pipeline, raw: bytes, error: Exception) -> None:
        why = cut_error(str(error))
        log.error("what is not a task goes to the dead letters: %s", why)
        self._dead.add_unreadable(pipeline, raw, why)

    async def _promoted(self) -> int:
        """Move what is due; how long to wait for a task then, in ms, at least 1."""
        if now_ms() >= self._promote_at_ms:
            due_at = await self._promote(keys=[self._delayed, self._key], args=[now_ms()])
            # What others put there meanwhile is seen a second later at most.
            next_ms = now_ms() + BLOCK_MS
            self._promote_at_ms = next_ms if due_at is None else min(next_ms, int(float(due_at)))
        return max(1, min(BLOCK_MS, self._promote_at_ms - now_ms()))

    def _set_aside(self, pipeline: Pipeline, task: WriteTask, error: str) -> None:
        """Put a task that failed behind its delay, or among the dead letters."""
        if task.has_retries_left:
            due_ms = now_ms() + self._settings.retry_delay_ms
            self._promote_at_ms = min(self._promote_at_ms, due_ms)
            pipeline.zadd(self._delayed, {encode_task(task.after_failure()): due_ms})
        else:
            self._dead.add_task(pipeline, task, error)

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
