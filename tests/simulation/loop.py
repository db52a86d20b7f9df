"""The event loop of a simulated world: many machines, one thread, no clock but its own.

Each machine has a queue of callbacks, which run in their order, as asyncio promises. Between
machines chance decides: after every step, a task's way from one `await` to the next, any machine
that has something to do may go on. When none has, time jumps to the next timer. So a run is the
consequence of its seed alone, and of the code.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
from asyncio import base_events, events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, TypeVar

from tests.simulation.chance import BEGIN_S, CLOCK

T = TypeVar("T")

STEP_S: Final = 4e-6
"""What a step takes on the world's clock, in the mean."""

BURST: Final = 6
"""How many steps of one machine may follow each other without any of another."""

log = logging.getLogger(__name__)


class _Numbered:
    """Has its place in sets by its number, not by its address, which follows from all of memory."""

    _numbers = itertools.count()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made: Any = super().__new__(cls, *args, **kwargs)
        made._number = next(_Numbered._numbers)
        return made

    def __hash__(self) -> int:
        number: int = self._number  # type: ignore[attr-defined]
        return number


class _Future(_Numbered, asyncio.Future[Any]):
    """What waits for something; asyncio and services have sets of these."""


class _Task(_Numbered, asyncio.Task[Any]):
    """The same of tasks."""


class Stalled(Exception):
    """The world does not come to its end."""


class Machine:
    """Where one process runs. It can stand still, and it can end between any two steps.

    Attributes:
        name: Such as `broker-0`.
        ready: Its callbacks that are due.
        steps: Callbacks that have run.
        is_alive: Callbacks of one that is not are dropped.
        is_still: Stopped, as by SIGSTOP: its callbacks wait.
        wall_offset_s: How far its wall clock is ahead of the world's.
        context: In it tasks of this machine begin.
    """

    def __init__(self, world: WorldLoop, name: str) -> None:
        self.name = name
        self.ready: deque[asyncio.Handle] = deque()
        self.steps = 0
        self.is_alive = True
        self.is_still = False
        self.wall_offset_s = 0.0
        self.context = Context()
        self.context.run(MACHINE.set, self)
        self.context.run(CLOCK.set, self)
        self._world = world
        # Held: what is left of a task that ended with its machine must never run, not even its
        # `finally`, as it would when it is freed.
        self._tasks: list[asyncio.Task[Any]] = []
        self._prune_at = 1024

    def wall_s(self) -> float:
        return BEGIN_S + self._world.time() + self.wall_offset_s

    def monotonic_s(self) -> float:
        return self._world.time()

    def run(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Begin a task on this machine."""
        task: asyncio.Task[T] = self._world.create_task(
            work, name=name or None, context=self.context.copy()
        )
        return task

    def hold(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)
        if len(self._tasks) > self._prune_at:
            self._tasks = [one for one in self._tasks if not one.done()]
            self._prune_at = 2 * len(self._tasks) + 1024

    def crash(self) -> None:
        """End everything here, between two steps: nothing of it runs any more."""
        self.is_alive = False
        self.ready.clear()
        self._world.graves.append(self)


MACHINE: Final[ContextVar[Machine]] = ContextVar("machine")
"""Where the running code is."""


_Loop: Any = base_events.BaseEventLoop
"""Untyped: what a kind of loop has to define and to use has private names."""


class WorldLoop(_Loop):  # type: ignore[misc]
    """Runs all machines.

    Attributes:
        steps: Callbacks that have run on any machine.
        world: The machine of the simulation itself: supervisors, links and the store.
        graves: Machines that have ended, and what they would have run.
        faults: What nobody caught.
        resumed_s: When a machine that stood still went on for the last time.
        on_step: Called after each step with the machine and the callback that ran.
    """

    def __init__(self, seed: str) -> None:
        super().__init__()
        self._chance = random.Random(f"{seed}/steps")
        self._random = self._chance.random
        self._now_s = 0.0
        self._busy: list[Machine] = []
        self._timers: list[tuple[float, int, Any]] = []
        self._timer_number = 0
        self.steps = 0
        self.graves: list[Any] = []
        self.faults: list[str] = []
        self.resumed_s = 0.0
        self.on_step: Callable[[Machine, asyncio.Handle], None] | None = None
        self.world = Machine(self, "world")
        self._running: Machine | None = None
        self.set_exception_handler(_note_fault)
        self.set_task_factory(_held_task)

    def time(self) -> float:
        return self._now_s

    def pause(self, machine: Machine) -> None:
        machine.is_still = True
        if machine in self._busy:
            self._busy.remove(machine)

    def resume(self, machine: Machine) -> None:
        machine.is_still = False
        self.resumed_s = self.time()
        if machine.ready and machine not in self._busy:
            self._busy.append(machine)

    def at(
        self, when_s: float, machine: Machine, callback: Callable[..., object], *args: Any
    ) -> None:
        """Call back on a machine at a time of the world."""
        self.call_at(when_s, callback, *args, context=machine.context)

    def located(self, context: Context) -> Context:
        """The context, on the running machine: services begin what is in no trace in empty ones."""
        if MACHINE not in context and self._running is not None:
            context.run(MACHINE.set, self._running)
            context.run(CLOCK.set, self._running)
        return context

    # --- What BaseEventLoop leaves to its kinds -----------------------------

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        context = self.located(copy_context()) if context is None else context
        handle = events.TimerHandle(when, callback, args, self, context)
        self._timer_number += 1
        heapq.heappush(self._timers, (when, self._timer_number, handle))
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle: asyncio.Handle = self.call_soon(callback, *args, context=context)
        return handle

    def run_in_executor(
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Runs the function as a step of its own, some time later, in the caller's context."""
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self._chance.uniform(1e-5, 2e-3), work)
        return future

    def create_future(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = _Future(loop=self)
        return future

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        """Sockets lead out of the world; who asks why gRPC had no answer learns nothing here."""
        raise ConnectionRefusedError("there are no sockets in the world")

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        """Processes of the world get no signals: they are drained by a call, or crash."""

    def remove_signal_handler(self, sig: int) -> bool:
        return True

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when they are due."""

    def _write_to_self(self) -> None:
        """There is one thread."""

    def _process_events(self, event_list: Any) -> None:
        """There are no files and sockets."""

    def _call_soon(
        self, callback: Callable[..., object], args: Any, context: Context | None
    ) -> asyncio.Handle:
        context = self.located(copy_context()) if context is None else context
        handle = events.Handle(callback, args, self, context)
        self._enqueue(handle)
        return handle

    def _add_callback(self, handle: asyncio.Handle) -> None:
        self._enqueue(handle)

    def _enqueue(self, handle: Any) -> None:
        machine: Machine = handle._context.get(MACHINE, self.world)
        if not machine.is_alive:
            self.graves.append(handle)
            return
        if not machine.ready and not machine.is_still:
            self._busy.append(machine)
        machine.ready.append(handle)

    def _run_once(self) -> None:
        busy = self._busy
        if not busy:
            self._jump()
            return
        random = self._random
        # Once in each of some 10^5 steps: randrange would take a tenth of all the time.
        place = int(random() * len(busy)) if len(busy) > 1 else 0
        machine = busy[place]
        ready = machine.ready
        for _ in range(1 + int(random() * BURST)):
            if not ready:
                break
            handle = ready.popleft()
            if handle._cancelled:
                continue
            machine.steps += 1
            self.steps += 1
            self._running = machine
            handle._run()
            if self.on_step is not None:
                self.on_step(machine, handle)
            if self._stopping:
                break
        if not ready and machine in busy:
            busy.remove(machine)
        self._now_s += random() * 2 * STEP_S
        self._move_due()

    def _jump(self) -> None:
        if not self._timers:
            raise Stalled("no machine has anything to do, and no timer is set")
        self._now_s = max(self._now_s, self._timers[0][0])
        self._move_due()

    def _move_due(self) -> None:
        timers = self._timers
        while timers and timers[0][0] <= self._now_s:
            handle = heapq.heappop(timers)[2]
            if not handle._cancelled:
                self._enqueue(handle)


def _held_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    assert isinstance(loop, WorldLoop), "set for this loop"
    given: Context | None = options.pop("context", None)
    context = loop.located(copy_context() if given is None else given)  # An empty one is falsy.
    task: asyncio.Task[Any] = _Task(work, loop=loop, context=context, **options)
    machine = context.get(MACHINE)
    if machine is not None:
        machine.hold(task)
    return task


def _note_fault(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    assert isinstance(loop, WorldLoop), "set for this loop"
    error = context.get("exception")
    log.error("%s", context.get("message"), exc_info=error)
    if error is None:
        loop.faults.append(str(context.get("message")))
