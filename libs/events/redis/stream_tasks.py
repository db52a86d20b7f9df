"""Tasks in a Redis stream with a consumer group."""

from __future__ import annotations

import logging
from collections import deque

from redis import asyncio as aioredis

from libs.events.held_tasks import HeldTasks
from libs.events.redis.consumer_group import Delivery, Group
from libs.events.redis.dead_letters import DeadLetters, Pipeline
from libs.events.redis.delayed_tasks import DelayedTasks
from libs.events.settings import RedisSettings
from libs.events.tasks import WriteTask, decode_task
from slatemq.errors import InvalidArgument

log = logging.getLogger(__name__)


class StreamTasks(DelayedTasks):
    """The tasks of one consumer of a group."""

    APPEND_SCRIPT = "redis.call('XADD', KEYS[2], '*', 'task', task)"

    def __init__(
        self,
        client: aioredis.Redis,
        settings: RedisSettings,
        consumer: str,
        dead: DeadLetters,
        *,
        is_sole_consumer: bool,
    ) -> None:
        """Nothing is read or written yet; see `open_backend` for `is_sole_consumer`."""
        super().__init__(client, settings, dead)
        self._group = Group(client, self._key, settings.consumer_group, consumer)
        self._read: deque[Delivery] = deque()
        self._held = HeldTasks[tuple[bytes, WriteTask]]()
        self._is_to_take_over = is_sole_consumer

    async def connect(self) -> None:
        """Create the group; it gets every task that is in the stream."""
        await self._group.create("0")

    def _append(self, pipeline: Pipeline, encoded: bytes) -> None:
        pipeline.xadd(self._key, {"task": encoded})

    async def dequeue(self) -> WriteTask | None:
        """The next task that is due, or None when none comes within a second."""
        await self._group.keep(self._entry_ids())
        if self._is_to_take_over:
            await self._group.take_over()
            self._is_to_take_over = False
        if not self._read:
            block_ms = await self._promoted()
            self._read.extend(await self._group.reclaim())
            if not self._read:
                self._read.extend(await self._group.read(block_ms))
        if not self._read:
            return None
        # Taken off when it is settled: a server that goes away here is not to hide it.
        delivery = self._read[0]
        raw = delivery.fields.get(b"task", b"")
        try:
            task = decode_task(raw)
        except InvalidArgument as error:
            log.error("what is not a task goes to the dead letters: %s", error)
            async with self._client.pipeline(transaction=True) as pipeline:
                self._dead.add_unreadable(
                    pipeline, raw or repr(delivery.fields).encode(), str(error)
                )
                self._group.finish(pipeline, delivery.entry_id, remove=True)
                await pipeline.execute()
            self._read.popleft()
            return None
        self._read.popleft()
        if delivery.entry_id not in {entry_id for entry_id, _ in self._held}:
            self._held.add(task.task_id, (delivery.entry_id, task))
        return task

    async def complete(self, task_id: str) -> None:
        """Remove a task."""
        held = self._held.first(task_id)
        if held is not None:
            await self._completions.execute(
                lambda pipeline: self._group.finish(pipeline, held[0], remove=True)
            )
            self._held.drop(task_id)

    async def fail(self, task_id: str, error: str) -> None:
        """Put a task behind its delay, or among the dead letters."""
        held = self._held.first(task_id)
        if held is None:
            return
        entry_id, task = held
        async with self._client.pipeline(transaction=True) as pipeline:
            self._put_aside(pipeline, task, error)
            self._group.finish(pipeline, entry_id, remove=True)
            await pipeline.execute()
        self._held.drop(task_id)

    async def _count(self) -> int:
        return int(await self._client.xlen(self._key))

    async def stop(self) -> None:
        """Give what was read to other consumers at once."""
        await self._group.leave()

    def _entry_ids(self) -> set[bytes]:
        held = {entry_id for entry_id, _ in self._held}
        return held | {delivery.entry_id for delivery in self._read}
