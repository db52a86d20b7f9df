"""Long steps of an event loop are logged with what ran; others are not."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from libs.serving.process.watchdog import (
    NAMES_MAX,
    OTHERS,
    SlowSteps,
    Watchdog,
    _stack_of,
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
    over = threading.Event()

    def inner() -> int:
        return sum(range(20))

    def left(depth: int) -> int:
        return left(depth - 1) if depth else inner()

    def right(depth: int) -> int:
        return right(depth - 1) if depth else inner()

    def run() -> None:
        while not over.is_set():
            left(2)
            right(2)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert thread.ident is not None
        # When its stack is taken again and again, and it is given the processor meanwhile
        chains, seen = list[list[str]](), set[str]()
        while len(chains) < 200 or not {"left", "right"} <= seen:
            stack = _stack_of(thread.ident)
            chains.append(re.findall(r"in (left|right|inner)$", stack, re.MULTILINE))
            seen.update(chains[-1])
    finally:
        over.set()
        thread.join()

    # Then each has one of the chains, whole
    for chain in chains:
        assert len(set(chain) - {"inner"}) <= 1
        assert chain.count("inner") == 0 or len(chain) == 4


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
    assert slow[name].stack.lstrip().startswith(f'File "{__file__}"')
    (record,) = [one for one in caplog.records if one.name == "libs.serving.process.watchdog"]
    assert record.levelno == logging.WARNING
    assert vars(record)["step"] == name
    assert "in work_long\n" in record.getMessage()


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
        watchdog._report(f"step {number}", BOUND_MS + 1, "")

    assert len(watchdog.slow) == NAMES_MAX + 1
    assert watchdog.slow[OTHERS].count == 10
