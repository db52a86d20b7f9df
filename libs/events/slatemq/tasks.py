"""Tasks in SlateMQ."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress

import msgspec

import slatemq
from libs.events.slatemq.attempts import FAIL_PREFIX, count_failures, failures_count
from libs.events.slatemq.headers import TASKS_HEADER
from libs.events.slatemq.queues import PREFETCH, Queues, finish, release, undecrypted
from libs.events.slatemq.routed import Unrouted
from libs.events.tasks import (
    FailedTask,
    Moving,
    TaskDeliveries,
    UnreadableTask,
    WriteTask,
    cut_error,
    decode_task,
    encode_task,
    read_task,
)
from slatemq.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    SlateMQError,
    Unavailable,
)
from slatemq.events.envelope import format_timestamp
from slatemq.models import now_ms

log = logging.getLogger(__name__)

WAIT_S = 1.0
RETENTION_S = (1 << 32) - 1
"""The longest that ends, 136 years: a publish that was answered waits however long that takes. One
without end would stay stored when it is done."""

REDRIVEN_MAX = 1_000
"""Dead letters that are read before they are redriven: each comes with its payload."""


class _Delivery:
    """A task that was given out; `failing` makes it a dead letter, however often it is repeated."""

    __slots__ = ("failing", "message", "task")

    def __init__(self, task: WriteTask, message: slatemq.Received) -> None:
        self.task = task
        self.message = message
        self.failing = slatemq.CommandContext()


class Tasks:
    """The tasks of one consumer, and the dead letters."""

    def __init__(self, queues: Queues, *, is_sole_consumer: bool) -> None:
        self._queues = queues
        self._unrouted = Unrouted(queues.client, knows_earlier=not is_sole_consumer)
        self._consumer: slatemq.Consumer | None = None
        self._held = TaskDeliveries[_Delivery]()
        self._seen_ms = now_ms()  # when the queue was there last

    async def enqueue(self, task: WriteTask) -> None:
        headers = {TASKS_HEADER: self._queues.settings.queue_prefix}
        client = self._queues.client
        published = client.publish(encode_task(task), headers, retention=RETENTION_S)
        self._unrouted.note(await published)

    async def dequeue(self) -> WriteTask | None:
        if self._consumer is None:
            self._consumer = self._queues.client.consume(self._queues.tasks, prefetch=PREFETCH)
            await self._consumer.__aenter__()
        try:
            async with asyncio.timeout(WAIT_S):
                message = await anext(self._consumer)
        except TimeoutError:
            if self._consumer.outage is not None:
                raise Unavailable("SlateMQ is down", reason="BACKEND_DOWN") from None
            self._seen_ms = now_ms()
            return None
        except SlateMQError as error:  # which this consumer would raise for ever
            consumer, self._consumer = self._consumer, None
            await consumer.close()
            if not isinstance(error, NotFound):
                raise
            # Meanwhile tasks are answered that no queue takes.
            tasks = self._queues.tasks
            await self._queues.create_again(tasks, TASKS_HEADER, (), self._seen_ms)
            return None
        self._seen_ms = now_ms()
        if not await self._queues.takes(message, TASKS_HEADER):
            return None
        try:
            attempts = await failures_count(self._queues.client, message)
        except BaseException:
            self._consumer.requeue(message)
            raise
        fault = undecrypted(message)
        if isinstance(fault, FailedPrecondition):
            log.warning("a task cannot be decrypted: %s", fault.message)
            is_early = attempts < self._queues.settings.max_retries
            await self._queues.end_attempt(message, fault.message, has_retries_left=is_early)
            return None
        if fault is not None:
            log.error("a damaged task goes to the dead letters: %s", fault.message)
        task = read_task(message.payload) if fault is None else fault.message
        if isinstance(task, str):
            await finish(message.fail(task))
            return None
        task = msgspec.structs.replace(task, attempts=attempts)
        self._held.add(task.task_id, _Delivery(task, message))
        return task

    async def complete(self, task_id: str) -> bool:
        held = self._held.first(task_id)
        if held is None:
            return False
        has_ended = await finish(held.message.ack())
        self._held.drop(task_id)
        return has_ended

    async def fail(self, task_id: str, error: str) -> bool:
        held = self._held.first(task_id)
        if held is None:
            return False
        if held.task.has_retries_left:
            delay_s = self._queues.settings.retry_delay_ms / 1000
            has_ended = await finish(held.message.nack(error, delay_s))
        else:
            # Not `message.fail`: where that has no answer, the next call cannot know its end.
            if not held.failing:
                held.failing.add(slatemq.Fail(held.message, error))
            has_ended = await finish(self._queues.client.execute(held.failing))
        self._held.drop(task_id)
        return has_ended

    async def retry_all(self, moving: Moving) -> int:
        """Redrive what is a task, and failed before this; what is not would fail again."""
        count, dead_ids, last_ms = 0, dict[int, str](), await self._last_failed_ms()
        async with aclosing(self._dead_letters()) as dead_letters:
            async for entry, dead in dead_letters:
                if entry.finished_at_ms > last_ms:
                    break
                if isinstance(dead, FailedTask):
                    dead_ids[entry.message_id] = dead.name
                if len(dead_ids) == REDRIVEN_MAX:
                    count += await self._redrive(dead_ids, moving)
                    dead_ids.clear()
        return count + (await self._redrive(dead_ids, moving) if dead_ids else 0)

    async def _last_failed_ms(self) -> int:
        """When the newest dead letter failed, by the clock of its broker; 0 without one."""
        async for entry in self._queues.client.list_entries(
            self._queues.tasks, slatemq.EntryState.FAILED, newest_first=True
        ):
            return entry.finished_at_ms
        return 0

    async def _redrive(self, dead_ids: Mapping[int, str], moving: Moving) -> int:
        """Redrive dead letters, task IDs by message IDs; returns how many."""
        client, queue = self._queues.client, self._queues.tasks
        with moving(dead_ids.values()):
            redrive = await client.start_redrive(queue, message_ids=[*dead_ids])
            done = await client.wait_redrive(redrive, every=0.1)
            if done.state is not slatemq.RedriveState.DONE:
                raise Unavailable(f"the redrive stopped: {done.error}", reason="REDRIVE_STOPPED")
        return done.redriven_count

    async def counts(self) -> tuple[int, int]:
        client = self._queues.client
        reached = await self._unrouted.look()
        queue = await client.get_queue(self._queues.tasks)
        tasks, unrouted = queue.counts, self._unrouted.count(reached, queue.broker_shards)
        dead = tasks.failed_count
        # No queue of events before the first subscription.
        with suppress(NotFound):
            dead += (await client.get_queue(self._queues.events)).counts.failed_count
        queued = tasks.available_count + tasks.delayed_count + tasks.in_flight_count
        return queued + unrouted, dead

    async def failed(self, limit: int) -> list[FailedTask | UnreadableTask]:
        found: list[FailedTask | UnreadableTask] = []
        async with aclosing(self._dead_letters()) as dead_letters:
            async for _, dead in dead_letters:
                found.append(dead)
                if len(found) == limit:
                    break
        return found

    async def _dead_letters(
        self,
    ) -> AsyncGenerator[tuple[slatemq.Entry, FailedTask | UnreadableTask], None]:
        async for entry in self._queues.client.list_entries(
            self._queues.tasks, slatemq.EntryState.FAILED, view=slatemq.EntryView.FULL
        ):
            if entry.message is not None:
                yield entry, self._failed_task(entry, entry.message)

    def _failed_task(
        self, entry: slatemq.Entry, message: slatemq.StoredMessage
    ) -> FailedTask | UnreadableTask:
        failed_at = format_timestamp(entry.finished_at_ms)
        try:
            task = decode_task(message.payload)
        except (InvalidArgument, FailedPrecondition, DataLoss) as error:
            place = f"message {entry.message_id} of the queue {self._queues.tasks}"
            return UnreadableTask(place=place, error=cut_error(str(error)), failed_at=failed_at)
        return FailedTask(
            task=msgspec.structs.replace(
                task, attempts=count_failures(entry.attempts, entry.attempts_count), payload={}
            ),
            error=entry.reason.removeprefix(FAIL_PREFIX),
            failed_at=failed_at,
        )

    async def pending(self) -> AsyncGenerator[bytes, None]:
        for state in (
            slatemq.EntryState.DELAYED,
            slatemq.EntryState.IN_FLIGHT,
            slatemq.EntryState.AVAILABLE,
        ):
            async for entry in self._queues.client.list_entries(
                self._queues.tasks, state, view=slatemq.EntryView.FULL
            ):
                if entry.message is not None and not undecrypted(entry.message):
                    yield entry.message.payload

    async def stop(self) -> None:
        await release([held.message for held in self._held])
