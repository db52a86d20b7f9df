"""The backend of event queues of a simulated world: it outlives the processes that use it.

It has what arrived, whether that was answered or not. Requests and answers take their time and may
be lost; what is given up by its caller may still land later. Tasks are delivered at least once.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from libs.events.backend import QueueBackend
from libs.events.deliveries import Handler
from libs.events.tasks import FailedTask, Moving, UnreadableTask, WriteTask, encode_task
from libs.serving.events import relay as relays
from services.ingest.events import relay as ingest_relay
from services.ingest.rpc import queued as queued_rpc
from services.ingest.tasks import backend as task_backends
from services.ingest.tasks import queued
from slatemq.errors import Unavailable
from slatemq.events.envelope import Event
from tests.simulation.event_judge import EventJudge
from tests.simulation.judge import Violated
from tests.simulation.loop import MACHINE, WorldLoop

T = TypeVar("T")

LOADED: Final = (ingest_relay, queued, queued_rpc)
"""What an ingest loads when it starts; here it is loaded before the world begins."""

ANSWER_S: Final = 2.0
"""How long a connection waits for an answer."""

RETRY_S: Final = 1.0
"""How long a task waits after a failed attempt."""

POLL_S: Final = 0.2
POLLS: Final = 5
"""How often a consumer looks for a task before it is told that there is none."""


@dataclass
class BackendFaults:
    """How the backend behaves.

    Attributes:
        latency_s: Of one way, in the mean.
        lost_requests: Share of requests that do not arrive.
        lost_answers: Share of answers that do not arrive: what was asked for has happened.
        late: Share of requests that arrive seconds later, when their caller has given up.
        again: Share of finished tasks that are delivered once more.
        down_until_s: Time of the world until which nothing is answered.
    """

    latency_s: float = 0.001
    lost_requests: float = 0.0
    lost_answers: float = 0.0
    late: float = 0.0
    again: float = 0.03
    down_until_s: float = 0.0

    def clear(self) -> None:
        """No faults from now on; tasks still come again."""
        self.lost_requests = self.lost_answers = self.late = self.down_until_s = 0.0


@dataclass(eq=False)
class _Delivery:
    """A task that a connection has, or that comes to it with its next question."""

    task: WriteTask
    is_received: bool = False
    has_ended: bool = False


@dataclass
class TaskQueue:
    """The tasks of one ingest shard.

    Attributes:
        waiting: To be delivered, in order.
        delayed: Those that wait for another attempt.
        owner: The connection that consumes them; one that comes later takes them over.
        held: What the owner was given and has not finished.
        dead: The dead letters.
        done: IDs of tasks that were completed.
    """

    waiting: deque[WriteTask] = field(default_factory=deque)
    delayed: list[WriteTask] = field(default_factory=list)
    owner: SimulatedBackend | None = None
    held: list[_Delivery] = field(default_factory=list)
    dead: list[FailedTask] = field(default_factory=list)
    done: dict[str, None] = field(default_factory=dict)

    @property
    def unfinished(self) -> list[WriteTask]:
        return [*self.delayed, *(one.task for one in self.held), *self.waiting]

    def delay(self, task: WriteTask) -> None:
        self.delayed.append(task)

    def end_delay(self, task: WriteTask) -> None:
        self.delayed.remove(task)
        self.waiting.append(task)


class EventServer:
    """Attributes:
    tasks: By the prefix of their names.
    """

    def __init__(self, loop: WorldLoop, seed: str, judge: EventJudge) -> None:
        self.loop = loop
        self.faults = BackendFaults()
        self.tasks: dict[str, TaskQueue] = {}
        self.judge = judge
        self._chance = random.Random(f"{seed}/backend")

    def install(self) -> None:
        """Let processes that are started from now on connect to it, whatever their settings say."""

        def connection(*_: Any, **options: Any) -> SimulatedBackend:
            return SimulatedBackend(self, **options)

        modules: list[Any] = [relays, task_backends]
        for module in modules:
            module.open_backend = connection

    async def request(self, effect: Callable[[], T]) -> T:
        """What `effect` gives at the moment at which the request arrives.

        Raises Unavailable where no answer comes; it may have had its effect, or will have it.
        """
        answer: asyncio.Future[T] = self.loop.create_future()
        arrives_s = self.loop.time() + self._way_s()
        if self._chance.random() < self.faults.late:
            arrives_s += self._chance.uniform(0.0, 4.0)
        is_down = self.loop.time() < self.faults.down_until_s
        if not is_down and self._chance.random() >= self.faults.lost_requests:
            self.loop.at(arrives_s, self.loop.world, self._take_effect, effect, answer)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            raise Unavailable("no answer from the backend") from None

    def _take_effect(self, effect: Callable[[], T], answer: asyncio.Future[T]) -> None:
        try:
            result = effect()
        except Violated as error:
            self.loop.faults.append(str(error))
            return
        if self._chance.random() >= self.faults.lost_answers:
            self.loop.call_later(self._way_s(), _arrive, answer, result)

    def _way_s(self) -> float:
        return self._chance.uniform(0.2, 1.8) * self.faults.latency_s

    # --- What requests do, when they arrive ---------------------------------

    def publish(self, events: Sequence[Event]) -> None:
        for event in events:
            self.judge.landed(event)

    def take_over(self, place: str, connection: SimulatedBackend) -> None:
        """From now on this connection consumes the tasks, first those of the one before."""
        queue = self.tasks.setdefault(place, TaskQueue())
        if queue.owner is not connection and connection.is_open:
            queue.waiting.extendleft(one.task for one in reversed(queue.held))
            queue.owner, queue.held = connection, []

    def dequeue(self, place: str, connection: SimulatedBackend) -> _Delivery | None:
        """The next task; what was given and has not arrived comes first."""
        queue = self.tasks[place]
        if queue.owner is None or not queue.owner.is_open:
            self.take_over(place, connection)
        if queue.owner is not connection:
            return None
        for delivery in queue.held:
            if not delivery.is_received:
                return delivery
        if not queue.waiting:
            return None
        queue.held.append(_Delivery(queue.waiting.popleft()))
        return queue.held[-1]

    def complete(self, place: str, delivery: _Delivery) -> bool:
        queue = self.tasks[place]
        if delivery not in queue.held:
            return delivery.has_ended  # Else another connection has taken it over.
        queue.held.remove(delivery)
        delivery.has_ended = True
        queue.done[delivery.task.task_id] = None
        if self._chance.random() < self.faults.again:
            queue.waiting.append(delivery.task)
        return True

    def fail(self, place: str, delivery: _Delivery, error: str) -> bool:
        queue = self.tasks[place]
        if delivery not in queue.held:
            return delivery.has_ended
        queue.held.remove(delivery)
        delivery.has_ended = True
        if delivery.task.has_retries_left:
            task = delivery.task.after_failure()
            queue.delay(task)
            self.loop.call_later(RETRY_S, queue.end_delay, task)
        else:
            queue.dead.append(FailedTask.now(delivery.task, error))
        return True

    def retry_all(self, place: str) -> int:
        queue = self.tasks[place]
        queue.waiting.extend(one.task.renewed() for one in queue.dead)
        count, queue.dead = len(queue.dead), []
        return count


def _arrive(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


class SimulatedBackend(QueueBackend):
    """One process's connection."""

    NAME = "the simulated backend"
    _translated = staticmethod(nullcontext)

    def __init__(self, server: EventServer, **options: Any) -> None:
        super().__init__(**options)
        self._server = server
        self._machine = MACHINE.get()
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether its process lives, and has not closed it."""
        return self._machine.is_alive and not self._is_closed

    async def open(self, config: Any) -> None:
        server, place = self._server, config.stream_prefix
        self._compose(_Events(server), _Tasks(server, place, self))
        if self._is_sole_consumer:
            await server.request(lambda: server.take_over(place, self))
        else:
            await server.request(_nothing)

    async def disconnect(self) -> None:
        """What it has not finished stays with it, until another takes over."""
        self._is_closed = True

    async def ping(self) -> None:
        await self._server.request(_nothing)


def _nothing() -> None:
    """A question whose answer alone counts."""


class _Events:
    """See libs.events.backend.EventCarrier; nothing of the world subscribes."""

    def __init__(self, server: EventServer) -> None:
        self._server = server

    async def publish(self, events: Sequence[Event]) -> None:
        await self._server.request(lambda: self._server.publish(events))

    async def start(self, types: frozenset[str]) -> None:
        raise NotImplementedError

    async def deliver(
        self, types: frozenset[str], handler: Handler, note_up: Callable[[], None]
    ) -> None:
        raise NotImplementedError

    async def acknowledge(self, event_id: str) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        """Nothing was delivered."""


class _Tasks:
    """See libs.events.backend.TaskCarrier."""

    def __init__(self, server: EventServer, place: str, connection: SimulatedBackend) -> None:
        self._server = server
        self._place = place
        self._connection = connection
        self._received: dict[str, list[_Delivery]] = {}

    @property
    def _queue(self) -> TaskQueue:
        return self._server.tasks.setdefault(self._place, TaskQueue())

    async def enqueue(self, task: WriteTask) -> None:
        await self._server.request(lambda: self._queue.waiting.append(task))

    async def dequeue(self) -> WriteTask | None:
        server = self._server
        for _ in range(POLLS):
            found = await server.request(lambda: server.dequeue(self._place, self._connection))
            if found is not None and not found.is_received:
                found.is_received = True
                self._received.setdefault(found.task.task_id, []).append(found)
                return found.task
            await asyncio.sleep(POLL_S)
        return None

    async def complete(self, task_id: str) -> bool:
        return await self._finish(task_id, lambda one: self._server.complete(self._place, one))

    async def fail(self, task_id: str, error: str) -> bool:
        return await self._finish(task_id, lambda one: self._server.fail(self._place, one, error))

    async def _finish(self, task_id: str, end: Callable[[_Delivery], bool]) -> bool:
        if not (deliveries := self._received.get(task_id)):
            return False
        delivery = deliveries[0]
        has_ended = await self._server.request(lambda: end(delivery))
        if delivery in deliveries:
            deliveries.remove(delivery)
        return has_ended

    async def retry_all(self, moving: Moving) -> int:
        with moving([dead.name for dead in self._queue.dead]):
            return await self._server.request(lambda: self._server.retry_all(self._place))

    async def counts(self) -> tuple[int, int]:
        queue = self._queue
        return await self._server.request(lambda: (len(queue.unfinished), len(queue.dead)))

    async def failed(self, limit: int) -> Sequence[FailedTask | UnreadableTask]:
        return await self._server.request(lambda: self._queue.dead[:limit])

    async def pending(self) -> AsyncGenerator[bytes, None]:
        for task in await self._server.request(lambda: self._queue.unfinished):
            yield encode_task(task)

    async def stop(self) -> None:
        """What is not finished stays with the connection, until another takes over."""
