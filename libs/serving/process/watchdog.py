"""Long steps of an event loop: measured, logged with what ran, counted.

An event loop runs one step at a time, and all else in the process waits for its end: every
other call, the commit loop, health. So no step may take long, and work that may is cut into steps.

::

    call_soon, call_later, add_reader ─► wrapped ─► step ─► over the bound? ─► log, count
                                            │        ▲
                             when it began ─┘        └── looked at twice per bound: its stack,
                                                         which its own thread takes between two
                                                         instructions

What counts is the processor time of the loop's thread: a step that was only kept off the processor
is not the code's fault. It is read after steps that were long by the wall clock, since reading it
is a system call; against the reading before, which is at most `MARK_NS` older than the step. So a
short step costs two looks at the clock: 0.6 µs, where a call costs some hundred. `uncounted` leaves
out what a process does before it serves anyone.
"""

from __future__ import annotations

import _thread
import asyncio
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
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

_OURS: Final = f"{Path(__file__).parents[3]}/"
"""Where our files are: a stack names them without it."""

Frames = list[tuple[str, int, str]]
"""File, line and function of each, innermost last."""


@dataclass
class SlowSteps:
    """The long steps of one name.

    Attributes:
        count: How many there were.
        worst_ms: Processor time of the longest.
        stack: Where the longest was seen, on one line, innermost last; empty if it was never seen,
            as on a loop of another thread than the main one, or in one call of C code.
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
        self._asked_ns = 0
        self._seen: tuple[int, Frames] = (0, [])
        self._ended = threading.Event()

    def new_event_loop(
        self, make: Callable[[], asyncio.AbstractEventLoop]
    ) -> asyncio.AbstractEventLoop:
        """A watched loop of the type that `make` makes, for the calling thread. Call it once."""
        plain = make()
        plain.close()
        kind = _watched(type(plain), self._run, self._ended.set, self._leave_out)
        loop: asyncio.AbstractEventLoop = kind()
        if threading.current_thread() is threading.main_thread():
            signal.signal(SIGNAL, _answer)
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
        self._asked_ns = 0  # What was seen of the step so far was left out, too.

    def _took_long(self, callback: Callable[..., object], began_ns: int) -> None:
        cpu_ns = time.thread_time_ns() - self._mark_cpu_ns
        self._mark_ns = 0
        if cpu_ns > self._bound_ns:
            seen_ns, frames = self._seen
            frames = frames if seen_ns == began_ns else []
            self._report(name_of(callback), cpu_ns // 1_000_000, frames)

    def _report(self, name: str, took_ms: int, frames: Frames) -> None:
        if name not in self.slow and len(self.slow) >= NAMES_MAX:
            name = OTHERS
        steps = self.slow.setdefault(name, SlowSteps())
        steps.count += 1
        steps.unlogged_count += 1
        self.count(name)
        now_ns = time.perf_counter_ns()
        is_worst = took_ms > steps.worst_ms
        is_logged = steps.logged_ns is None or now_ns - steps.logged_ns > LOG_EVERY_NS
        stack = _text_of(frames)
        if is_worst:
            steps.worst_ms, steps.stack = took_ms, stack
        if is_logged:
            facts = {"step": name, "cpu_ms": took_ms, "count": steps.unlogged_count}
            if stack:
                facts["stack"] = stack
            log.warning("a step of the event loop took long", extra=facts)
            steps.logged_ns, steps.unlogged_count = now_ns, 0

    def _look(self) -> None:
        """Have the stack of a step recorded that has taken half the bound; runs in a thread."""
        every_s = self._bound_ns / 2e9
        while not self._ended.wait(every_s):
            began_ns = self._began_ns
            if not began_ns or time.perf_counter_ns() - began_ns < self._bound_ns // 2:
                continue
            if self._asked_ns != began_ns:
                self._asked_ns = began_ns
                _in_main_thread(partial(self._see, began_ns))

    def _see(self, began_ns: int, frame: FrameType | None) -> None:
        if self._began_ns == began_ns:
            self._seen = began_ns, _frames_of_step(frame)


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


SIGNAL: Final = signal.SIGURG
"""As if it had come, its handler runs. It is ignored by default, and no process sends it."""

_asked: deque[Callable[[FrameType | None], None]] = deque()


def _in_main_thread(look: Callable[[FrameType | None], None]) -> None:
    """Have the main thread call this soon, between two of its instructions, with its frame.

    No other thread can walk the frames of one that goes on meanwhile. Nor can it have those of all
    threads written while none of them runs Python: threads of the store's clients make their states
    without the interpreter's lock, and one that is half made crashes who reads it.
    """
    _asked.append(look)
    _thread.interrupt_main(SIGNAL)


def _answer(_: int, frame: FrameType | None) -> None:
    try:
        while True:
            try:
                look = _asked.popleft()
            except IndexError:  # Not by a look before: this may run again between any two lines.
                return
            look(frame)
    except RecursionError:
        log.debug("no stack of a long step: it has left no room for one")


def _frames_of_step(frame: FrameType | None) -> Frames:
    """The last `FRAMES_MAX` frames at most of the step in which this is the innermost one.

    Of those that load a module one after the other, only the innermost.
    """
    frames: Frames = []
    while frame is not None and frame.f_code.co_filename != __file__ and len(frames) < FRAMES_MAX:
        file = frame.f_code.co_filename
        if not (frames and _loads(file) and _loads(frames[-1][0])):
            frames.append((file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames[::-1]


def _loads(file: str) -> bool:
    return file.startswith("<frozen importlib.")


def _text_of(frames: Frames) -> str:
    """On one line: over several it would look as if the process had crashed."""
    return " > ".join(f"{file.removeprefix(_OURS)}:{line} {name}" for file, line, name in frames)


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
