"""Long steps of an event loop are logged with what ran; others are not."""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import uvloop

from libs.serving.process.logs import TextLines
from libs.serving.process.watchdog import (
    NAMES_MAX,
    OTHERS,
    SIGNAL,
    SlowSteps,
    Watchdog,
    _answer,
    _frames_of_step,
    _in_main_thread,
    uncounted,
)

BOUND_MS = 20
Make = Callable[[], asyncio.AbstractEventLoop]

makers = pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop])


def work(processor_ms: int) -> None:
    until = time.thread_time() + processor_ms / 1000
    while time.thread_time() < until:
        pass


def slow_steps(
    make: Make, main: Coroutine[Any, Any, object], watchdog: Watchdog | None = None
) -> dict[str, SlowSteps]:
    watchdog = watchdog or Watchdog(BOUND_MS)
    with asyncio.Runner(loop_factory=lambda: watchdog.new_event_loop(make)) as runner:
        runner.run(main)
    return watchdog.slow


def test_a_stack_is_that_of_one_moment_though_its_thread_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a thread that calls through one of two chains of functions at any time
    monkeypatch.setattr("libs.serving.process.watchdog.FRAMES_MAX", 100)
    signal.signal(SIGNAL, _answer)
    over = threading.Event()

    def inner() -> int:
        return sum(range(20))

    def left(depth: int) -> int:
        return left(depth - 1) if depth else inner()

    def right(depth: int) -> int:
        return right(depth - 1) if depth else inner()

    # When another one asks for its stack again and again
    chains, seen = list[list[str]](), set[str]()

    def look(frame: FrameType | None) -> None:
        names = [name for _, _, name in _frames_of_step(frame)]
        chains.append([name for name in names if name in ("left", "right", "inner")])
        seen.update(chains[-1])

    def ask() -> None:
        while not over.is_set():
            _in_main_thread(look)
            time.sleep(0.0001)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        while len(chains) < 200 or not {"left", "right"} <= seen:
            left(2)
            right(2)
    finally:
        over.set()
        thread.join()

    # Then each has one of the chains, as far as it was called
    for chain in chains:
        assert len(set(chain) - {"inner"}) <= 1
        assert "inner" not in chain or len(chain) == 4


@pytest.mark.parametrize("line", range(6))
def test_a_signal_during_the_answer_to_another_leaves_nothing_twice_or_unanswered(
    line: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two that wait for a frame, and a signal before one of the lines of its handler
    answered = list[str]()
    asked = deque([lambda _: answered.append("first"), lambda _: answered.append("second")])
    monkeypatch.setattr("libs.serving.process.watchdog._asked", asked)
    lines = 0

    def interrupt(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code is not _answer.__code__:
            return None
        if event == "line":
            lines += 1
            if lines == line + 1:  # Nothing of this call is traced.
                _answer(SIGNAL, frame)
        return interrupt

    # When the handler runs
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        _answer(SIGNAL, sys._getframe())
    finally:
        sys.settrace(before)

    # Then each is answered once
    assert sorted(answered) == ["first", "second"]
    assert lines > line


NATIVE_THREADS = """
import ctypes, signal, threading, time
from libs.serving.process.watchdog import SIGNAL, _answer, _frames_of_step, _in_main_thread

signal.signal(SIGNAL, _answer)

libc = ctypes.CDLL(None)
Start = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
start = Start(lambda _: None)
over, stacks = time.monotonic() + 3, []

def begin_threads():
    thread = ctypes.c_ulong()
    while time.monotonic() < over:
        libc.pthread_create(ctypes.byref(thread), None, start, None)
        libc.pthread_join(thread, None)

def ask():
    while time.monotonic() < over:
        _in_main_thread(lambda frame: stacks.append(_frames_of_step(frame)))
        time.sleep(0.0001)

threads = [threading.Thread(target=one) for one in [begin_threads] * 3 + [ask]]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    sum(range(100))
print(len(stacks))
"""


def test_threads_of_the_store_may_begin_while_a_stack_is_taken() -> None:
    # They call back from C: the interpreter knows each for the time of a call.
    command = [sys.executable, "-c", NATIVE_THREADS]
    ended = subprocess.run(command, capture_output=True, text=True)

    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0


@makers
def test_a_step_that_takes_the_processor_for_long_is_logged_with_its_name_and_stack(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog = Watchdog(BOUND_MS)

    async def work_long() -> None:
        await asyncio.sleep(0)
        # Until the other thread was given the processor, and has seen this step.
        while watchdog._seen[0] != watchdog._began_ns:
            work(3 * BOUND_MS)

    (name,) = slow = slow_steps(make, work_long(), watchdog)

    assert name.endswith("work_long")
    assert slow[name].count == 1
    assert slow[name].worst_ms >= 3 * BOUND_MS
    assert slow[name].stack.startswith("tests/unit/serving/test_watchdog.py:")
    (record,) = [one for one in caplog.records if one.name == "libs.serving.process.watchdog"]
    assert record.levelno == logging.WARNING
    assert vars(record)["step"] == name
    assert re.search(r":\d+ work_long(?: > |$)", vars(record)["stack"])
    # On one line: it must not look as if the process had crashed
    assert "\n" not in TextLines("broker").format(record)


def test_loading_modules_within_one_another_takes_one_frame_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outer_module.py").write_text("import inner_module\n")
    (tmp_path / "inner_module.py").write_text(
        "import sys\nfrom libs.serving.process.watchdog import _frames_of_step\n"
        "frames = _frames_of_step(sys._getframe())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    importlib.import_module("outer_module")

    files = [Path(file).name for file, *_ in sys.modules["inner_module"].frames]
    where = files.index("outer_module.py")
    assert files[where + 1 :] == ["<frozen importlib._bootstrap>", "inner_module.py"]


@makers
def test_a_step_that_was_only_kept_waiting_is_not_slow(make: Make) -> None:
    async def wait() -> None:
        time.sleep(3 * BOUND_MS / 1000)  # noqa: ASYNC251 - it is what must not count

    assert slow_steps(make, wait()) == {}


@makers
def test_work_that_is_cut_into_steps_is_not_slow(make: Make) -> None:
    async def in_steps() -> None:
        for _ in range(20):
            work(BOUND_MS // 10)
            await asyncio.sleep(0)

    assert slow_steps(make, in_steps()) == {}


@makers
@pytest.mark.parametrize("how", ["soon", "later", "at", "threadsafe"])
def test_functions_that_the_loop_calls_are_watched_too(make: Make, how: str) -> None:
    async def call() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def slow_call(value: str) -> None:
            assert value == how
            work(3 * BOUND_MS)
            done.set()

        match how:
            case "soon":
                loop.call_soon(slow_call, how)
            case "later":
                loop.call_later(0.001, slow_call, how)
            case "at":
                loop.call_at(loop.time() + 0.001, slow_call, how)
            case "threadsafe":
                loop.call_soon_threadsafe(slow_call, how)
        await done.wait()

    (name,) = slow_steps(make, call())
    assert name.endswith("slow_call")


@makers
def test_what_is_left_out_is_no_part_of_a_step_and_the_rest_is(make: Make) -> None:
    async def begin(processor_ms: int) -> None:
        with uncounted():
            work(3 * BOUND_MS)
        work(processor_ms)

    assert slow_steps(make, begin(0)) == {}
    (steps,) = slow_steps(make, begin(2 * BOUND_MS)).values()
    assert steps.worst_ms >= 2 * BOUND_MS


def test_what_is_left_out_runs_on_a_loop_that_is_not_watched() -> None:
    async def begin() -> bool:
        with uncounted():
            return True

    assert asyncio.run(begin())


@makers
def test_an_exception_passes_through_the_watchdog(make: Make) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("as before")

    with pytest.raises(ValueError, match="as before"):
        slow_steps(make, fail())


def test_a_name_that_repeats_is_counted_always_and_logged_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def repeat() -> None:
        for _ in range(5):
            work(2 * BOUND_MS)
            await asyncio.sleep(0)

    counted: list[str] = []
    watchdog = Watchdog(BOUND_MS, counted.append)
    with asyncio.Runner(
        loop_factory=lambda: watchdog.new_event_loop(asyncio.new_event_loop)
    ) as runner:
        runner.run(repeat())

    (steps,) = watchdog.slow.values()
    assert steps.count == len(counted) == 5
    assert len([one for one in caplog.records if one.name == "libs.serving.process.watchdog"]) == 1


def test_names_do_not_grow_without_bound() -> None:
    watchdog = Watchdog(BOUND_MS)
    for number in range(NAMES_MAX + 10):
        watchdog._report(f"step {number}", BOUND_MS + 1, [])

    assert len(watchdog.slow) == NAMES_MAX + 1
    assert watchdog.slow[OTHERS].count == 10
