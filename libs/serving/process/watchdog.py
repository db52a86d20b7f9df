"""Long steps of an event loop: measured, logged with what ran, counted.

An event loop runs one step at a time, and all else in the process waits for its end: every
other call, the commit loop, health. So no step may take long, and work that may is cut into steps.

::

    call_soon, call_later, add_reader ─► wrapped ─► step ─► over the bound? ─► log, count
                                            │        ▲
                             when it began ─┘        └── looked at twice per bound: its stack

What counts is the processor time of the loop's thread: a step that was only kept off the processor
is not the code's fault. It is read after steps that were long by the wall clock, since reading it
is a system call; against the reading before, which is at most `MARK_NS` older than the step. So a
short step costs two looks at the clock: 0.6 µs, where a call costs some hundred. `uncounted` leaves
out what a process does before it serves anyone.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import StackSummary
from typing import Any, Final

log = logging.getLogger(__name__)

MARK_NS: Final = 5_000_000
"""How much processor time of the steps before may be counted as a step's own."""

LOG_EVERY_NS: Final = 10_000_000_000
"""Steps of one name are logged so rarely; those in between are counted in the next line."""

NAMES_MAX: Final = 256
"""Names counted each; the others are counted as `OTHERS`."""

OTHERS: Final = "(others)"

FRAMES_MAX: Final = 12
"""Innermost frames of a step that are logged."""


@dataclass
class SlowSteps:
    """The long steps of one name.

    Attributes:
        count: How many there were.
        worst_ms: Processor time of the longest.
        stack: Where the longest was seen, innermost last; empty if it was never seen.
    """

    count: int = 0
    worst_ms: int = 0
    stack: str = ""
    unlogged_count: int = 0
    logged_ns: int | None = None


class Watchdog:
    """Watches the steps of one event loop; see the module.

    Attributes:
        slow: The long steps so far, by the name of what ran.
    """

    def __init__(self, bound_ms: int, count: Callable[[str], None] = lambda name: None) -> None:
        """Report steps longer than the bound; `count` is called with the name of each."""
        self.slow: dict[str, SlowSteps] = {}
        self.count = count
        self._bound_ns = bound_ms * 1_000_000
        self._began_ns = 0
        self._mark_ns = self._mark_cpu_ns = 0
        self._seen: tuple[int, str] = (0, "")
        self._thread_id = 0
        self._ended = threading.Event()

    def new_event_loop(
        self, make: Callable[[], asyncio.AbstractEventLoop]
    ) -> asyncio.AbstractEventLoop:
        """A watched loop of the type that `make` makes, for the calling thread. Call it once."""
        plain = make()
        plain.close()
        kind = _watched(type(plain), self._run, self._ended.set, self._leave_out)
        loop: asyncio.AbstractEventLoop = kind()
        self._thread_id = threading.get_ident()
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()
        return loop

    def _run(self, callback: Callable[..., object], *args: object) -> None:
        began_ns = time.perf_counter_ns()
        if began_ns - self._mark_ns > MARK_NS:
            self._mark_ns, self._mark_cpu_ns = began_ns, time.thread_time_ns()
        self._began_ns = began_ns
        try:
            callback(*args)
        finally:
            self._began_ns = 0
            if time.perf_counter_ns() - began_ns > self._bound_ns:
                self._took_long(callback, began_ns)

    def _leave_out(self, cpu_ns: int) -> None:
        self._mark_cpu_ns += cpu_ns

    def _took_long(self, callback: Callable[..., object], began_ns: int) -> None:
        cpu_ns = time.thread_time_ns() - self._mark_cpu_ns
        self._mark_ns = 0
        if cpu_ns > self._bound_ns:
            seen_ns, stack = self._seen
            self._report(name_of(callback), cpu_ns // 1_000_000, stack * (seen_ns == began_ns))

    def _report(self, name: str, took_ms: int, stack: str) -> None:
        if name not in self.slow and len(self.slow) >= NAMES_MAX:
            name = OTHERS
        steps = self.slow.setdefault(name, SlowSteps())
        steps.count += 1
        steps.unlogged_count += 1
        if took_ms > steps.worst_ms:
            steps.worst_ms, steps.stack = took_ms, stack
        self.count(name)
        now_ns = time.perf_counter_ns()
        if steps.logged_ns is None or now_ns - steps.logged_ns > LOG_EVERY_NS:
            facts = {"step": name, "cpu_ms": took_ms, "count": steps.unlogged_count}
            seen = f"; it was in\n{stack}" if stack else ""
            log.warning("a step of the event loop took long%s", seen, extra=facts)
            steps.logged_ns, steps.unlogged_count = now_ns, 0

    def _look(self) -> None:
        """Record the stack of a step that has taken half the bound; runs in its own thread."""
        every_s = self._bound_ns / 2e9
        while not self._ended.wait(every_s):
            began_ns = self._began_ns
            if not began_ns or time.perf_counter_ns() - began_ns < self._bound_ns // 2:
                continue
            if self._seen[0] == began_ns:
                continue
            stack = _stack_of(self._thread_id)
            if self._began_ns == began_ns:
                self._seen = began_ns, stack


@contextmanager
def uncounted() -> Iterator[None]:
    """Leave what runs within out of the step of the running loop, if that is watched."""
    leave_out = getattr(asyncio.get_running_loop(), "leave_out", None)
    began_ns = time.thread_time_ns()
    try:
        yield
    finally:
        if leave_out is not None:
            leave_out(time.thread_time_ns() - began_ns)


_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def _stack_of(thread_id: int) -> str:
    """The stack of a step of this thread, innermost last: its last `FRAMES_MAX` frames at most.

    Its frames are not walked here. The thread goes on between two of them, and the one after the
    next was seen to be no frame any more: an exception, and a crash with less luck. C code takes
    the stacks of all threads while none of them can run.
    """
    if sys.platform != "linux":
        return ""
    try:
        descriptor = os.memfd_create("stacks")
    except OSError as error:  # as with too many open files
        log.debug("no stack of a long step: %s", error)
        return ""
    with open(descriptor, "w+b", buffering=0) as file:
        faulthandler.dump_traceback(file.fileno(), all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace")
    stack = stacks.partition(f" 0x{thread_id:016x} ")[2].partition("\n\n")[0]
    frames = [(file, int(line), name, None) for file, line, name in _FRAME.findall(stack)][::-1]
    own = [place for place, (file, *_) in enumerate(frames) if file == __file__]
    inner = frames[own[-1] + 1 :] if own else frames
    return "".join(StackSummary.from_list(inner[-FRAMES_MAX:]).format()).rstrip()


def name_of(callback: Callable[..., object]) -> str:
    """The name of what a step runs: the coroutine of a task, or the function."""
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        coroutine: Any = owner.get_coro()
        return str(getattr(coroutine, "__qualname__", coroutine))
    return str(getattr(callback, "__qualname__", type(callback).__qualname__))


def _watched(
    kind: Any,
    run: Callable[..., None],
    closed: Callable[[], None],
    leave_out: Callable[[int], None],
) -> Any:
    """A type of loops whose steps are run by `run`, and which call `closed` when they close.

    They pass `leave_out` the processor time that does not count.
    """
    soon, threadsafe = kind.call_soon, kind.call_soon_threadsafe
    later, at = kind.call_later, kind.call_at
    reader, writer = kind.add_reader, kind.add_writer

    class Watched(kind):  # type: ignore[misc]
        def close(self) -> None:
            super().close()
            closed()

        def leave_out(self, cpu_ns: int) -> None:
            leave_out(cpu_ns)

        def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
            return soon(self, run, callback, *args, context=context)

        def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
            return threadsafe(self, run, callback, *args, context=context)

        def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
            if callback is not run:  # One of the two calls the other.
                callback, args = run, (callback, *args)
            return later(self, delay, callback, *args, context=context)

        def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
            if callback is not run:
                callback, args = run, (callback, *args)
            return at(self, when, callback, *args, context=context)

        def add_reader(self, fd: Any, callback: Any, *args: Any) -> Any:
            return reader(self, fd, run, callback, *args)

        def add_writer(self, fd: Any, callback: Any, *args: Any) -> Any:
            return writer(self, fd, run, callback, *args)

    return Watched
