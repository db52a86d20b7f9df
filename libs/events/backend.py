"""What carries events and write tasks.

Both are delivered at least once, always with the same ID. Nothing is buffered here: a call
returns when the backend has what it was given, and raises Unavailable when the backend cannot be
reached, so that the caller decides what waits and where.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol
from weakref import WeakValueDictionary

import msgspec
from opentelemetry.metrics import NoOpMeter

from libs.events.deliveries import Handler, end_task
from libs.events.measures import EVENT, TASK, QueueMeasures
from libs.events.refusals import TooLarge
from libs.events.retrying import Outage
from libs.events.tasks import (
    ERROR_BYTES_MAX,
    SHORT_ERROR_BYTES_MAX,
    FailedTask,
    Moving,
    UnreadableTask,
    WriteTask,
    cut_error,
    decode_task,
)
from libs.events.tls_faults import TlsFault
from slatemq._secrets import redacted
from slatemq.errors import (
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    SlateMQError,
    Unauthenticated,
    Unavailable,
)
from slatemq.events.envelope import Event, check_type

log = logging.getLogger(__name__)

REFUSAL_LOG_S: Final = 60.0
"""How often a backend that refuses calls is logged: each of many publishes may be refused."""

REFUSAL_S: Final = 60.0
"""For how long a backend that has refused a call counts as one that does: another may never come
while it does."""


@dataclass(frozen=True, slots=True)
class BackendStats:
    """What waits in a backend.

    Attributes:
        pending_tasks: Tasks that are neither complete nor dead letters.
        dead_letter_count: Tasks and events in the dead-letter place.
    """

    pending_tasks: int
    dead_letter_count: int


class EventCarrier(Protocol):
    """The part of a backend that publishes events, and delivers them to one handler."""

    async def publish(self, events: Sequence[Event]) -> None:
        """Publish in order; returns once the server has all."""

    async def start(self, types: frozenset[str]) -> None:
        """Subscribe; what is published from now on is kept for this group."""

    async def deliver(
        self, types: frozenset[str], handler: Handler, note_up: Callable[[], None]
    ) -> None:
        """Deliver, subscribing where that is needed; raises when the connection is lost.

        `note_up` is called whenever the server has answered.
        """

    async def acknowledge(self, event_id: str) -> None:
        """Finish a delivered event."""

    async def stop(self) -> None:
        """Give what is not acknowledged to other consumers of the group."""


class TaskCarrier(Protocol):
    """The part of a backend that stores tasks; its calls are those of QueueBackend."""

    async def enqueue(self, task: WriteTask) -> None: ...

    async def dequeue(self) -> WriteTask | None: ...

    async def complete(self, task_id: str) -> bool:
        """Returns whether a delivery of the task has ended; if not, the task comes again."""
        ...

    async def fail(self, task_id: str, error: str) -> bool:
        """Returns as `complete`."""
        ...

    async def retry_all(self, moving: Moving) -> int: ...

    async def counts(self) -> tuple[int, int]:
        """Tasks that are not finished, and dead letters of both kinds."""
        ...

    async def failed(self, limit: int) -> Sequence[FailedTask | UnreadableTask]: ...

    def pending(self) -> AsyncGenerator[bytes, None]:
        """The tasks that are not finished, as JSON, as far as the system shows them.

        Those that wait for another attempt first, then the oldest. A task may come twice.
        """
        ...

    async def stop(self) -> None:
        """Give what is not finished to other consumers."""


class QueueBackend(ABC):
    """A connection to one system, used by one event loop.

    Every method but `close` raises Unavailable while the system cannot be reached, and where it
    refuses what it took before; the next call tries again, so a backend comes back by itself.
    Before `connect` and after `close` they raise it, too, and reach for nothing.
    """

    NAME: ClassVar[str]
    """Of the system, for the log."""

    HEALTH_S: ClassVar[float] = 3.0
    """How long a server that is up may take to answer `health_check`."""

    _translated: Callable[[], AbstractContextManager[None]]
    """Turns the errors of a client library into ours."""

    message_bytes_max: float = math.inf
    """Bytes of an event or a task that it takes at most, as far as it has said so."""

    measures = QueueMeasures("", NoOpMeter("slatemq"))

    def __init__(self, *, is_sole_consumer: bool = False, gather_ms: int = 0) -> None:
        """Not connected; `open_backend` says what the options mean to backends that have them."""
        self._is_sole_consumer = is_sole_consumer
        self._gather_ms = gather_ms
        self._parts: tuple[EventCarrier, TaskCarrier] | None = None
        self._delivering: asyncio.Task[None] | None = None
        self._delivered: dict[str, Event] = {}
        self._dequeued: dict[str, WriteTask] = {}
        self._cut: set[str] = set()
        self._refusal_logged_s = -math.inf
        self._refusals: dict[str, tuple[float, str]] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # --- Life cycle ---------------------------------------------------------

    async def connect(self, config: Any) -> None:
        """Connect, and create what is missing on the server; `config` is the backend's section.

        Close it also where that fails, and before it is connected again.

        Raises:
            InvalidArgument: The server refuses a setting; names the key.
            FailedPrecondition: It was connected, and is not closed.
        """
        if self._parts is not None:
            raise FailedPrecondition("CONNECTED", "this backend was connected: close it first")
        await self.open(config)

    @abstractmethod
    async def open(self, config: Any) -> None:
        """What `connect` does."""

    @asynccontextmanager
    async def _opening(
        self, key: str, find_tls_fault: Callable[[], Awaitable[TlsFault | None]]
    ) -> AsyncIterator[None]:
        """Raises InvalidArgument with the key of its address for what the system refuses.

        So it does where the system is not down, but TLS keeps it from answering; `find_tls_fault`
        may raise it for something else in the address.
        """
        try:
            with self._translated():
                yield
        except FailedPrecondition as error:
            raise InvalidArgument(key, error.message) from error
        except Unavailable:
            if fault := await find_tls_fault():
                raise InvalidArgument(key, fault.description) from None
            raise

    @abstractmethod
    async def disconnect(self) -> None:
        """Close the connection; others get what is not acknowledged."""

    @abstractmethod
    async def ping(self) -> None:
        """Return once the server has answered; raises the errors of the client library."""

    def _compose(self, events: EventCarrier, tasks: TaskCarrier) -> None:
        """Set the two parts: from now on there is something to close."""
        self._parts = events, tasks

    @property
    def _connected(self) -> tuple[EventCarrier, TaskCarrier]:
        """Its parts. Raises Unavailable without them, so that no call opens what none closes."""
        if self._parts is None:
            raise Unavailable(f"{self.NAME} is not connected, or closed", reason="BACKEND_DOWN")
        return self._parts

    @property
    def _events(self) -> EventCarrier:
        return self._connected[0]

    @property
    def _tasks(self) -> TaskCarrier:
        return self._connected[1]

    async def close(self) -> None:
        """Stop deliveries and disconnect; what is not acknowledged comes again, to others too.

        It disconnects also where it is cancelled before.
        """
        if self._parts is None:
            return
        events, tasks = self._parts
        try:
            if self._delivering is not None:
                await end_task(self._delivering)
                await self._end(events.stop)
            await self._end(tasks.stop)
        finally:
            self._parts = self._delivering = None
            await self._end(self.disconnect)

    async def _end(self, part: Callable[[], Awaitable[None]]) -> None:
        try:
            with self._translated():
                await part()
        except SlateMQError as error:
            log.info("the connection was lost before it was closed: %s", error)

    async def health_check(self) -> bool:
        """Whether the system answers now, within a few seconds; never raises."""
        if self._parts is None:
            return False
        try:
            async with asyncio.timeout(self.HEALTH_S):
                with self._calling("ping"):
                    await self.ping()
        except (SlateMQError, TimeoutError):
            return False
        return True

    @property
    def refusal(self) -> str:
        """What it has refused within the last minute, and not taken since; empty: nothing."""
        since_s = time.monotonic() - REFUSAL_S
        return next((why for at_s, why in self._refusals.values() if at_s > since_s), "")

    @contextmanager
    def _calling(self, call: str = "") -> Iterator[None]:
        """Raises our errors; Unavailable also for what the system refuses of a call of ours.

        It took the settings when it was connected to. So an operator has changed the system, and
        changes it back: callers are to repeat their calls, as in an outage. With the name of a
        call, `refusal` has it until one of that name succeeds.
        """
        try:
            with self._translated():
                yield
        except TooLarge:
            raise  # it is about what was sent, not about the system
        except (FailedPrecondition, PermissionDenied, Unauthenticated) as error:
            raise self._refused(error, call) from error
        self._refusals.pop(call, None)

    def _refused(self, error: SlateMQError, call: str) -> Unavailable:
        """What callers get; the operators get it in the log."""
        now_s = time.monotonic()
        if call:
            self._refusals[call] = now_s, redacted(error.message)
        if now_s - self._refusal_logged_s >= REFUSAL_LOG_S:
            self._refusal_logged_s = now_s
            log.error("%s refuses calls: %s", self.NAME, error)
        return Unavailable(error.message, reason="BACKEND_DOWN")

    # --- Events -------------------------------------------------------------

    async def publish(self, event: Event) -> None:
        """Publish an event; returns once the system has it as durably as it is set up to."""
        await self.publish_batch([event])

    async def publish_batch(self, events: Sequence[Event]) -> None:
        """Publish events in order.

        When it raises, any of them may have been published: publish all of them again. Raises
        TooLarge, too, whose counterpart is smaller events.
        """
        if not events:
            return
        try:
            with self._calling("publish"):
                await self._events.publish(events)
        except TooLarge as error:  # no failure yet: the caller makes them smaller
            self.message_bytes_max = min(self.message_bytes_max, error.bytes_max)
            raise
        except SlateMQError:
            self.measures.note_failed(EVENT, "publish", len(events))
            raise
        for event in events:
            self.measures.note_published(EVENT, event.timestamp)

    async def subscribe(self, event_types: Sequence[str], handler: Handler) -> None:
        """Begin to deliver the events of these types; no types means all.

        Subscribers of one consumer group with the same types share the events. Those with other
        types are a group of their own (`group_of`), as are those of another group: each gets all of
        its types that were published since its first subscription. What waits for a group without
        subscribers waits on, also after its program has changed its types.

        An event that was not acknowledged when its handler returns or raises is delivered again
        after the retry delay, at most `max_retries` times, then it goes to the dead-letter place.
        Where its consumer dies, some systems deliver it more often.

        At most one subscription for each backend object.

        Raises InvalidArgument for what is not a list of types: no event would ever come.
        """
        if isinstance(event_types, str):
            raise InvalidArgument("event_types", f"must be a list of types, not {event_types!r}")
        for at, one in enumerate(event_types):
            check_type(f"event_types[{at}]", one)
        if self._delivering is not None:
            raise FailedPrecondition("SUBSCRIBED", "this backend has a subscription already")
        types = frozenset(event_types)
        parts = self._connected
        events, _ = parts
        with self._calling():
            await events.start(types)
        if self._parts is not parts:  # `close` could not end what had not begun
            await self._end(events.stop)
            raise Unavailable(f"{self.NAME} was closed", reason="BACKEND_DOWN")

        async def counted(event: Event) -> None:
            self._delivered[event.id] = event
            try:
                await handler(event)
            finally:
                # Acknowledged events have gone from there.
                if self._delivered.pop(event.id, None) is not None:
                    self.measures.note_failed(EVENT, "consume")

        self._delivering = asyncio.create_task(self._deliver(types, counted))

    async def _deliver(self, types: frozenset[str], handler: Handler) -> None:
        """Deliver until cancelled, through any error."""
        outage = Outage(log, self.NAME)
        while True:
            try:
                with self._calling():
                    await self._events.deliver(types, handler, outage.end)
            except SlateMQError as error:
                await outage.wait(error)
            except Exception as error:  # a fault, of a library say, must not end them unseen
                log.exception("deliveries by %s fail", self.NAME)
                await outage.wait(error)

    async def acknowledge(self, event_id: str) -> None:
        """Finish an event that the handler was given. Acknowledging again does nothing.

        Call it from the handler: once that has returned, the event may be with the system again,
        which gives it to any consumer. Then a call does nothing on some systems.
        """
        with self._calling():
            await self._events.acknowledge(event_id)
        event = self._delivered.pop(event_id, None)
        if event is not None:
            self.measures.note_consumed(EVENT, event.timestamp)

    # --- Tasks --------------------------------------------------------------

    async def enqueue_task(self, task: WriteTask) -> str:
        """Store a task; returns its ID. Enqueueing one again may deliver it twice.

        Raises TooLarge, too.
        """
        try:
            with self._calling("enqueue"):
                await self._tasks.enqueue(task)
        except TooLarge as error:  # no failure yet: the caller makes it smaller
            self.message_bytes_max = min(self.message_bytes_max, error.bytes_max)
            raise
        except SlateMQError as error:
            self.measures.note_failed(TASK, "publish")
            if isinstance(error, InvalidArgument) and error.field.startswith("queue."):
                raise self._refused(error, "enqueue") from error  # it lost what holds tasks
            raise
        self.measures.note_published(TASK, task.created_at)
        return task.task_id

    async def dequeue_task(self) -> WriteTask | None:
        """The next task that is due, or None when none comes within a second or so: ask again.

        No other consumer gets it until it is completed, failed, or the one that has it is gone.
        """
        with self._calling("dequeue"):
            task = await self._tasks.dequeue()
        if task is not None:
            self._dequeued[task.task_id] = task
        return task

    async def complete_task(self, task_id: str) -> None:
        """Remove a task that was dequeued. Completing again does nothing."""
        async with self._turn_of(task_id):
            with self._calling("complete"):
                await self._tasks.complete(task_id)
        task = self._dequeued.pop(task_id, None)
        if task is not None:
            self.measures.note_consumed(TASK, task.created_at)

    async def fail_task(self, task_id: str, error: str) -> bool:
        """Count a failed attempt of a task that was dequeued.

        It comes again after the retry delay, or goes to the dead-letter place with `error` when no
        retries are left, with less of it where that one is too large. Returns False where its
        delivery was lost meanwhile: then it comes again as it was, though it may be a dead letter,
        too.

        Raises TooLarge, too, where it is so without its error.
        """
        async with self._turn_of(task_id):
            try:
                has_ended = await self._fail(task_id, error)
            except TooLarge as refused:
                if task_id in self._cut:
                    raise
                log.warning("the error of task %s is cut: %s", task_id, refused)
                self._cut.add(task_id)  # also where it comes again
                has_ended = await self._fail(task_id, error)
            if has_ended:
                self._cut.discard(task_id)
        if self._dequeued.pop(task_id, None) is not None:
            self.measures.note_failed(TASK, "consume")
        return has_ended

    async def _fail(self, task_id: str, error: str) -> bool:
        bytes_max = SHORT_ERROR_BYTES_MAX if task_id in self._cut else ERROR_BYTES_MAX
        with self._calling("fail"):
            return await self._tasks.fail(task_id, cut_error(error, bytes_max))

    def _turn_of(self, task_id: str) -> asyncio.Lock:
        """Held while a task ends: a second call at that time would end the same delivery twice."""
        return self._turns.setdefault(task_id, asyncio.Lock())

    async def retry_failed_tasks(self, moving: Moving = nullcontext) -> int:
        """Move every task of the dead-letter place back, as if new; returns how many.

        Each moves within `moving`, one or several at a time.
        """
        with self._calling():
            return await self._tasks.retry_all(moving)

    async def trim_tasks(self) -> bool:
        """Let the system remove the tasks that are finished, where it has not yet.

        Returns whether they cannot come again: also when the system forgets how far it was.
        """
        return True

    # --- What waits ---------------------------------------------------------

    async def stats(self) -> BackendStats:
        """How much waits now."""
        with self._calling():
            return BackendStats(*await self._tasks.counts())

    async def failed_tasks(self, limit: int) -> Sequence[FailedTask | UnreadableTask]:
        """The tasks of the dead-letter place, without payloads, the oldest first, at most `limit`.

        Entries that are not tasks are listed with them. Raises InvalidArgument for a limit below 1.
        """
        _check_limit(limit)
        with self._calling():
            return await self._tasks.failed(limit)

    async def pending_tasks(self, limit: int) -> Sequence[WriteTask]:
        """Tasks that are not finished, without payloads, the oldest first, at most `limit`.

        Those that wait for another attempt come before others are left out. What is no task is left
        out: it becomes a dead letter when it is its turn. Raises as `failed_tasks`.
        """
        _check_limit(limit)
        found: dict[str, WriteTask] = {}
        with self._calling():
            async with aclosing(self._tasks.pending()) as pending:
                async for encoded in pending:
                    with suppress(InvalidArgument):
                        task = decode_task(encoded)
                        found[task.task_id] = msgspec.structs.replace(task, payload={})
                    if len(found) == limit:
                        break
        return sorted(found.values(), key=lambda task: (task.created_at, task.task_id))


def _check_limit(limit: int) -> None:
    if limit < 1:
        raise InvalidArgument("limit", f"must be at least 1, not {limit}")
