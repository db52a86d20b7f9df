"""Tasks in RabbitMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from aio_pika.abc import AbstractIncomingMessage, AbstractQueue

from libs.events.rabbitmq.connection import (
    OPERATION_S,
    Connections,
    Deliveries,
    Names,
    acknowledge,
    close_channel,
    declare_all,
    declare_queue,
    message_of,
)
from libs.events.tasks import (
    MOVED_MAX,
    FailedTask,
    Moving,
    TaskDeliveries,
    UnreadableTask,
    WriteTask,
    decode_task,
    encode_failed_task,
    encode_task,
    read_dead_letter,
)
from slatemq.events.envelope import format_timestamp
from slatemq.models import now_ms

BACK_LOOKS: Final = 200
BACK_LOOK_S: Final = 0.02


class Tasks:
    """The tasks of one consumer, and the dead letters."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._settings = connections.settings
        self._names = Names(connections.settings)
        self._deliveries: Deliveries | None = None
        self._held = TaskDeliveries[AbstractIncomingMessage]()
        self._dead_turn = asyncio.Lock()

    async def enqueue(self, task: WriteTask) -> None:
        await self._enqueue_all([task])

    async def _enqueue_all(self, tasks: Sequence[WriteTask]) -> None:
        # All by one channel: if that is lost, none of them overtakes one that is sent again.
        channel = await self._connections.publishing.shared_channel()
        sent = [
            self._connections.publish(
                "",
                self._names.tasks,
                message_of(encode_task(task), self._settings, message_id=task.task_id),
                is_kept=True,
                channel=channel,
            )
            for task in tasks
        ]
        await asyncio.gather(*sent)

    async def dequeue(self) -> WriteTask | None:
        if self._deliveries is None or self._deliveries.is_lost:
            await self.start()
        assert self._deliveries is not None
        message = self._held.unreadable or await self._deliveries.next()
        if message is None:
            return None
        return await self._held.take(message, message.body, self._bury_unreadable)

    async def start(self) -> None:
        """Consume the tasks, by a channel of its own; `dequeue` does it where that is needed."""
        lost, self._deliveries = self._deliveries, None
        if lost is not None:
            await close_channel(lost.channel)
        self._held = TaskDeliveries[AbstractIncomingMessage]()  # they come again
        consuming = self._connections.consuming
        channel = await consuming.open_channel(self._settings.prefetch_count)
        deliveries = consuming.deliveries(channel)
        # A server that is still starting may never answer.
        async with asyncio.timeout(OPERATION_S):
            await declare_all(channel, self._settings)
            queue = await declare_queue(channel, self._names.tasks, self._settings)
            await deliveries.start(queue)
        self._deliveries = deliveries

    def _first_held(self, task_id: str) -> AbstractIncomingMessage | None:
        """None also when the server has requeued it: an answer would have no effect."""
        if self._deliveries is None or self._deliveries.is_lost:
            return None
        return self._held.first(task_id)

    async def complete(self, task_id: str) -> bool:
        held = self._held
        message = self._first_held(task_id)
        if message is None:
            return False
        await acknowledge(message)
        held.drop(task_id)
        return True

    async def fail(self, task_id: str, error: str) -> bool:
        message = self._first_held(task_id)
        if message is None:
            return False
        task = decode_task(message.body)
        if not task.has_retries_left:
            dead = FailedTask.now(task, error)
            await self._bury(encode_failed_task(dead), "task", dead.error, task_id)
        elif delay_ms := self._settings.retry_delay_ms:
            again = message_of(
                encode_task(task.after_failure()),
                self._settings,
                message_id=task_id,
                expiration=delay_ms / 1000,
            )
            await self._connections.publish("", self._names.retry, again, is_kept=True)
        else:
            await self.enqueue(task.after_failure())
        # After a crash here it comes again beside its copy: both have one ID.
        return await self.complete(task_id)

    async def _bury_unreadable(self, message: AbstractIncomingMessage, error: str) -> None:
        await self._bury(message.body, "unreadable", error, message.message_id)
        await acknowledge(message)

    async def _bury(self, body: bytes, kind: str, error: str, message_id: str | None) -> None:
        headers = {"kind": kind, "error": error, "failed_at": format_timestamp(now_ms())}
        dead = message_of(body, self._settings, message_id=message_id, headers=headers)
        names = self._names
        await self._connections.publish(names.dead_exchange, names.dead, dead, is_kept=True)

    async def counts(self) -> tuple[int, int]:
        """Tasks that wait, are delayed, or are with this consumer; and dead letters.

        Tasks that other consumers have are not counted: AMQP hides them.
        """
        waiting = await self._count(self._names.tasks) + await self._count(self._names.retry)
        arrived = self._deliveries.arrived_count if self._deliveries is not None else 0
        here = arrived + sum(1 for _ in self._held) + (self._held.unreadable is not None)
        return waiting + here, await self._count(self._names.dead)

    async def pending(self) -> AsyncGenerator[bytes, None]:
        """Those that this consumer has: AMQP shows no others."""
        for message in [*self._held]:
            yield message.body

    async def stop(self) -> None:
        """Nothing to do: what was not acknowledged goes back with the connection."""

    async def _count(self, name: str) -> int:
        channel = await self._connections.consuming.shared_channel()
        async with asyncio.timeout(OPERATION_S):
            queue = await channel.declare_queue(name, passive=True)
        return queue.declaration_result.message_count or 0

    async def failed(self, limit: int) -> list[FailedTask | UnreadableTask]:
        found: dict[str, FailedTask | UnreadableTask] = {}
        async with aclosing(self._dead_letters()) as pages:
            async for page in pages:
                for dead_letter in page:
                    if dead_letter.headers.get("kind") != "event":
                        dead = self._read(dead_letter, len(found))
                        found[dead.name] = dead.without_payload()
                if len(found) > limit:
                    break
        return sorted(found.values(), key=lambda dead: dead.failed_at)[:limit]

    def _read(
        self, dead_letter: AbstractIncomingMessage, number: int
    ) -> FailedTask | UnreadableTask:
        place = f"message {number} of the queue {self._names.dead}"
        return read_dead_letter(dead_letter.body, dead_letter.headers, place)

    async def retry_all(self, moving: Moving) -> int:
        """Move every dead letter back to the tasks; returns how many tasks they are.

        Also each copy: one of them may be of an attempt that failed since.
        """
        retried: set[str] = set()
        async with aclosing(self._dead_letters()) as pages:
            async for page in pages:
                read = [(one, self._read(one, 0)) for one in page]
                moved = [(one, dead.task) for one, dead in read if isinstance(dead, FailedTask)]
                names = [task.task_id for _, task in moved]
                with moving(names):
                    await self._enqueue_all([task.renewed() for _, task in moved])
                retried.update(names)
                for dead_letter, _ in moved:  # after a crash here they come again beside the tasks
                    await acknowledge(dead_letter)
        return len(retried)

    async def _dead_letters(self) -> AsyncGenerator[list[AbstractIncomingMessage], None]:
        """Pages of the dead letters in the queue now; unacknowledged ones are in it afterwards.

        A consumer for each page: it would stop where the caller acknowledges none of its prefetch.
        """
        async with self._dead_turn:
            left = 0
            consuming = self._connections.consuming
            channel = await consuming.open_channel()
            deliveries = consuming.deliveries(channel)
            try:
                async with asyncio.timeout(OPERATION_S):
                    queue = await channel.get_queue(self._names.dead)
                coming = queue.declaration_result.message_count or 0
                while coming > 0:
                    page = await self._next_page(deliveries, queue, min(coming, MOVED_MAX))
                    if not page:
                        break
                    coming -= len(page)
                    left += len(page)
                    yield page
                    left -= sum(one.processed for one in page)
            finally:
                await close_channel(channel)
                await self._until_back(left)

    async def _next_page(
        self, deliveries: Deliveries, queue: AbstractQueue, size: int
    ) -> list[AbstractIncomingMessage]:
        """The next messages of a queue, fewer than `size` only at its end."""
        page: list[AbstractIncomingMessage] = []
        async with asyncio.timeout(OPERATION_S) as limit:
            await deliveries.channel.set_qos(prefetch_count=size)
            consumer = await deliveries.start(queue)
            while len(page) < size:
                if (message := await deliveries.next()) is not None:
                    page.append(message)
                    limit.reschedule(asyncio.get_running_loop().time() + OPERATION_S)
                elif not await self._count(self._names.dead):
                    # What is on its way comes before the answer to this one.
                    await deliveries.channel.set_qos(prefetch_count=size)
                    if not deliveries.arrived_count:
                        break
            await queue.cancel(consumer)
        return page

    async def _until_back(self, count: int) -> None:
        """Wait until the messages of a closed channel are back in the queue."""
        for _ in range(BACK_LOOKS):
            if await self._count(self._names.dead) >= count:
                return
            await asyncio.sleep(BACK_LOOK_S)
