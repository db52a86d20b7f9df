"""Coroutines for programs without asyncio: an event loop in a thread, and faces of objects."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from functools import partial, wraps
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Self, TypeVar

from slatemq._cancelling import end_all
from slatemq._rpc.forks import inherited_client, refuse_pickling
from slatemq._rpc.peers import closed
from slatemq.errors import Unavailable

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F")
A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)

INTERRUPT_S = 5.0
"""How long Ctrl-C waits for the call that it interrupts."""


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slatemq", daemon=True)
        self._is_closing = False
        # Of several threads, each hands its work over before `close` cancels all, or not at all.
        # The same thread may come twice: a generator that is collected meanwhile closes itself.
        self._handing_over = threading.RLock()
        self._thread.start()

    def run(self, work: Callable[[], Awaitable[T]], undo: Callable[[T], None] | None = None) -> T:
        """Waits for the result.

        Ctrl-C, or whatever else the handler of a signal raises meanwhile, cancels the work, and
        waits for its end; on the loop, `undo` gets a result that comes all the same. Raises
        Unavailable (CLIENT_CLOSED) after `close`, and for a finalizer at the program's end;
        RuntimeError in a forked process.
        """
        running: list[asyncio.Task[Any] | None] = []

        async def awaited() -> T:
            running.append(asyncio.current_task())
            return await work()

        self._check()
        with self._handing_over:
            if self._is_closing:
                raise closed()
            future = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise closed() from None
        except BaseException as error:
            if not future.done() or future.cancelled() or future.exception() is not error:
                self._interrupt(future, running, undo)
            raise

    def end(self, work: Callable[[], Awaitable[object]]) -> None:
        """As `run`, of work that is nothing to do once it is closed or stopped, nor in a fork."""
        if self._is_closing or self._is_stopped or self.is_inherited:
            return
        try:
            self.run(work)
        except Unavailable as error:
            if error.reason != "CLIENT_CLOSED":
                raise

    def _interrupt(
        self,
        future: concurrent.futures.Future[T],
        running: Sequence[asyncio.Task[Any] | None],
        undo: Callable[[T], None] | None,
    ) -> None:
        def cancel() -> None:
            # Cancelling the future instead would forget a result that is just coming in.
            for task in running:
                if task is not None:
                    task.cancel()
            if not running:
                future.cancel()  # It has not even begun.

        def take_back(ended: concurrent.futures.Future[T]) -> None:
            if undo is not None and not ended.cancelled() and ended.exception() is None:
                self._call_soon(partial(undo, ended.result()))

        self._call_soon(cancel)
        future.add_done_callback(take_back)
        concurrent.futures.wait([future], timeout=INTERRUPT_S)

    def _call_soon(self, function: Callable[[], object]) -> None:
        with self._handing_over:
            if not self._is_closing:
                self._loop.call_soon_threadsafe(function)

    @property
    def _is_stopped(self) -> bool:
        """Whether the interpreter has stopped its thread: whatever waits for it would hang."""
        return sys.is_finalizing()

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked process, and the loop runs in its parent."""
        return self._pid != os.getpid()

    def _check(self) -> None:
        if self.is_inherited:
            raise inherited_client()
        if self._is_stopped:
            raise closed()
        if threading.current_thread() is self._thread:
            raise RuntimeError("a synchronous call on the client's own thread would never end")

    def close(self) -> None:
        """Stop it; again does nothing."""
        if self.is_inherited or self._is_stopped:
            return
        with self._handing_over:
            is_first, self._is_closing = not self._is_closing, True
        if not is_first:
            self._thread.join()
            return
        try:
            for last in (_cancel_others(), self._loop.shutdown_asyncgens()):
                asyncio.run_coroutine_threadsafe(last, self._loop).result()
        finally:  # Also after Ctrl-C.
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _cancel_others() -> None:
    """Calls of other threads that are still under way end with the client."""
    await end_all(asyncio.all_tasks() - {asyncio.current_task()})


class Face(Generic[A_co]):
    """A synchronous face of an asynchronous object."""

    def __init__(self, loop: Loop, inner: A_co) -> None:
        self._loop = loop
        self._inner = inner

    def __reduce__(self) -> NoReturn:
        raise refuse_pickling(self)


class StreamFace(Face[A_co], Generic[A_co, T], ABC):
    """A face that yields items: an iterator, and a context manager that closes it."""

    @abstractmethod
    def take(self) -> T:
        """The next item; waits for it. Raises StopAsyncIteration at the end."""

    @abstractmethod
    def close(self) -> None:
        """Ends it; iterating ends, too."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        """The next item; waits for it."""
        try:
            return self.take()
        except StopAsyncIteration:
            raise StopIteration from None


def maker_of(
    method: Callable[Concatenate[A, P], T], face: Callable[[Loop, T], F]
) -> Callable[Concatenate[Face[A], P], F]:
    """`method`, but returning a face of what it makes."""

    @wraps(method)
    def made(self: Face[A], /, *args: P.args, **kwargs: P.kwargs) -> F:
        async def make() -> T:
            return method(self._inner, *args, **kwargs)

        return face(self._loop, self._loop.run(make))

    return made


def list_of(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, list[T]]],
    face: Callable[[Loop, T], F],
    undo: Callable[[list[T]], None],
) -> Callable[Concatenate[Face[A], P], list[F]]:
    """`method`, but waiting for its list, and returning faces of the items; `undo` as in `run`."""

    @wraps(method)
    def waiting(self: Face[A], /, *args: P.args, **kwargs: P.kwargs) -> list[F]:
        items = self._loop.run(lambda: method(self._inner, *args, **kwargs), undo)
        return [face(self._loop, item) for item in items]

    return waiting


def method_of(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Face[A], P], T]:
    """`method`, but waiting for its result."""

    @wraps(method)
    def waiting(self: Face[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(lambda: method(self._inner, *args, **kwargs))

    return waiting


def iterator_of(
    method: Callable[Concatenate[A, P], AsyncIterator[T]],
) -> Callable[Concatenate[Face[A], P], Iterator[T]]:
    """`method`, but as an iterator that waits for each item."""

    @wraps(method)
    def waiting(self: Face[A], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items = method(self._inner, *args, **kwargs)
        try:
            while True:
                try:
                    yield self._loop.run(lambda: anext(items))
                except StopAsyncIteration:
                    return
        finally:
            if isinstance(items, AsyncGenerator):
                self._loop.end(items.aclose)

    return waiting
