"""Calls that may block indefinitely, such as reads from a terminal, beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """What `function` returns or raises, run in a thread that may be left behind.

    `asyncio.to_thread` would delay the end of the program until the read returns.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, problem = None, None
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - it is raised where it is awaited
            problem = error
        with suppress(RuntimeError):  # The loop is closed: nothing awaits the result.
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=work, daemon=True).start()
    return await done
