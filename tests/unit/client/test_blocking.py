"""The event loop of a synchronous client, which any thread calls and one closes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from slatemq._rpc.blocking import Loop
from slatemq.errors import Unavailable

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
