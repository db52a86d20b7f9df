"""Tasks in RabbitMQ."""

from __future__ import annotations

import asyncio

from aio_pika.abc import AbstractIncomingMessage

from libs.events.rabbitmq.connection import (
    OPERATION_S,
    Connection,
    Names,
    declare_all,
    declare_queue,
    message_of,
)
from libs.events.rabbitmq.consuming import Deliveries
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


class Tasks:
    """The tasks of one consumer, and the dead letters."""

    def __init__(self, connection: Connection) -> None:
        """Nothing is opened yet."""
        self._connection = connection
        self._settings = connection.settings
        self._names = Names(connection.settings)
        self._deliveries: Deliveries | None = None
        self._held: dict[str, AbstractIncomingMessage] = {}

    async def enqueue(self, task: WriteTask) -> None:
        """Publish a task to its queue."""
        message = message_of(encode_task(task), self._settings, message_id=task.task_id)
        await self._connection.publish("", self._names.tasks, message)

    async def dequeue(self) -> WriteTask | None:
        """The next task, or None when none comes within a second."""
        if self._deliveries is None or self._deliveries.is_lost:
            self._held.clear()  # others get them
            self._deliveries = await self._start()
        message = await self._deliveries.next(WAIT_S)
        if message is None:
            return None
        task = decode_task(message.body)
        self._held[task.task_id] = message
        return task

    async def _start(self) -> Deliveries:
        channel = await self._connection.open_channel(self._settings.prefetch_count)
        # A server that is still starting may never answer.
        async with asyncio.timeout(OPERATION_S):
            await declare_all(channel, self._settings)
            queue = await declare_queue(channel, self._names.tasks, self._settings)
            deliveries = Deliveries(channel)
            await deliveries.start(queue)
        return deliveries

    async def complete(self, task_id: str) -> None:
        """Remove a task."""
        message = self._held.pop(task_id, None)
        if message is not None:
            await message.ack()

    async def fail(self, task_id: str, error: str) -> None:
        """Put a task behind its delay, or among the dead letters."""
        held = self._held.get(task_id)
        if held is None:
            return
        task = decode_task(held.body)
        if task.has_retries_left:
            again = message_of(
                encode_task(task.after_failure()),
                self._settings,
                message_id=task_id,
                expiration=self._settings.retry_delay_ms / 1000,
            )
            await self._connection.publish("", self._names.retry, again)
        else:
            failed = FailedTask(
                task=task.after_failure(), error=error, failed_at=format_timestamp(now_ms())
            )
            dead = message_of(
                encode_failed_task(failed),
                self._settings,
                message_id=task_id,
                headers={"kind": "task", "error": error},
            )
            await self._connection.publish(self._names.dead_exchange, self._names.dead, dead)
        await held.ack()
        self._held.pop(task_id, None)

    async def counts(self) -> tuple[int, int]:
        """Tasks that wait, are delayed, or are with this consumer; and dead letters.

        Tasks that other consumers have are not counted: AMQP hides them.
        """
        return await self._pending_count(), await self._dead_count()

    async def stop(self) -> None:
        """Nothing to do: what was not acknowledged goes back with the connection."""

    async def _pending_count(self) -> int:
        channel = await self._connection.publishing()
        waiting = 0
        for name in (self._names.tasks, self._names.retry):
            queue = await channel.declare_queue(name, passive=True)
            waiting += queue.declaration_result.message_count or 0
        return waiting + len(self._held)

    async def _dead_count(self) -> int:
        channel = await self._connection.publishing()
        queue = await channel.declare_queue(self._names.dead, passive=True)
        return queue.declaration_result.message_count or 0

    async def failed(self, limit: int) -> list[FailedTask]:
        """Tasks among the dead letters; they stay there."""
        channel = await self._connection.open_channel()
        found: list[FailedTask] = []
        try:
            queue = await channel.get_queue(self._names.dead)
            while len(found) < limit:
                message = await queue.get(fail=False)
                if message is None:
                    break
                if message.headers.get("kind") == "task":
                    found.append(decode_failed_task(message.body))
        finally:
            await channel.close()  # what was looked at goes back
        return found

    async def retry_all(self) -> int:
        """Move every task among the dead letters back to the tasks; returns how many."""
        channel = await self._connection.open_channel()
        count = 0
        try:
            queue = await channel.get_queue(self._names.dead)
            while (message := await queue.get(fail=False)) is not None:
                if message.headers.get("kind") == "task":
                    await self.enqueue(decode_failed_task(message.body).task.renewed())
                    await message.ack()
                    count += 1
        finally:
            await channel.close()  # events that were looked at go back
        return count
