"""A backend made of two parts: one that carries events, and one that carries tasks."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from libs.events.backend import BackendStats, Handler
from libs.events.deliveries import end_task
from libs.events.tasks import FailedTask, UnreadableTask, WriteTask
from slatemq.errors import FailedPrecondition, SlateMQError
from slatemq.events.envelope import Event

log = logging.getLogger(__name__)


class EventCarrier(Protocol):
    """Publishes events, and delivers them to one handler."""

    async def publish(self, events: Sequence[Event]) -> None:
        """Publish in order; returns once the server has all."""

    async def start(self, types: frozenset[str]) -> None:
        """Subscribe; what is published from now on is kept for this group."""

    async def deliver(self, types: frozenset[str], handler: Handler) -> None:
        """Deliver until cancelled, through outages."""

    async def acknowledge(self, event_id: str) -> None:
        """Finish a delivered event."""

    async def stop(self) -> None:
        """Give what is not acknowledged to other consumers of the group."""


class TaskCarrier(Protocol):
    """Stores tasks, gives them out, and keeps those that failed too often."""

    async def enqueue(self, task: WriteTask) -> None:
        """Store a task."""

    async def dequeue(self) -> WriteTask | None:
        """The next task that is due, or None when none comes within a second."""
        ...

    async def complete(self, task_id: str) -> None:
        """Remove a task."""

    async def fail(self, task_id: str, error: str) -> None:
        """Put a task behind its delay, or among the dead letters."""

    async def retry_all(self) -> int:
        """Move every task among the dead letters back; returns how many."""
        ...

    async def counts(self) -> tuple[int, int]:
        """Tasks that are not finished, and dead letters of both kinds."""
        ...

    async def failed(self, limit: int) -> Sequence[FailedTask | UnreadableTask]:
        """Tasks among the dead letters, without payloads, the oldest first; they stay there."""
        ...

    async def stop(self) -> None:
        """Give what is not finished to other consumers."""


class ComposedBackend(ABC):
    """The calls of QueueBackend, but for `connect` and `health_check`, which each system has."""

    def __init__(self, translated: Callable[[], AbstractContextManager[None]]) -> None:
        """Not connected. `translated` turns the errors of a client library into ours."""
        self._translated = translated
        self._events: EventCarrier
        self._tasks: TaskCarrier
        self._is_connected = False
        self._delivering: asyncio.Task[None] | None = None

    def _compose(self, events: EventCarrier, tasks: TaskCarrier) -> None:
        """Set the two parts: from now on there is something to close."""
        self._events = events
        self._tasks = tasks
        self._is_connected = True

    @abstractmethod
    async def disconnect(self) -> None:
        """Close the connection; others get what is not acknowledged."""

    async def close(self) -> None:
        """See QueueBackend."""
        if not self._is_connected:
            return
        parts = [self._tasks.stop, self.disconnect]
        if self._delivering is not None:
            await end_task(self._delivering)
            parts.insert(0, self._events.stop)
        for part in parts:
            try:
                with self._translated():
                    await part()
            except SlateMQError as error:
                log.info("the connection was lost before it was closed: %s", error)

    async def publish(self, event: Event) -> None:
        """See QueueBackend."""
        await self.publish_batch([event])

    async def publish_batch(self, events: Sequence[Event]) -> None:
        """See QueueBackend."""
        if events:
            with self._translated():
                await self._events.publish(events)

    async def subscribe(self, event_types: Sequence[str], handler: Handler) -> None:
        """See QueueBackend."""
        if self._delivering is not None:
            raise FailedPrecondition("SUBSCRIBED", "this backend has a subscription already")
        types = frozenset(event_types)
        with self._translated():
            await self._events.start(types)
        self._delivering = asyncio.create_task(self._events.deliver(types, handler))

    async def acknowledge(self, event_id: str) -> None:
        """See QueueBackend."""
        with self._translated():
            await self._events.acknowledge(event_id)

    async def enqueue_task(self, task: WriteTask) -> str:
        """See QueueBackend."""
        with self._translated():
            await self._tasks.enqueue(task)
        return task.task_id

    async def dequeue_task(self) -> WriteTask | None:
        """See QueueBackend."""
        with self._translated():
            return await self._tasks.dequeue()

    async def complete_task(self, task_id: str) -> None:
        """See QueueBackend."""
        with self._translated():
            await self._tasks.complete(task_id)

    async def fail_task(self, task_id: str, error: str) -> None:
        """See QueueBackend."""
        with self._translated():
            await self._tasks.fail(task_id, error)

    async def retry_failed_tasks(self) -> int:
        """See QueueBackend."""
        with self._translated():
            return await self._tasks.retry_all()

    async def trim_tasks(self) -> bool:
        """See QueueBackend. Here what is finished is removed at once."""
        return True

    async def stats(self) -> BackendStats:
        """See QueueBackend."""
        with self._translated():
            return BackendStats(*await self._tasks.counts())

    async def failed_tasks(self, limit: int) -> Sequence[FailedTask | UnreadableTask]:
        """See QueueBackend."""
        with self._translated():
            return await self._tasks.failed(limit)
