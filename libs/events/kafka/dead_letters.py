"""The topics of dead letters: tasks that failed too often, and what cannot be retried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

from aiokafka import TopicPartition

from libs.events.kafka.connection import OPERATION_S, Connection
from libs.events.kafka.lookers import Lookers
from libs.events.tasks import FailedTask, WriteTask, decode_failed_task, encode_failed_task

LOOK_MS: Final = 200
COMMIT_COUNT: Final = 100
"""After so many dead letters that were sent again the offset is committed."""


class DeadLetters:
    """Dead letters behind what their group has committed, which is what was retried."""

    def __init__(self, connection: Connection, lookers: Lookers) -> None:
        """Nothing is read or written yet."""
        self._connection = connection
        self._lookers = lookers
        self._topic = f"{connection.settings.topic_prefix}.dead-letter"
        self._others = f"{self._topic}.events"
        self._group = f"{connection.settings.consumer_group}.dead-letter"

    @property
    def topics(self) -> tuple[str, str]:
        """The names of both."""
        return self._topic, self._others

    async def add(self, failed: FailedTask) -> None:
        """Add a task."""
        await self._connection.send([{"topic": self._topic, "value": encode_failed_task(failed)}])

    async def add_unreadable(self, raw: bytes | None, error: str) -> None:
        """Add what is not a task, for an operator to look at; it is not retried."""
        headers = [("error", error.encode())]
        await self._connection.send([{"topic": self._others, "value": raw, "headers": headers}])

    async def count(self) -> int:
        """All of them."""
        count = 0
        for topic in self.topics:
            ranges = await self._lookers.ranges(topic, self._group)
            count += sum(max(0, end - begin) for begin, end in ranges.values())
        return count

    async def tasks(self, limit: int) -> list[FailedTask]:
        """Each task once, with its last error, the oldest first; they stay there."""
        found: dict[str, FailedTask] = {}
        async with self._reader() as consumer, aclosing(self._read(consumer)) as letters:
            async for _, _, failed in letters:
                found[failed.task.task_id] = failed
                if len(found) > limit:
                    break
        return sorted(found.values(), key=lambda failed: failed.failed_at)[:limit]

    async def retry(self, enqueue: Callable[[WriteTask], Awaitable[None]]) -> int:
        """Enqueue each task as if new, once, and commit; returns how many.

        One caller at a time: two would enqueue them twice.
        """
        retried: set[str] = set()
        done: dict[TopicPartition, int] = {}
        async with self._reader() as consumer:
            async with aclosing(self._read(consumer)) as letters:
                async for partition, offset, failed in letters:
                    if failed.task.task_id not in retried:
                        await enqueue(failed.task.renewed())
                        retried.add(failed.task.task_id)
                    done[partition] = offset + 1
                    if len(retried) % COMMIT_COUNT == 0:
                        await consumer.commit(done)
            if done:
                await consumer.commit(done)
        return len(retried)

    async def _read(
        self, consumer: Any
    ) -> AsyncGenerator[tuple[TopicPartition, int, FailedTask], None]:
        """What is in the topic now; one partition after another."""
        for partition, (begin, end) in (
            await self._lookers.ranges(self._topic, self._group)
        ).items():
            consumer.assign([partition])
            consumer.seek(partition, begin)
            position = begin
            while position < max(end, consumer.highwater(partition) or 0):
                async with asyncio.timeout(OPERATION_S):
                    records: list[Any] = []
                    while not records:
                        fetched = await consumer.getmany(timeout_ms=LOOK_MS)
                        records = fetched.get(partition, [])
                for record in records:
                    position = record.offset + 1
                    yield partition, record.offset, decode_failed_task(record.value)

    @asynccontextmanager
    async def _reader(self) -> AsyncIterator[Any]:
        consumer = self._connection.consumer(self._group)
        try:
            async with asyncio.timeout(OPERATION_S):
                await consumer.start()
            yield consumer
        finally:
            await consumer.stop()
