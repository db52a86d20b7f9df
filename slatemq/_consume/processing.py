"""Working on the messages of a consumer with several tasks, and how SIGTERM ends that.

Workers without a handler of their own for the signal release their messages before they end.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from inspect import isawaitable
from types import FrameType
from typing import NoReturn

from slatemq._checks import wrong
from slatemq._consume.consumer import Consumer
from slatemq._consume.delivered import Received, has_failed
from slatemq.errors import InvalidArgument, SlateMQError

log = logging.getLogger(__name__)

Handler = Callable[[Received], Awaitable[object]]

_ASYNC = "an async function"


def check_handler(handler: Handler) -> None:
    """Raises InvalidArgument for what cannot be called; the first result shows whether it is async.

    A lambda, say, may return the coroutine of another function.
    """
    if not callable(handler):
        raise wrong("handler", _ASYNC, handler)


async def process_all(messages: Consumer, handler: Handler, concurrency: int) -> None:
    """Calls the handler for every message, until cancelled or the consumer ends.

    Raises what the consumer raises, once the handlers that run have returned, and InvalidArgument
    about a handler that turns out not to be async.
    """
    problems: list[SlateMQError] = []

    async def work() -> None:
        try:
            async for message in messages:
                await _handle(message, handler)
        except SlateMQError as error:
            problems.append(error)  # Every task meets the same end of the consumer.
            await messages.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(work())
    if problems:
        raise problems[0]


async def _handle(message: Received, handler: Handler) -> None:
    """Raises InvalidArgument, and releases the message, where the handler is not async."""
    is_async = True
    try:
        async with message:
            working = handler(message)
            is_async = isawaitable(working)
            if is_async:
                await working
            else:
                message.release_soon()
    except (Exception, asyncio.CancelledError) as error:
        if not has_failed(error):
            raise
        log.warning(
            "message %d of queue %r failed, attempt %d",
            message.message_id,
            message.queue_id,
            message.attempts_count,
            exc_info=error,
        )
    if not is_async:
        returned = type(working).__name__
        raise InvalidArgument(
            "handler",
            f"must be {_ASYNC}: it returned {returned}; run blocking work with asyncio.to_thread",
        )


EXIT_STATUS = 128 + signal.SIGTERM
"""The exit status of shells after this signal."""


class _Work:
    """A task that is to end at the signal."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.task = asyncio.current_task()
        self.ended = False
        self.over = asyncio.Event()

    def end(self) -> None:
        """For the signal's handler, which may run again before the signal is the system's."""
        if not self.ended:
            self.ended = True
            self.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self.task is not None and not self.over.is_set():
            self.task.cancel()


_works: set[_Work] = set()


@asynccontextmanager
async def ending_at_sigterm() -> AsyncIterator[None]:
    """Within it SIGTERM cancels this task; SystemExit is raised once all such tasks have ended.

    Does nothing off the main thread, and where the program handles SIGTERM itself. A second signal
    ends the program at once.
    """
    if not _is_ours():
        yield
        return
    work = _Work()
    _works.add(work)
    signal.signal(signal.SIGTERM, _on_signal)
    try:
        try:
            yield
        except asyncio.CancelledError:
            # Another cancellation of the task must be visible to its caller.
            if not work.ended or work.task is None or work.task.uncancel() > 0:
                raise
        if work.ended:  # Also where the signal came as the block was about to end.
            await _leave(work)
    finally:
        work.over.set()
        _works.discard(work)
        if not _works and signal.getsignal(signal.SIGTERM) is _on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def _leave(work: _Work) -> NoReturn:
    """End the program; as long as others release messages, only the task."""
    others = _works - {work}
    work.over.set()
    if not others:
        raise SystemExit(EXIT_STATUS)
    _works.discard(work)
    for other in others:
        await other.over.wait()
    raise asyncio.CancelledError


def _is_ours() -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False
    return signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _on_signal)


def _on_signal(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for work in _works:
        work.end()
