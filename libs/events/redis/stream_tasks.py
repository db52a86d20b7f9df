"""Tasks in a Redis stream with a consumer group."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from redis import asyncio as aioredis

from libs.events.held_tasks import HeldTasks
from libs.events.redis.appends import StreamAppends
from libs.events.redis.consumer_group import Delivery, Group
from libs.events.redis.dead_letters import DeadLetters, Pipeline
from libs.events.redis.delayed_tasks import DelayedTasks, TaskReading
from libs.events.redis.gathered import Gathered
from libs.events.settings import RedisSettings
from libs.events.tasks import WriteTask, decode_task
from slatemq.errors import InvalidArgument


class StreamTasks(DelayedTasks):
    """The tasks of one consumer of a group."""

    APPEND_SCRIPT = "redis.call('XADD', KEYS[2], '*', 'task', task)"

    def __init__(
        self,
        client: aioredis.Redis,
        settings: RedisSettings,
        consumer: str,
        dead: DeadLetters,
        reading: TaskReading,
    ) -> None:
        super().__init__(client, settings, dead, reading)
        self._group = Group(client, self._key, settings.consumer_group, consumer)
        self._read: deque[Delivery] = deque()
        self._held = HeldTasks[tuple[bytes, WriteTask]]()
        self._held_ids: set[bytes] = set()
        self._completions = Gathered(self._finish_all)
        self._add = StreamAppends(client, self._key, ["task"])
        self._is_to_take_over = reading.is_sole_consumer

    async def connect(self) -> None:
        """Create the group; it gets every task that is in the stream."""
        await self._group.create("0")

    def _append(self, pipeline: Pipeline, encoded: bytes) -> None:
        pipeline.xadd(self._key, {"task": encoded})

    async def _append_all(self, encoded: Sequence[bytes]) -> None:
        await self._add.append([(task,) for task in encoded])

    async def dequeue(self) -> WriteTask | None:
        """The next task that is due, or None when none comes within a second."""
        if self._group.is_keep_due:
            await self._group.keep({*self._held_ids, *(one.entry_id for one in self._read)})
        if self._is_to_take_over:
            await self._group.take_over()
            self._is_to_take_over = False
        if not self._read:
            await self._read_some()
        if not self._read:
            return None
        # Taken off when it is settled: a server that goes away here is not to hide it.
        delivery = self._read[0]
        raw = delivery.fields.get(b"task", b"")
        try:
            task = decode_task(raw)
        except InvalidArgument as error:
            async with self._client.pipeline(transaction=True) as pipeline:
                self._bury_unreadable(pipeline, raw or repr(delivery.fields).encode(), error)
                self._group.finish(pipeline, delivery.entry_id, remove=True)
                await pipeline.execute()
            self._read.popleft()
            return None
        self._read.popleft()
        if delivery.entry_id not in self._held_ids:
            self._held_ids.add(delivery.entry_id)
            self._held.add(task.task_id, (delivery.entry_id, task))
        return task

    async def _read_some(self) -> None:
        await self._until_next_read()
        block_ms = await self._promoted()
        count = self._read_count
        found, is_all = await self._group.reclaim(count=count), False
        if not found:
            found = await self._group.read(block_ms, count)
            is_all = len(found) < count
        self._read.extend(found)
        self._note_read([len(one.fields.get(b"task", b"")) for one in found], is_all=is_all)

    async def complete(self, task_id: str) -> None:
        """Remove a task."""
        held = self._held.first(task_id)
        if held is not None:
            await self._completions.execute(held[0])
            self._drop(task_id, held[0])

    async def _finish_all(self, entry_ids: Sequence[bytes]) -> None:
        async with self._client.pipeline(transaction=True) as pipeline:
            self._group.finish(pipeline, *entry_ids, remove=True)
            await pipeline.execute()

    def _drop(self, task_id: str, entry_id: bytes) -> None:
        self._held.drop(task_id)
        self._held_ids.discard(entry_id)

    async def fail(self, task_id: str, error: str) -> None:
        """Put a task behind its delay, or among the dead letters."""
        held = self._held.first(task_id)
        if held is None:
            return
        entry_id, task = held
        async with self._client.pipeline(transaction=True) as pipeline:
            self._set_aside(pipeline, task, error)
            self._group.finish(pipeline, entry_id, remove=True)
            await pipeline.execute()
        self._drop(task_id, entry_id)

    async def _count(self) -> int:
        return int(await self._client.xlen(self._key))

    async def stop(self) -> None:
        """Give what was read to other consumers at once."""
        await self._group.leave()
