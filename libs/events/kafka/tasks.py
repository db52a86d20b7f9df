"""Tasks in Kafka."""

from __future__ import annotations

import asyncio
import heapq
from typing import Any

from aiokafka import TopicPartition

from libs.events.kafka.connection import JOIN_S, OPERATION_S, Connection
from libs.events.kafka.offsets import Offsets
from libs.events.tasks import (
    FailedTask,
    WriteTask,
    decode_failed_task,
    decode_task,
    encode_failed_task,
    encode_task,
)
from libs.events.wall_clock import now_ms
from slatemq.events.envelope import format_timestamp

WAIT_S = 1.0
NOT_BEFORE = "not-before"
DELAYED_MAX = 1_000
"""How many delayed tasks one consumer holds at most before it waits for the first of them."""


class Tasks:
    """The tasks of one consumer of a group, and the dead letters."""

    def __init__(self, connection: Connection) -> None:
        """Nothing is opened yet."""
        self._connection = connection
        self._settings = connection.settings
        self._topic = f"{self._settings.topic_prefix}.tasks"
        self._dead = f"{self._settings.topic_prefix}.dead-letter"
        self._dead_events = f"{self._dead}.events"
        self._consumer: Any = None
        self._offsets: Offsets
        self._held: dict[str, tuple[WriteTask, TopicPartition, int]] = {}
        self._delayed: list[tuple[int, int, WriteTask, TopicPartition]] = []

    async def prepare(self) -> None:
        """Create the topics."""
        await self._connection.ensure_topics([self._topic, self._dead, self._dead_events])

    async def enqueue(self, task: WriteTask) -> None:
        """Send a task."""
        await self._send(task, 0)

    async def _send(self, task: WriteTask, not_before_ms: int) -> None:
        headers = [(NOT_BEFORE, str(not_before_ms).encode())] if not_before_ms else []
        await self._connection.send(
            [
                {
                    "topic": self._topic,
                    "key": task.task_id.encode(),
                    "value": encode_task(task),
                    "headers": headers,
                }
            ]
        )

    async def dequeue(self) -> WriteTask | None:
        """The next task that is due, or None when none comes within a second."""
        if self._consumer is None:
            await self._start()
        end_ms = now_ms() + int(WAIT_S * 1000)
        while True:
            due = self._take_due()
            if due is not None:
                return due
            wait_ms = end_ms - now_ms()
            if wait_ms <= 0:
                return None
            if self._delayed:
                wait_ms = min(wait_ms, max(1, self._delayed[0][0] - now_ms()))
            if len(self._delayed) >= DELAYED_MAX:
                await asyncio.sleep(wait_ms / 1000)
                continue
            fetched = await self._consumer.getmany(timeout_ms=wait_ms, max_records=1)
            for partition, records in fetched.items():
                for record in records:
                    self._arrive(partition, record)

    async def complete(self, task_id: str) -> None:
        """Finish a task."""
        held = self._held.pop(task_id, None)
        if held is not None:
            self._offsets.finish(held[1], held[2])
            await self._offsets.commit()

    async def fail(self, task_id: str, error: str) -> None:
        """Put a task behind its delay, or among the dead letters."""
        held = self._held.get(task_id)
        if held is None:
            return
        task = held[0].after_failure()
        if held[0].has_retries_left:
            await self._send(task, now_ms() + self._settings.retry_delay_ms)
        else:
            failed = FailedTask(task=task, error=error, failed_at=format_timestamp(now_ms()))
            await self._connection.send(
                [{"topic": self._dead, "value": encode_failed_task(failed)}]
            )
        await self.complete(task_id)

    async def counts(self) -> tuple[int, int]:
        """Tasks that wait or are with a consumer, and dead letters.

        Finished tasks behind one that is not are counted as waiting.
        """
        dead = await self._behind(self._dead, self._dead_group)
        events = await self._behind(self._dead_events, self._dead_group)
        return await self._behind(self._topic, self._group), dead + events

    async def failed(self, limit: int) -> list[FailedTask]:
        """Tasks among the dead letters; they stay there."""
        return [failed for _, _, failed in await self._read_dead(limit)]

    async def retry_all(self) -> int:
        """Send every task among the dead letters again; returns how many.

        One caller at a time: two would send them twice.
        """
        dead = await self._read_dead(None)
        for _, _, failed in dead:
            await self.enqueue(failed.task.renewed())
        if dead:
            ends: dict[TopicPartition, int] = {}
            for partition, offset, _ in dead:
                ends[partition] = max(offset + 1, ends.get(partition, 0))
            consumer = await self._open(self._dead_group)
            try:
                consumer.assign(list(ends))
                await consumer.commit(ends)
            finally:
                await consumer.stop()
        return len(dead)

    async def stop(self) -> None:
        """Leave the group."""
        consumer, self._consumer = self._consumer, None
        self._held.clear()
        self._delayed.clear()
        if consumer is not None:
            async with asyncio.timeout(OPERATION_S):
                await consumer.stop()

    @property
    def _group(self) -> str:
        return f"{self._settings.consumer_group}.tasks"

    @property
    def _dead_group(self) -> str:
        return f"{self._settings.consumer_group}.dead-letter"

    async def _start(self) -> None:
        consumer = self._connection.consumer(self._group)
        self._offsets = Offsets(consumer)
        consumer.subscribe([self._topic], listener=self._offsets)
        try:
            async with asyncio.timeout(JOIN_S):
                await consumer.start()
        except BaseException:
            await consumer.stop()
            raise
        self._consumer = consumer

    def _arrive(self, partition: TopicPartition, record: Any) -> None:
        self._offsets.begin(partition, record.offset)
        not_before = next((int(value) for name, value in record.headers if name == NOT_BEFORE), 0)
        heapq.heappush(
            self._delayed, (not_before, record.offset, decode_task(record.value), partition)
        )

    def _take_due(self) -> WriteTask | None:
        while self._delayed and self._delayed[0][0] <= now_ms():
            _, offset, task, partition = heapq.heappop(self._delayed)
            if self._offsets.is_open(partition, offset):  # else another consumer has it by now
                self._held[task.task_id] = task, partition, offset
                return task
        return None

    async def _open(self, group: str) -> Any:
        consumer = self._connection.consumer(group)
        try:
            async with asyncio.timeout(OPERATION_S):
                await consumer.start()
        except BaseException:
            await consumer.stop()
            raise
        return consumer

    async def _behind(self, topic: str, group: str) -> int:
        """How many records of a topic are behind what a group has committed."""
        consumer = await self._open(group)
        try:
            ranges = await self._ranges(consumer, topic)
        finally:
            await consumer.stop()
        return sum(end - begin for begin, end in ranges.values())

    async def _ranges(self, consumer: Any, topic: str) -> dict[TopicPartition, tuple[int, int]]:
        """For each partition what was committed, or its beginning, and its end."""
        async with asyncio.timeout(OPERATION_S):
            numbers = await self._connection.partitions(topic)
            partitions = [TopicPartition(topic, number) for number in numbers]
            consumer.assign(partitions)
            begins = await consumer.beginning_offsets(partitions)
            ends = await consumer.end_offsets(partitions)
            committed = {p: await consumer.committed(p) for p in partitions}
        return {p: (max(begins[p], committed[p] or 0), ends[p]) for p in partitions}

    async def _read_dead(self, limit: int | None) -> list[tuple[TopicPartition, int, FailedTask]]:
        consumer = await self._open(self._dead_group)
        found: list[tuple[TopicPartition, int, FailedTask]] = []
        try:
            for partition, (begin, end) in (await self._ranges(consumer, self._dead)).items():
                if begin >= end:
                    continue
                consumer.assign([partition])
                consumer.seek(partition, begin)
                position = begin
                async with asyncio.timeout(OPERATION_S):
                    while position < end and (limit is None or len(found) < limit):
                        record = await consumer.getone()
                        position = record.offset + 1
                        found.append((partition, record.offset, decode_failed_task(record.value)))
        finally:
            await consumer.stop()
        found.sort(key=lambda row: row[2].failed_at)
        return found
