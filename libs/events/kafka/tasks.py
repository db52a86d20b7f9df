"""Tasks in Kafka."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Final

from aiokafka import TopicPartition, errors

from libs.events.kafka.connection import JOIN_S, KEPT, OPERATION_S, Connection, translated
from libs.events.kafka.dead_letters import DeadLetters
from libs.events.kafka.offsets import Offsets, TopicReader
from libs.events.tasks import (
    FailedTask,
    Moving,
    TaskDeliveries,
    UnreadableTask,
    WriteTask,
    cut_error,
    encode_task,
    read_due_ms,
    read_task,
)
from slatemq.errors import FailedPrecondition, Unavailable
from slatemq.models import now_ms

log = logging.getLogger(__name__)

WAIT_S: Final = 1.0
NOT_BEFORE: Final = "not-before"
FETCH_COUNT: Final = 100

RecordPosition = tuple[TopicPartition, int]
"""A partition, and the offset of a record."""


class _Delivery:
    """A task that was given out; `is_moved` once a copy of it was sent because it failed."""

    __slots__ = ("is_moved", "place", "task")

    def __init__(self, task: WriteTask, place: RecordPosition) -> None:
        self.task = task
        self.place = place
        self.is_moved = False


class Tasks:
    """The tasks of one consumer, and the dead letters."""

    def __init__(self, connection: Connection, *, is_sole_consumer: bool) -> None:
        """Nothing is opened yet. The sole consumer of its names needs no group to share them."""
        self._connection = connection
        self._settings = connection.settings
        self._is_sole = is_sole_consumer
        self._topic = f"{self._settings.topic_prefix}.tasks"
        self._retry_topic = f"{self._topic}.retry"
        self._group = f"{self._settings.consumer_group}.tasks"
        self._topics = TopicReader(connection)
        self._dead = DeadLetters(connection, self._topics)
        self._consumer: Any = None
        self._offsets: Offsets
        self._held = TaskDeliveries[_Delivery]()
        self._fetched: deque[tuple[TopicPartition, Any]] = deque()
        self._ready: deque[tuple[WriteTask, RecordPosition]] = deque()
        self._delayed: list[tuple[int, int, WriteTask, RecordPosition]] = []
        self._numbers = itertools.count()
        self._cannot_trim = False
        self._is_stopped = False

    async def prepare(self) -> None:
        topics = [self._topic, self._retry_topic, *self._dead.topics]
        await self._connection.ensure_topics(topics, KEPT)

    async def enqueue(self, task: WriteTask) -> None:
        await self._enqueue_all([task])

    async def _enqueue_all(self, tasks: Sequence[WriteTask]) -> None:
        await self.prepare()  # Brokers may have lost them.
        await self._connection.send(map(self._record, tasks))

    def _record(self, task: WriteTask) -> dict[str, Any]:
        return {"topic": self._topic, "key": task.task_id.encode(), "value": encode_task(task)}

    # --- Given out ----------------------------------------------------------

    async def dequeue(self) -> WriteTask | None:
        if self._consumer is None:
            await self._start()
        end_ms = now_ms() + int(WAIT_S * 1000)
        while True:
            await self._sort_fetched()
            due = self._take_due()
            if due is not None:
                return due
            wait_ms = end_ms - now_ms()
            if wait_ms <= 0:
                return None
            if self._delayed:
                wait_ms = min(wait_ms, max(1, self._delayed[0][0] - now_ms()))
            await self._fetch(wait_ms)

    async def _fetch(self, wait_ms: int) -> None:
        # One batch of delayed tasks at a time: what is behind it is due later.
        wanted = [
            partition
            for partition in self._consumer.assignment()
            if partition.topic == self._topic or not self._delayed
        ]
        if not wanted:  # the group is dividing its partitions
            await asyncio.sleep(wait_ms / 1000)
            return
        try:
            fetched = await self._consumer.getmany(
                *wanted, timeout_ms=wait_ms, max_records=FETCH_COUNT
            )
        except errors.KafkaError:
            # A consumer whose coordination has ended raises this at each call, for ever.
            await self._drop_consumer()
            raise
        for partition, records in fetched.items():
            for record in records:
                self._offsets.begin(partition, record.offset)
                self._fetched.append((partition, record))

    async def _sort_fetched(self) -> None:
        while self._fetched:
            # Removed once it is settled: it must come next if the broker goes down here.
            partition, record = self._fetched[0]
            place = partition, record.offset
            task = read_task(record.value or b"")
            if isinstance(task, str):
                await self._dead.add_unreadable(record.value, task)
                self._fetched.popleft()
                self._offsets.finish(*place)
                await self._offsets.commit()  # the next one does it where this one is refused
            else:
                self._arrive(task, place, record.headers)
                self._fetched.popleft()

    def _arrive(
        self, task: WriteTask, place: RecordPosition, headers: Iterable[tuple[str, bytes]]
    ) -> None:
        if place[0].topic == self._topic:
            self._ready.append((task, place))
            return
        not_before_ms = read_due_ms(dict(headers).get(NOT_BEFORE))
        heapq.heappush(self._delayed, (not_before_ms, next(self._numbers), task, place))

    def _take_due(self) -> WriteTask | None:
        while True:
            if self._delayed and self._delayed[0][0] <= now_ms():
                _, _, task, place = heapq.heappop(self._delayed)
            elif self._ready:
                task, place = self._ready.popleft()
            else:
                return None
            if self._offsets.is_open(*place):  # else another consumer has it by now
                self._held.add(task.task_id, _Delivery(task, place))
                return task

    async def _start(self) -> None:
        await self.prepare()
        consumer = self._connection.consumer(self._group)
        offsets = Offsets(consumer)
        topics = [self._topic, self._retry_topic]
        if not self._is_sole:
            consumer.subscribe(topics, listener=offsets)
        try:
            async with asyncio.timeout(JOIN_S):
                await consumer.start()
                if self._is_sole:
                    partitions = [one for topic in topics for one in await self._parts(topic)]
                    consumer.assign(partitions)
                    for partition in partitions:
                        offsets.resume(partition, await consumer.committed(partition) or 0)
            if self._is_stopped:
                raise Unavailable("it was closed", reason="BACKEND_DOWN")
        except BaseException:
            await consumer.stop()
            raise
        self._consumer, self._offsets = consumer, offsets

    # --- Their ends ---------------------------------------------------------

    async def complete(self, task_id: str) -> bool:
        held_tasks = self._held
        held = held_tasks.first(task_id)
        if held is None:
            return False
        is_finished = self._offsets.finish(*held.place)
        is_committed = await self._offsets.commit()
        held_tasks.drop(task_id)
        return is_finished and is_committed

    async def fail(self, task_id: str, error: str) -> bool:
        held = self._held.first(task_id)
        if held is None:
            return False
        if not held.is_moved:  # else its end was refused, and this is the next try
            try:
                await self._send_failed(held.task, error)
            except errors.MessageSizeTooLargeError as large:  # it came in with not a byte to spare
                why = f"{large}; its error: {error}"
                log.error("task %s cannot be sent again: %s", task_id, cut_error(why))
                await self._dead.add_unreadable(encode_task(held.task), why)
            held.is_moved = True
        # After a crash here it comes again beside its copy: both have one ID.
        return await self.complete(task_id)

    async def _send_failed(self, task: WriteTask, error: str) -> None:
        await self.prepare()
        if task.has_retries_left:
            due_ms = now_ms() + self._settings.retry_delay_ms
            again = {
                **self._record(task.after_failure()),
                "topic": self._retry_topic,
                "headers": [(NOT_BEFORE, str(due_ms).encode())],
            }
            await self._connection.send([again])
        else:
            await self._dead.add(FailedTask.now(task, error))

    async def failed(self, limit: int) -> list[FailedTask | UnreadableTask]:
        return await self._dead.tasks(limit)

    async def retry_all(self, moving: Moving) -> int:
        return await self._dead.retry(self._enqueue_all, moving)

    async def counts(self) -> tuple[int, int]:
        """Tasks that wait or are with a consumer, and dead letters.

        Finished tasks behind one that is not are counted as waiting.
        """
        pending = 0
        for topic in (self._topic, self._retry_topic):
            for partition, (begin, end) in (await self._topics.ranges(topic, self._group)).items():
                if self._consumer is not None and partition in self._consumer.assignment():
                    end = max(end, self._consumer.highwater(partition) or 0)
                pending += max(0, end - begin)
        return pending, await self._dead.count()

    async def pending(self) -> AsyncGenerator[bytes, None]:
        """Also those that are finished behind one that is not."""
        async with self._topics.reader(self._group) as consumer:
            for topic in (self._retry_topic, self._topic):
                async with aclosing(self._topics.read(consumer, topic, self._group)) as records:
                    async for record in records:
                        yield record.value or b""

    async def trim(self) -> bool:
        """Commit again, and let the brokers remove what is finished or retried; whether they have.

        Brokers forget what a group has committed days after its last commit, and then it begins
        with the first record that they have.
        """
        if self._consumer is None:
            return False
        if not await self._offsets.commit(again=True):
            return False
        try:
            with translated():
                finished = {**self._offsets.committed, **await self._dead.commit_again()}
                await self._connection.delete_records(finished)
        except (Unavailable, FailedPrecondition) as error:
            if not self._cannot_trim:
                log.warning("Kafka keeps finished tasks in %s: %s", self._topic, error)
            self._cannot_trim = True
            return False
        self._cannot_trim = False
        return True

    async def stop(self) -> None:
        self._is_stopped = True
        try:
            await self._drop_consumer()
        finally:
            await self._topics.close()

    async def _drop_consumer(self) -> None:
        """What it has given out, or has fetched, comes again, from the next one."""
        consumer, self._consumer = self._consumer, None
        self._held = TaskDeliveries[_Delivery]()
        for waiting in (self._fetched, self._ready, self._delayed):
            waiting.clear()
        if consumer is not None:
            async with asyncio.timeout(OPERATION_S):
                await consumer.stop()

    async def _parts(self, topic: str) -> list[TopicPartition]:
        numbers = await self._connection.partitions(topic)
        return [TopicPartition(topic, number) for number in numbers]
