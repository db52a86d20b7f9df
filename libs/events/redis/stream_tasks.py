"""Tasks in a Redis stream with a consumer group."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from redis import asyncio as aioredis

from libs.events.redis.dead_letters import DeadLetters
from libs.events.redis.delayed_tasks import DelayedTasks, TaskReading
from libs.events.redis.streams import Delivery, Group, StreamAppends, read_stream
from libs.events.redis.transactions import Command
from libs.events.settings import RedisSettings


class StreamTasks(DelayedTasks[Delivery]):
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
        self._add = StreamAppends(client, self._key, ["task"])
        self._is_to_take_over = reading.is_sole_consumer

    async def _prepare(self) -> None:
        """Create the group; it gets every task that is in the stream."""
        await self._group.create("0")

    def _append_command(self, encoded: bytes) -> Command:
        return "XADD", self._key, "*", "task", encoded

    async def _append_all(self, encoded: Sequence[bytes]) -> None:
        await self._add.append([(task,) for task in encoded])

    async def _show_alive(self) -> None:
        if self._group.is_keep_due:
            await self._group.keep(self._entry_ids())

    async def _take_over(self) -> None:
        if self._is_to_take_over:
            await self._group.take_over()
            self._is_to_take_over = False

    async def _read_some(self) -> None:
        await self._until_next_read()
        block_ms = await self._promoted()
        count = self._read_count
        found, is_all = await self._group.reclaim(count), False
        if not found:
            found = await self._group.read(block_ms, count)
            is_all = len(found) < count
        self._read.extend(found)
        self._note_read([len(one.fields.get(b"task", b"")) for one in found], is_all=is_all)

    async def _recover(self) -> None:
        async for page in self._group.own(self._entry_ids()):
            self._read.extend(page)

    def _entry_ids(self) -> set[bytes]:
        return {one.entry_id for one in (*self._held, *self._read)}

    def _encoded(self, delivery: Delivery) -> bytes:
        return delivery.fields.get(b"task") or repr(delivery.fields).encode()

    def _is_held(self, task_id: str, delivery: Delivery) -> bool:
        return any(one.entry_id == delivery.entry_id for one in self._held.of(task_id))

    def _finish_commands(self, deliveries: Sequence[Delivery]) -> Sequence[Command]:
        return self._group.finish_commands(*(one.entry_id for one in deliveries), remove=True)

    async def _all(self) -> AsyncGenerator[bytes, None]:
        async for _, fields in read_stream(self._client, self._key):
            yield fields.get(b"task", b"")

    async def _count(self) -> int:
        return int(await self._client.xlen(self._key))

    async def _leave(self) -> None:
        await self._group.leave()
