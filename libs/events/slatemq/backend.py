"""The backend of SlateMQ."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

import slatemq
from libs.events.backend import BackendStats, Handler
from libs.events.cancellations import keeping_cancellations
from libs.events.deliveries import end_task, run_handler
from libs.events.held_tasks import HeldTasks
from libs.events.retrying import Outage
from libs.events.settings import SlatemqSettings
from libs.events.slatemq.headers import EVENTS_HEADER, TASKS_HEADER
from libs.events.tasks import (
    FailedTask,
    UnreadableTask,
    WriteTask,
    cut_error,
    decode_task,
    encode_task,
)
from slatemq.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SlateMQError,
    Unavailable,
)
from slatemq.events.envelope import Event, decode_event, encode_event, format_timestamp

log = logging.getLogger(__name__)

TYPE_HEADER = "type"

WAIT_S = 1.0
CALL_S = 10.0
HEALTH_S = 3.0
PREFETCH = 10
FAIL_PREFIX = "fail: "
"""What SlateMQ writes before the reason of a message that its consumer gave up."""

ATTEMPTS_MAX = 65_535
"""Of the queues: tasks and settings count for themselves when an attempt is the last."""


@contextmanager
def _translated() -> Iterator[None]:
    """A call that was not answered in time, or not let in, is one to repeat."""
    try:
        with keeping_cancellations():
            yield
    except (DeadlineExceeded, ResourceExhausted) as error:
        raise Unavailable(f"SlateMQ does not answer: {error}", reason="BACKEND_DOWN") from error


class SlatemqBackend:
    """Events and tasks in SlateMQ."""

    def __init__(self) -> None:
        """Not connected yet."""
        self._settings: SlatemqSettings
        self._client: slatemq.Client | None = None
        self._tasks: slatemq.Consumer | None = None
        self._held_tasks = HeldTasks[tuple[WriteTask, slatemq.Received]]()
        self._held_events: dict[str, slatemq.Received] = {}
        self._delivering: asyncio.Task[None] | None = None

    async def connect(self, config: SlatemqSettings) -> None:
        """See QueueBackend. Raises InvalidArgument, Unavailable."""
        self._settings = config
        client = slatemq.connect(config.endpoint, call_timeout=CALL_S)
        with _translated():
            try:
                await client.__aenter__()
                self._client = client
                await self._ensure_queue(self._tasks_queue, TASKS_HEADER, ())
            except InvalidArgument as error:
                raise InvalidArgument("queue.slatemq", error.message) from error

    async def close(self) -> None:
        """See QueueBackend."""
        if self._client is None:
            return
        if self._delivering is not None:
            await end_task(self._delivering)
        held = [message for _, message in self._held_tasks]
        results = await asyncio.gather(
            *(message.release() for message in [*held, *self._held_events.values()]),
            return_exceptions=True,
        )
        for error in results:
            if isinstance(error, SlateMQError):
                log.info("comes again when its lease ends: %s", error)
        await self._client.close()

    async def health_check(self) -> bool:
        """See QueueBackend."""
        try:
            async with asyncio.timeout(HEALTH_S):
                await self._running.get_queue(self._tasks_queue)
        except (SlateMQError, TimeoutError):
            return False
        return True

    # --- Events -------------------------------------------------------------

    async def publish(self, event: Event) -> None:
        """See QueueBackend."""
        await self.publish_batch([event])

    async def publish_batch(self, events: Sequence[Event]) -> None:
        """See QueueBackend."""
        prefix = self._settings.queue_prefix
        messages = [
            slatemq.OutgoingMessage(
                encode_event(event), {EVENTS_HEADER: prefix, TYPE_HEADER: event.type}
            )
            for event in events
        ]
        if messages:
            with _translated():
                await self._running.publish_many(messages)

    async def subscribe(self, event_types: Sequence[str], handler: Handler) -> None:
        """See QueueBackend."""
        if self._delivering is not None:
            raise FailedPrecondition("SUBSCRIBED", "this backend has a subscription already")
        with _translated():
            await self._ensure_queue(self._events_queue, EVENTS_HEADER, event_types)
        self._delivering = asyncio.create_task(self._deliver(handler))

    async def acknowledge(self, event_id: str) -> None:
        """See QueueBackend."""
        message = self._held_events.pop(event_id, None)
        if message is not None:
            with _translated():
                await self._finish(message.ack())

    async def _deliver(self, handler: Handler) -> None:
        outage = Outage(log, "SlateMQ")
        while True:
            try:
                async with self._running.consume(self._events_queue, prefetch=PREFETCH) as messages:
                    async for message in messages:
                        outage.end()
                        await self._deliver_one(message, handler)
            except (Unavailable, ResourceExhausted, DeadlineExceeded) as error:
                await outage.wait(error)
            except NotFound as error:
                log.error("the queue of events was deleted: %s", error)
                await outage.wait(error)

    async def _deliver_one(self, message: slatemq.Received, handler: Handler) -> None:
        try:
            event = decode_event(message.payload)
        except InvalidArgument as error:
            why = cut_error(str(error))
            log.error("message %d is not an event: %s", message.message_id, why)
            await self._finish(message.fail(why))
            return
        self._held_events[event.id] = message
        await run_handler(handler, event)
        if self._held_events.pop(event.id, None) is None:
            return
        reason = "no subscriber acknowledged it"
        if message.attempts_count > self._settings.max_retries:
            await self._finish(message.fail(reason))
        else:
            await self._finish(message.nack(reason, self._settings.retry_delay_ms / 1000))

    # --- Tasks --------------------------------------------------------------

    async def enqueue_task(self, task: WriteTask) -> str:
        """See QueueBackend."""
        headers = {TASKS_HEADER: self._settings.queue_prefix}
        with _translated():
            await self._running.publish(encode_task(task), headers)
        return task.task_id

    async def dequeue_task(self) -> WriteTask | None:
        """See QueueBackend."""
        if self._tasks is None:
            self._tasks = self._running.consume(self._tasks_queue, prefetch=PREFETCH)
            await self._tasks.__aenter__()
        with _translated():
            try:
                async with asyncio.timeout(WAIT_S):
                    message = await anext(self._tasks)
            except TimeoutError:
                if self._tasks.outage is not None:
                    raise Unavailable("SlateMQ is down", reason="BACKEND_DOWN") from None
                return None
        try:
            task = decode_task(message.payload)
        except InvalidArgument as error:
            why = cut_error(str(error))
            log.error("what is not a task goes to the dead letters: %s", why)
            with _translated():
                await self._finish(message.fail(why))
            return None
        task = msgspec.structs.replace(task, attempts=message.attempts_count - 1)
        self._held_tasks.add(task.task_id, (task, message))
        return task

    async def complete_task(self, task_id: str) -> None:
        """See QueueBackend."""
        held = self._held_tasks.first(task_id)
        if held is not None:
            with _translated():
                await self._finish(held[1].ack())
            self._held_tasks.drop(task_id)

    async def fail_task(self, task_id: str, error: str) -> None:
        """See QueueBackend."""
        held = self._held_tasks.first(task_id)
        if held is None:
            return
        task, message = held
        with _translated():
            if task.has_retries_left:
                delay_s = self._settings.retry_delay_ms / 1000
                await self._finish(message.nack(error, delay_s))
            else:
                await self._finish(message.fail(error))
        self._held_tasks.drop(task_id)

    async def retry_failed_tasks(self) -> int:
        """See QueueBackend."""
        with _translated():
            redrive = await self._running.start_redrive(self._tasks_queue)
            done = await self._running.wait_redrive(redrive, every=0.1)
        if done.state is not slatemq.RedriveState.DONE:
            raise Unavailable(f"the redrive stopped: {done.error}", reason="REDRIVE_STOPPED")
        return done.redriven_count

    async def trim_tasks(self) -> bool:
        """See QueueBackend. Here what is finished is removed at once."""
        return True

    async def stats(self) -> BackendStats:
        """See QueueBackend."""
        with _translated():
            tasks = (await self._running.get_queue(self._tasks_queue)).counts
            dead = tasks.failed_count
            # No queue of events before the first subscription.
            with suppress(NotFound):
                dead += (await self._running.get_queue(self._events_queue)).counts.failed_count
        pending = tasks.available_count + tasks.delayed_count + tasks.in_flight_count
        return BackendStats(pending, dead)

    async def failed_tasks(self, limit: int) -> list[FailedTask | UnreadableTask]:
        """See QueueBackend."""
        found: list[FailedTask | UnreadableTask] = []
        with _translated():
            async for entry in self._running.list_entries(
                self._tasks_queue, slatemq.EntryState.FAILED, view=slatemq.EntryView.FULL
            ):
                if len(found) == limit:
                    break
                if entry.message is not None:
                    found.append(self._failed_task(entry, entry.message.payload))
        return found

    def _failed_task(self, entry: slatemq.Entry, payload: bytes) -> FailedTask | UnreadableTask:
        failed_at = format_timestamp(entry.finished_at_ms)
        try:
            task = decode_task(payload)
        except InvalidArgument as error:
            place = f"message {entry.message_id} of the queue {self._tasks_queue}"
            return UnreadableTask(place=place, error=cut_error(str(error)), failed_at=failed_at)
        return FailedTask(
            task=msgspec.structs.replace(task, attempts=entry.attempts_count, payload={}),
            error=entry.reason.removeprefix(FAIL_PREFIX),
            failed_at=failed_at,
        )

    # --- What they share ----------------------------------------------------

    @property
    def _running(self) -> slatemq.Client:
        assert self._client is not None, "not connected"
        return self._client

    @property
    def _tasks_queue(self) -> str:
        return f"{self._settings.queue_prefix}.tasks"

    @property
    def _events_queue(self) -> str:
        return f"{self._settings.queue_prefix}.events.{self._settings.consumer_group}"

    async def _ensure_queue(self, queue_id: str, header: str, types: Sequence[str]) -> None:
        """Create a queue, or change its filter where it exists."""
        prefix = json.dumps(self._settings.queue_prefix)
        text = f'headers["{header}"] == {prefix}'
        if types:
            text += f" && headers.{TYPE_HEADER} in {json.dumps(sorted(types))}"
        try:
            await self._running.create_queue(queue_id, filter=text, max_attempts=ATTEMPTS_MAX)
        except AlreadyExists:
            await self._running.update_queue(queue_id, filter=text)

    async def _finish(self, finishing: Awaitable[None]) -> None:
        """Finish a message; one whose lease has ended comes again, to another consumer perhaps."""
        try:
            await finishing
        except FailedPrecondition as error:
            log.info("comes again: %s", error)
