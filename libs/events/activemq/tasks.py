"""Tasks in ActiveMQ.

A failed task moves to a second queue, with the time at which it is due. A consumer holds the first
one until then: it is the next one that is due, unless the delay was made shorter meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence, Set
from itertools import chain

from libs.events.activemq.connection import OPERATION_S, Connections, message_of
from libs.events.activemq.engine import Received, Receiver
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
    read_due_ms,
)
from slatemq.events.envelope import format_timestamp
from slatemq.models import now_ms

WAIT_S = 1.0

BROWSED_MAX = 400
"""Messages of a queue to browse: what ActiveMQ shows unless its policy allows more."""

COUNTED_BYTES_MAX = 8 << 20
"""Of a queue, to count its messages: a server sends them whole, and each look does that."""


class Tasks:
    """The tasks of one consumer, and the dead letters."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._settings = connections.settings
        self._addresses = connections.addresses
        self._waiting: Receiver | None = None
        self._retrying: Receiver | None = None
        self._held = TaskDeliveries[Received]()
        self._looking = asyncio.Lock()

    async def enqueue(self, task: WriteTask) -> None:
        await self._enqueue_all([task])

    async def _enqueue_all(self, tasks: Sequence[WriteTask]) -> None:
        messages = [message_of(encode_task(task), task.task_id) for task in tasks]
        await self._connections.send(self._addresses.tasks, *messages)

    async def dequeue(self) -> WriteTask | None:
        waiting, retrying = await self._receivers()
        end_ms = now_ms() + round(WAIT_S * 1000)
        while (message := self._held.unreadable or await self._due(waiting, retrying)) is None:
            first = retrying.peek()
            until_ms = end_ms if first is None else min(end_ms, _due_ms(first))
            if now_ms() >= end_ms:
                return None
            arriving = [asyncio.ensure_future(waiting.wait())]
            if first is None:
                arriving.append(asyncio.ensure_future(retrying.wait()))
            try:
                await asyncio.wait(
                    arriving,
                    timeout=max(0, until_ms - now_ms()) / 1000,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                for waiter in arriving:
                    waiter.cancel()
        return await self._held.take(message, message.body, self._bury_unreadable)

    async def _due(self, waiting: Receiver, retrying: Receiver) -> Received | None:
        first = retrying.peek()
        if first is not None and _due_ms(first) <= now_ms():
            return await retrying.next()
        return None if waiting.peek() is None else await waiting.next()

    async def _receivers(self) -> tuple[Receiver, Receiver]:
        waiting, retrying = self._waiting, self._retrying
        if waiting is None or retrying is None or waiting.is_lost or retrying.is_lost:
            self._held = TaskDeliveries[Received]()  # others get them
            for old in (waiting, retrying):
                if old is not None and not old.is_lost:
                    await old.close()
            waiting = self._waiting = await self._connections.receive(self._addresses.tasks)
            retrying = self._retrying = await self._connections.receive(self._addresses.retry)
            waiting.flow(self._settings.prefetch_count)
            retrying.flow(self._settings.prefetch_count)
        return waiting, retrying

    async def complete(self, task_id: str) -> bool:
        message = self._held.first(task_id)
        if message is None:
            return False
        self._held.drop(task_id)
        message.accept()
        return True

    async def fail(self, task_id: str, error: str) -> bool:
        held = self._held.first(task_id)
        if held is None:
            return False
        task = decode_task(held.body)
        if task.has_retries_left:
            due_ms = now_ms() + self._settings.retry_delay_ms
            again = message_of(encode_task(task.after_failure()), task_id, not_before=due_ms)
            await self._connections.send(self._addresses.retry, again)
        else:
            failed = FailedTask.now(task, error)
            await self._bury(encode_failed_task(failed), "task", failed.error, task_id)
        # After a crash here it comes again beside its copy: both have one ID.
        return await self.complete(task_id)

    async def _bury_unreadable(self, message: Received, error: str) -> None:
        await self._bury(message.body, "unreadable", error, message.id)
        message.accept()

    async def _bury(self, body: bytes, kind: str, error: str, message_id: str) -> None:
        at = format_timestamp(now_ms())
        dead = message_of(body, message_id, kind=kind, error=error, failed_at=at)
        await self._connections.send(self._addresses.dead, dead)

    async def counts(self) -> tuple[int, int]:
        """Tasks that wait, are delayed, or are with this consumer; and dead letters.

        AMQP 1.0 has no call that counts: the first messages of each queue are looked at.
        """
        pending = {message.id for message in self._delivered()}
        for address in (self._addresses.tasks, self._addresses.retry):
            pending.update(await self._ids(address))
        return len(pending), len(await self._ids(self._addresses.dead))

    async def _ids(self, address: str) -> list[str]:
        async with self._looking:
            browser = await self._connections.browse_ids(address)
            try:
                async with asyncio.timeout(OPERATION_S):
                    return await browser.ids(BROWSED_MAX, COUNTED_BYTES_MAX)
            finally:
                await browser.close()

    async def pending(self) -> AsyncGenerator[bytes, None]:
        for message in self._delivered():
            yield message.body
        for address in (self._addresses.retry, self._addresses.tasks):
            for message in await self._browse(address):
                yield message.body

    def _delivered(self) -> list[Received]:
        """What is with this consumer: taken, or fetched ahead."""
        ahead = [one.arrived for one in (self._waiting, self._retrying) if one is not None]
        return [*self._held, *chain.from_iterable(ahead)]

    async def stop(self) -> None:
        """Nothing to do: what was not accepted goes back with the connection."""

    async def failed(self, limit: int) -> list[FailedTask | UnreadableTask]:
        found: dict[str, FailedTask | UnreadableTask] = {}
        for number, message in enumerate(await self._browse(self._addresses.dead)):
            if message.properties.get("kind") != "event":
                dead = self._read(message, number)
                found[dead.name] = dead.without_payload()
        return sorted(found.values(), key=lambda dead: dead.failed_at)[:limit]

    def _read(self, message: Received, number: int) -> FailedTask | UnreadableTask:
        place = f"message {number} of {self._addresses.dead}"
        return read_dead_letter(message.body, message.properties, place)

    async def retry_all(self, moving: Moving) -> int:
        names, limit = set[str](), BROWSED_MAX
        while True:
            async with self._looking:
                seen, moved = await self._retry(limit, names, moving)
            names |= moved  # a task may be there more than once
            if moved:
                continue  # ActiveMQ shows as many as it has read of the queue
            if seen < limit:
                return len(names)
            limit *= 2  # only what is not retried, which came back: look behind it

    async def _retry(self, limit: int, retried: Set[str], moving: Moving) -> tuple[int, set[str]]:
        """Look at dead letters; returns how many there were, and which tasks moved back.

        Those that were retried before have failed since, and may for ever: they stay.
        """
        receiver = await self._connections.receive(self._addresses.dead)
        moved = set[str]()
        try:
            found = await self._drain(receiver, limit)
            dead_letters = [(message, self._read(message, 0)) for message in found]
            tasks = [
                (message, dead.task)
                for message, dead in dead_letters
                if isinstance(dead, FailedTask) and dead.name not in retried
            ]
            for first in range(0, len(tasks), MOVED_MAX):
                moved |= await self._move(tasks[first : first + MOVED_MAX], moving)
        finally:
            await receiver.close()  # what was not moved goes back
        return len(found), moved

    async def _move(self, tasks: Sequence[tuple[Received, WriteTask]], moving: Moving) -> set[str]:
        """Move the tasks of dead letters back; returns their IDs."""
        names = [task.task_id for _, task in tasks]
        with moving(names):
            await self._enqueue_all([task.renewed() for _, task in tasks])
        for message, _ in tasks:  # after a crash here they come again beside the tasks
            message.accept()
        return {*names}

    async def _browse(self, address: str) -> list[Received]:
        # Some servers show a message to one looker at a time.
        async with self._looking:
            receiver = await self._connections.receive(address, browse=True)
            try:
                return await self._drain(receiver, BROWSED_MAX)
            finally:
                await receiver.close()

    async def _drain(self, receiver: Receiver, limit: int) -> list[Received]:
        # A server that is still starting may never answer.
        async with asyncio.timeout(OPERATION_S):
            return await receiver.drain(limit)


def _due_ms(message: Received) -> int:
    return read_due_ms(message.properties.get("not_before"))
