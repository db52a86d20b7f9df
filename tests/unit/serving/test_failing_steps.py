"""Which steps of a test's event loop fail the test: those of servers, far over the bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests import slow_steps
from tests.slow_steps import BOUND_MS, WatchedLoops, too_long

FAILING_MS = 4 * BOUND_MS


@pytest.fixture(autouse=True)
def _failing_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_steps, "FAILING_MS", FAILING_MS)


SERVER = """
import time

async def handle(wanted_ms, was_seen):
    until = time.thread_time() + wanted_ms / 1000
    while time.thread_time() < until or not was_seen():
        pass
"""

Handler = Callable[[int, Callable[[], bool]], Coroutine[Any, Any, None]]


def handler_in(file: str) -> Handler:
    """A handler that takes the processor for long, as if this file had it."""
    names: dict[str, Any] = {}
    exec(compile(SERVER, file, "exec"), names)
    handle: Handler = names["handle"]
    return handle


@pytest.mark.parametrize(
    ("file", "wanted_ms", "fails"),
    [
        ("/home/services/broker/rpc/handler.py", FAILING_MS + BOUND_MS, True),
        ("/home/libs/serving/handler.py", FAILING_MS + BOUND_MS, True),
        ("/home/services/broker/rpc/handler.py", BOUND_MS + 10, False),
        ("/home/tests/integration/test_handler.py", FAILING_MS + BOUND_MS, False),
    ],
    ids=["a service", "a library", "not far over the bound", "a test"],
)
def test_only_a_long_step_of_a_server_fails_a_test(file: str, wanted_ms: int, fails: bool) -> None:
    loops = WatchedLoops()
    with asyncio.Runner(loop_factory=loops.new_event_loop) as runner:
        (watchdog,) = loops._watchdogs

        def was_seen() -> bool:
            # The watchdog's thread has to be given the processor, which a busy machine delays
            return bool(watchdog._seen[1]) or not fails

        async def main() -> None:
            await asyncio.ensure_future(handler_in(file)(wanted_ms, was_seen))

        runner.run(main())
    found = loops.take()

    assert [name for name, *_ in found] == ["handle"]
    lines = too_long(found)
    assert bool(lines) == fails
    if fails:
        assert lines[0].startswith("a step of handle took ")
        assert f"{file}:" in lines[0]


def test_loading_modules_fails_no_test() -> None:
    stack = "/home/services/broker/x.py:2 start > <frozen importlib._bootstrap>:1 _find_and_load"

    assert too_long([("handle", 1, FAILING_MS + 1, stack)]) == []
    assert too_long([("handle", 1, FAILING_MS + 1, stack.partition(" > ")[0])]) != []
