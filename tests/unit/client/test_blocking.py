"""The event loop of a synchronous client, which any thread calls and one closes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from slatemq._rpc import blocking
from slatemq._rpc.blocking import Loop
from slatemq.errors import Unavailable
from tests.interrupts import interrupt, interrupts

STOPPING_S = 0.5
"""How long a call waits for the loop to stop: it never does where `close` waits for the call."""


def test_a_call_that_comes_as_the_loop_stops_ends_as_one_that_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a thread that has found the client open, and hands its call over as the loop stops
    loop, caller = Loop(), threading.Thread(target=lambda: ends.append(error_of_call()))
    ends: list[str] = []
    calls, stops, handed_over = threading.Event(), threading.Event(), threading.Event()
    hand_over, stop = asyncio.run_coroutine_threadsafe, loop._loop.stop

    def error_of_call() -> str:
        with pytest.raises(Unavailable) as caught:
            loop.run(lambda: asyncio.sleep(60))
        return str(caught.value.reason)

    def late(work: Coroutine[Any, Any, object], of: asyncio.AbstractEventLoop) -> object:
        if threading.current_thread() is not caller:
            return hand_over(work, of)
        calls.set()
        stops.wait(STOPPING_S)
        try:
            return hand_over(work, of)
        finally:
            handed_over.set()

    def stop_late() -> None:
        stops.set()
        handed_over.wait(STOPPING_S)
        stop()

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", late)
    monkeypatch.setattr(loop._loop, "stop", stop_late)
    caller.daemon = True
    caller.start()
    calls.wait()

    # When another one closes it
    loop.close()

    # Then the call ends
    caller.join(30)
    assert ends == ["CLIENT_CLOSED"]


def test_of_two_threads_that_close_one_does() -> None:
    loop = Loop()
    closers = [threading.Thread(target=loop.close, daemon=True) for _ in range(8)]
    for one in closers:
        one.start()
    for one in closers:
        one.join(30)

    assert not any(one.is_alive() for one in closers)
    with pytest.raises(Unavailable):
        loop.run(lambda: asyncio.sleep(0))


class Alarm(Exception):
    """What a signal's handler raises, as those of SIGALRM do for a timeout."""


def test_a_call_ends_that_is_interrupted_by_an_ordinary_exception() -> None:
    loop, ended = Loop(), list[bool]()

    async def work() -> None:
        interrupt()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with interrupts(Alarm), pytest.raises(Alarm):
        loop.run(work)
    assert ended == [True]
    loop.close()


@pytest.mark.parametrize("interrupt_s", [0.0, 5.0])
def test_a_result_is_undone_that_comes_though_the_call_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, interrupt_s: float
) -> None:
    monkeypatch.setattr(blocking, "INTERRUPT_S", interrupt_s)
    loop, undone = Loop(), list[str]()
    done = threading.Event()

    async def work() -> str:
        interrupt()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "result"
        raise AssertionError

    def undo(result: str) -> None:
        undone.append(result)
        done.set()

    with interrupts(Alarm), pytest.raises(Alarm):
        loop.run(work, undo)
    assert done.wait(60)
    assert undone == ["result"]
    loop.close()


def test_an_error_of_the_work_is_raised_and_undoes_nothing() -> None:
    loop, undone = Loop(), list[object]()

    async def work() -> None:
        raise Alarm

    with pytest.raises(Alarm):
        loop.run(work, undone.append)
    assert not undone
    loop.close()


def test_what_is_left_to_end_is_nothing_to_do_once_the_loop_is_closed() -> None:
    loop, worked = Loop(), list[bool]()

    async def work() -> None:
        worked.append(True)

    loop.end(work)
    loop.close()
    loop.end(work)
    assert worked == [True]
