"""The topics of dead letters: tasks that failed too often, and what cannot be retried."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

from aiokafka import TopicPartition

from libs.events.kafka.connection import ERROR, OPERATION_S, Connection
from libs.events.kafka.offsets import TopicReader, commit_within
from libs.events.tasks import (
    MOVED_MAX,
    FailedTask,
    Moving,
    UnreadableTask,
    WriteTask,
    cut_error,
    decode_failed_task,
    encode_failed_task,
    format_server_time,
)
from slatemq.errors import InvalidArgument

KIND: Final = "kind"
UNREADABLE: Final = b"unreadable"


class DeadLetters:
    """Dead letters behind what their group has committed, which is what was retried."""

    def __init__(self, connection: Connection, topics: TopicReader) -> None:
        self._connection = connection
        self._topics = topics
        self._topic = f"{connection.settings.topic_prefix}.dead-letter"
        self._others = f"{self._topic}.events"
        self._group = f"{connection.settings.consumer_group}.dead-letter"
        self._turn = asyncio.Lock()

    @property
    def topics(self) -> tuple[str, str]:
        return self._topic, self._others

    async def add(self, failed: FailedTask) -> None:
        await self._connection.send([{"topic": self._topic, "value": encode_failed_task(failed)}])

    async def add_unreadable(self, raw: bytes | None, error: str) -> None:
        """Add what is not a task, for an operator to look at; it is not retried."""
        await self._connection.send_strange(self._others, raw, {KIND: UNREADABLE}, error)

    async def count(self) -> int:
        count = 0
        for topic in self.topics:
            ranges = await self._topics.ranges(topic, self._group)
            count += sum(max(0, end - begin) for begin, end in ranges.values())
        return count

    async def tasks(self, limit: int) -> list[FailedTask | UnreadableTask]:
        """Each task once, with its last error, the oldest first; they stay there."""
        found: dict[str, FailedTask | UnreadableTask] = {}
        async with self._topics.reader(self._group) as consumer:
            for topic in self.topics:
                async with aclosing(
                    self._topics.read(consumer, topic, self._group)
                ) as dead_letters:
                    async for record in dead_letters:
                        if len(found) > limit:
                            break
                        dead = _dead_letter_of(record)
                        is_task = isinstance(dead, FailedTask) or topic == self._topic
                        if is_task or (KIND, UNREADABLE) in record.headers:
                            found[dead.name] = dead.without_payload()
        return sorted(found.values(), key=lambda dead: dead.failed_at)[:limit]

    async def retry(
        self, enqueue: Callable[[Sequence[WriteTask]], Awaitable[None]], moving: Moving
    ) -> int:
        """Enqueue each dead letter as if new, and commit; returns how many tasks they are.

        Also each copy: one of them may be of an attempt that failed since.
        """
        retried: set[str] = set()
        done: dict[TopicPartition, int] = {}
        # Two at a time would enqueue them twice.
        async with self._turn, self._topics.reader(self._group) as consumer:
            async with aclosing(self._pages(consumer)) as pages:
                async for page in pages:
                    tasks = await self._tasks_of(page)
                    names = [task.task_id for task in tasks]
                    with moving(names):
                        await enqueue([task.renewed() for task in tasks])
                    retried.update(names)
                    for record in page:
                        done[TopicPartition(record.topic, record.partition)] = record.offset + 1
                    here = consumer.assignment()
                    if finished := {one: offset for one, offset in done.items() if one in here}:
                        await commit_within(consumer, finished)
            if done:
                consumer.assign(list(done))  # it read one partition after another
                await commit_within(consumer, done)
        return len(retried)

    async def _pages(self, consumer: Any) -> AsyncGenerator[list[Any], None]:
        """The records of tasks that were not retried."""
        page: list[Any] = []
        async with aclosing(self._topics.read(consumer, self._topic, self._group)) as records:
            async for record in records:
                page.append(record)
                if len(page) == MOVED_MAX:
                    yield page
                    page = []
        if page:
            yield page

    async def _tasks_of(self, records: Sequence[Any]) -> list[WriteTask]:
        """The tasks of dead letters; what is unreadable is kept where it is not passed over."""
        tasks: list[WriteTask] = []
        for record in records:
            dead = _dead_letter_of(record)
            if isinstance(dead, UnreadableTask):
                await self.add_unreadable(record.value, dead.error)
            else:
                tasks.append(dead.task)
        return tasks

    async def commit_again(self) -> dict[TopicPartition, int]:
        """Commit what was retried once more, before brokers forget it; returns the offsets."""
        async with self._turn, self._topics.reader(self._group) as consumer:
            numbers = await self._connection.partitions(self._topic)
            partitions = [TopicPartition(self._topic, number) for number in numbers]
            async with asyncio.timeout(OPERATION_S):
                known = {one: await consumer.committed(one) for one in partitions}
            retried = {one: offset for one, offset in known.items() if offset}
            if retried:
                consumer.assign(list(retried))
                await commit_within(consumer, retried)
        return retried


def _dead_letter_of(record: Any) -> FailedTask | UnreadableTask:
    error = b"".join(value for name, value in record.headers if name == ERROR)
    try:
        return decode_failed_task(record.value or b"")
    except InvalidArgument as wrong:
        return UnreadableTask(
            place=f"offset {record.offset} of partition {record.partition} of {record.topic}",
            error=error.decode(errors="replace") or cut_error(str(wrong)),
            failed_at=format_server_time(record.timestamp),
        )
