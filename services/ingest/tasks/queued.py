"""Publishes as tasks: event queues with the consistency `async` or `sync`.

::

    QueuedServicer ─▶ Tasks.enqueue ─▶ body safe ─▶ queue backend ─▶ the task's ID is answered
                                                          │
    TaskServicer ◀── TaskOutcomes ◀── TaskConsumer ◀──────┘
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError
from msgspec.structs import replace

from libs.events.refusals import TooLarge
from libs.events.settings import QueueSettings
from libs.events.tasks import FailedTask, UnreadableTask, WriteTask
from libs.events.watch import QueueHealth
from libs.serving.limits import MESSAGE_DELAY_MS_MAX
from libs.serving.process.exits import ExitCause
from libs.serving.telemetry import Telemetry
from libs.storage.objects.small_objects import Objects
from libs.storage.records.task_records import AppliedTask, FailedTaskRecord, WaitingTask
from services.ingest import wire
from services.ingest.batches import Accepted
from services.ingest.shard import Shard
from services.ingest.tasks.backend import BACKEND_DOWN, COMMIT_GATHER_MS, TaskBackend
from services.ingest.tasks.bodies import (
    ENQUEUE_MS_MAX,
    TaskBodies,
    inline_bytes_max,
    within_task,
)
from services.ingest.tasks.cleanup import TaskCleanup
from services.ingest.tasks.consumer import OPERATION, TaskConsumer
from services.ingest.tasks.outcomes import Attempt, KnownTask, Outcome, TaskOutcomes
from services.ingest.tasks.retries import Retries
from services.ingest.tasks.traces import TaskTraces
from slatemq._admin.task_ids import TaskIds, parse_task_id
from slatemq.errors import WRONG_SHARD, InvalidArgument, NotFound, Unavailable
from slatemq.events.envelope import format_timestamp, parse_timestamp
from slatemq.v1.ingest_pb2 import PublishRequest

log = logging.getLogger(__name__)


class Tasks:
    """The write tasks of one shard, from their acceptance to their end."""

    def __init__(
        self,
        settings: QueueSettings,
        shard: int,
        objects: Objects,
        rules: wire.Rules,
        telemetry: Telemetry,
    ) -> None:
        self.shard = shard
        self.backend_name = settings.backend
        self.consistency = settings.consistency
        self._rules = dataclasses.replace(rules, delay_ms_max=MESSAGE_DELAY_MS_MAX)
        self._ids = TaskIds(shard)
        self._backend = TaskBackend(settings, shard, telemetry.meter)
        self._bodies = TaskBodies(objects, shard, self._backend.place)
        self._traces = TaskTraces(telemetry)
        self._running: asyncio.Task[None] | None = None
        self._draining = asyncio.Event()
        self._opened: Shard
        self._outcomes: TaskOutcomes
        self._consumer: TaskConsumer
        self._retries: Retries
        self._cleanup: TaskCleanup

    async def begin(self, shard: Shard) -> None:
        """Connect to the backend, and apply what waits in it."""
        self._opened = shard
        if self.consistency == "async":
            shard.publisher.commits.gather_ms = COMMIT_GATHER_MS
        self._outcomes = TaskOutcomes(shard.database, shard.publisher, shard.clock)
        self._consumer = TaskConsumer(
            shard.publisher,
            self._backend,
            self._bodies,
            self._outcomes,
            self._accept,
            self._traces,
            shard.clock,
        )
        self._retries = Retries(self._backend, self._outcomes)
        self._cleanup = TaskCleanup(
            shard, self._backend, self._bodies, self._outcomes, self._consumer
        )
        self._running = asyncio.create_task(self._run())
        await self._backend.wait_tried()

    async def wait_fatal(self) -> ExitCause:
        """Return once tasks can no longer be applied."""
        if self._running is None:
            raise RuntimeError("not started")
        try:
            await asyncio.shield(self._running)
        except InvalidArgument as error:
            return ExitCause.usage(f"{error.field}: {error.description}")
        return ExitCause.failed("the consumer of tasks ended")

    def drain(self) -> None:
        """Answer calls that wait for a task with what is known."""
        self._draining.set()

    async def close(self) -> None:
        """Stop applying; tasks that are not applied come again."""
        self._draining.set()
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
            await self._retries.close()
        await self._backend.close()

    async def _run(self) -> None:
        await self._backend.connect()
        async with asyncio.TaskGroup() as works:
            works.create_task(self._consumer.run())
            works.create_task(self._cleanup.run())
            works.create_task(self._backend.watch())

    def serves_without_store(self) -> bool:
        """Whether publishes are accepted while the store is down: the backend has answered."""
        return self._backend.was_connected

    @property
    def held_bytes(self) -> int:
        return 0 if self._running is None else self._consumer.held_bytes

    async def health(self) -> QueueHealth:
        """The state of the backend; never raises."""
        return await self._backend.health()

    def refusal(self) -> str:
        """What the backend refuses now of tasks; empty: nothing."""
        return self._backend.refusal

    # --- Acceptance ---------------------------------------------------------

    def travels_in_task(self, body: bytes) -> bool:
        """Whether a body is not an object, so that the store has no part in its publish."""
        return len(body) <= inline_bytes_max(self._backend.message_bytes_max)

    async def enqueue(self, accepted: Accepted, body: bytes) -> str:
        """Make a publish durable as a task; returns its ID.

        Raises Unavailable (BACKEND_DOWN, or the store of a large body is down): the task may be
        applied or not.
        """
        began_ms = self._opened.clock.now_ms()
        task_id = self._ids.make(began_ms)
        await self._enqueue(task_id, began_ms, accepted, body)
        return task_id

    async def apply(
        self, accepted: Accepted, body: bytes, wait_s: Callable[[], float | None]
    ) -> tuple[str, Outcome | None]:
        """Like `enqueue`, and wait at most `wait_s` from then on for the outcome.

        Nothing of it is read from the store, which may hang: this process applies its own tasks.
        """
        began_ms = self._opened.clock.now_ms()
        task_id = self._ids.make(began_ms)
        future = self._outcomes.wait(task_id)
        try:
            await self._enqueue(task_id, began_ms, accepted, body)
            await self._wait_for(future, wait_s())
        finally:
            self._outcomes.leave(task_id, future)
        return task_id, future.result() if future.done() else None

    async def _enqueue(self, task_id: str, began_ms: int, accepted: Accepted, body: bytes) -> None:
        # Raises before anything is written when the backend is not connected.
        self._backend.connected  # noqa: B018
        task = WriteTask(
            task_id=task_id,
            operation=OPERATION,
            created_at=format_timestamp(began_ms),
            max_retries=self._backend.max_retries,
            payload={
                "shard": self.shard,
                "message_count": len(accepted.payloads),
                **self._traces.carried(),
            },
        )
        # Once: what the backend refused with its body may be stored and applied nonetheless.
        self._outcomes.begin_new(task_id)
        held: Mapping[str, Any] | None = None
        try:
            if not (self.travels_in_task(body) and await self._enter_whole(task, body)):
                held = await self._bodies.put(task_id, body)
        finally:
            if held is None:
                self._outcomes.end_entering(task_id)
        if held is not None:
            # Shielded from the caller: the body of a task that the backend has must be kept.
            entering = asyncio.create_task(
                self._outcomes.keep(task_id, self._backend.enqueue(_with(task, held)))
            )
            entering.add_done_callback(lambda done: done.cancelled() or done.exception())
            try:
                await asyncio.shield(entering)
            except TooLarge as error:  # another one beside it is: RabbitMQ refuses both
                why = f"the task may not be stored: {error}"
                raise Unavailable(why, reason=BACKEND_DOWN) from error
        if self._opened.clock.now_ms() - began_ms > ENQUEUE_MS_MAX:
            raise Unavailable("the task took over five minutes; retry", reason="ENQUEUED_LATE")

    async def _enter_whole(self, task: WriteTask, body: bytes) -> bool:
        """Enqueue a task with its body; False where the backend refuses what is so large."""
        try:
            await self._backend.enqueue(_with(task, within_task(body)))
        except TooLarge as error:
            log.info("the body of task %s becomes an object: %s", task.task_id, error)
            return False
        return True

    async def _wait_for(self, future: asyncio.Future[Outcome], seconds: float | None) -> None:
        """Wait until an outcome is there, the time is over, or this process drains."""
        drained = asyncio.create_task(self._draining.wait())
        try:
            ends: list[asyncio.Future[Any]] = [future, drained]
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()

    def _accept(self, body: bytes) -> Accepted:
        # It was judged before it was answered. Of the instance's bounds only that of delays may
        # have become smaller since.
        try:
            request = PublishRequest.FromString(body)
        except DecodeError as error:
            raise InvalidArgument("payload.body", f"is not a PublishRequest: {error}") from error
        return wire.accept(request, self._rules)

    # --- Outcomes -----------------------------------------------------------

    async def get(self, task_id: str) -> KnownTask:
        """Raises InvalidArgument, NotFound, and the errors of the store.

        Of a task without a record whose age is over a week, Unavailable (BACKEND_DOWN), too.
        """
        named = self._check(task_id)
        record = await self._outcomes.find(task_id)
        if record is None and not await self._may_wait(task_id, named.accepted_at_ms):
            record = await self._outcomes.find(task_id)  # it may have ended meanwhile
            if record is None:
                raise NotFound("task", task_id)
        if isinstance(record, AppliedTask):
            # The disk may be ahead of what readers see here.
            last_id = max(record.first_message_id + record.message_count - 1, 0)
            if last_id > self._opened.log.end.last_message_id:
                await self._opened.publisher.commits.durable()
        last = self._outcomes.last_attempt(task_id)
        outcome = None if isinstance(record, WaitingTask) else record
        if isinstance(record, FailedTaskRecord) and self._outcomes.is_failing(task_id):
            outcome = None
        return KnownTask(task_id, named.accepted_at_ms, outcome, *(last or Attempt(0, "")))

    async def _may_wait(self, task_id: str, accepted_at_ms: int) -> bool:
        """Whether a task without a record may be pending; raises Unavailable (BACKEND_DOWN)."""
        if not self._outcomes.is_over(accepted_at_ms):
            return True
        if self._outcomes.may_be_tried_again(task_id) or self._consumer.is_running(task_id):
            return True
        return not await self._consumer.has_passed(task_id, self._backend.retry_delay_ms)

    async def wait(self, task_id: str, seconds: float | None) -> KnownTask:
        """Like `get`, once the task has an outcome or the time is over."""
        self._check(task_id)
        future = self._outcomes.wait(task_id)
        try:
            known = await self.get(task_id)
            if known.outcome is None:
                await self._wait_for(future, seconds)
                known = await self.get(task_id)
        finally:
            self._outcomes.leave(task_id, future)
        return known

    async def failed(self, limit: int) -> Sequence[KnownTask]:
        """The tasks among the dead letters, each once, and what is unreadable.

        A backend that moves tasks in two steps may keep a dead letter of a task that was applied:
        those are left out. Raises Unavailable, and the errors of the store.
        """
        found: dict[str, KnownTask] = {}
        for dead in await self._backend.connected.failed_tasks(limit):
            if isinstance(dead, UnreadableTask):
                found[dead.place] = _known(dead)
            elif not await self._outcomes.is_applied(dead.task.task_id):
                found[dead.task.task_id] = _known(dead)
        return list(found.values())

    async def pending(self, limit: int) -> Sequence[KnownTask]:
        """Tasks that the backend has not finished, without applied ones; raises as `failed`."""
        found: list[KnownTask] = []
        for task in await self._backend.connected.pending_tasks(limit):
            if not await self._outcomes.is_applied(task.task_id):
                last = self._outcomes.last_attempt(task.task_id)
                error = "" if last is None else last.error
                accepted_at_ms = parse_timestamp("created_at", task.created_at)
                found.append(KnownTask(task.task_id, accepted_at_ms, None, task.attempts, error))
        return found

    async def retry_failed(self) -> int:
        """Move all dead letters back, as Retries does."""
        return await self._retries.retry()

    def _check(self, task_id: str) -> Any:
        named = parse_task_id(task_id)
        if named.shard != self.shard:
            raise InvalidArgument(
                "task_id",
                f"belongs to ingest shard {named.shard}, and this is shard {self.shard}",
                reason=WRONG_SHARD,
                metadata={"shard": str(named.shard)},
            )
        return named


def _with(task: WriteTask, held: Mapping[str, Any]) -> WriteTask:
    return replace(task, payload={**task.payload, **held})


def _known(dead: FailedTask | UnreadableTask) -> KnownTask:
    failed_at_ms = parse_timestamp("failed_at", dead.failed_at)
    if isinstance(dead, UnreadableTask):
        error = f"unreadable: {dead.place}: {dead.error}"
        return KnownTask("", 0, FailedTaskRecord(failed_at_ms, 0, error))
    accepted_at_ms = parse_timestamp("created_at", dead.task.created_at)
    failed = FailedTaskRecord(failed_at_ms, dead.task.attempts, dead.error)
    return KnownTask(dead.task.task_id, accepted_at_ms, failed)
