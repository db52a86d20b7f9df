"""Small commits in a thread: write, flush and sync one after the other, and one return to the loop.

On an event loop each of these steps ends in a wake-up that waits behind all that the loop has to do
by then: under a burst of small publishes a commit took ten times as long as its steps. Here the
thread sleeps in a semaphore of the C library, which SlateDB's own threads post: nobody needs the
interpreter until a step is over, and then only this thread does, for some microseconds.

UniFFI tells whoever polls a future "ready" or "poll again"; a semaphore cannot tell the two apart.
So once it was posted, the future is polled again by a callback in Python, which is told at once
when the future is ready, as nearly always, and later otherwise. Polled again, a ready one says so.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

import slatedb.uniffi._slatedb_uniffi.slatedb as binding

from libs.storage.database.binding import (
    CALLS,
    FUNCTION,
    Borrowed,
    Buffer,
    DirectCalls,
    Library,
    Status,
    raise_of,
)

__all__ = ["CommitThread", "available"]

_log = logging.getLogger(__name__)

_SEMAPHORE_BYTES: Final = 64
"""More than a sem_t has anywhere."""


class _CommitLibrary(Library):
    """Those of a commit. All but the waits and `poll_again` keep the interpreter's lock."""

    def __init__(self) -> None:
        super().__init__()
        u64, pointer = ctypes.c_uint64, ctypes.c_void_p
        future = "ffi_slatedb_uniffi_rust_future"
        self.clone_db = self.declared(f"{FUNCTION}_clone_db", u64, u64, pointer)
        self.clone_handle = self.declared(f"{FUNCTION}_clone_writehandle", u64, u64, pointer)
        self.write = self.declared(f"{FUNCTION}_method_db_write", u64, u64, u64)
        self.flush = self.declared(f"{FUNCTION}_method_db_flush_with_options", u64, u64, Buffer)
        self.await_durable = self.declared(f"{FUNCTION}_method_writehandle_await_durable", u64, u64)
        kinds = {}
        letting_go = ctypes.CDLL(binding._UniffiLib._name, handle=binding._UniffiLib._handle)
        for kind, result in (("u64", u64), ("void", None)):
            poll_again = letting_go[f"{future}_poll_{kind}"]
            poll_again.restype, poll_again.argtypes = None, (u64, pointer, u64)
            kinds[kind] = (
                self.declared(f"{future}_poll_{kind}", None, u64, pointer, u64),
                poll_again,
                self.declared(f"{future}_complete_{kind}", result, u64, pointer),
                self.declared(f"{future}_free_{kind}", None, u64),
            )
        self.kinds = kinds
        libc, libc_short = ctypes.CDLL(None), ctypes.PyDLL(None)
        self.sem_post = ctypes.cast(libc.sem_post, pointer).value
        self.sem_init = libc.sem_init
        self.sem_init.argtypes = (pointer, ctypes.c_int, ctypes.c_uint)
        self.sem_wait = libc.sem_wait
        self.sem_wait.argtypes = (pointer,)
        self.sem_trywait = libc_short.sem_trywait
        self.sem_trywait.argtypes = (pointer,)


def _load() -> _CommitLibrary | None:
    if sys.platform != "linux" or not isinstance(CALLS, DirectCalls):
        return None
    try:
        return _CommitLibrary()
    except (AttributeError, OSError, ValueError) as why:
        _log.warning("small commits take the longer way: %s", why)
        return None


_LIBRARY: Final = _load()


def available() -> bool:
    """Whether this platform and this version of the binding allow for it."""
    return _LIBRARY is not None


class _Waiter:
    """Brings futures of the binding to their end, in the thread that calls."""

    def __init__(self, library: _CommitLibrary) -> None:
        self._library = library
        self._semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
        self._at = ctypes.addressof(self._semaphore)
        if library.sem_init(self._at, 0, 0) != 0:
            raise OSError("no semaphore")
        self._status = Status()
        self._status_at = ctypes.addressof(self._status)
        self._ready: SimpleQueue[int] = SimpleQueue()
        put = self._ready.put
        self._report = binding._UNIFFI_RUST_FUTURE_CONTINUATION_CALLBACK(lambda _, code: put(code))
        self._report_at = ctypes.cast(self._report, ctypes.c_void_p).value

    def result(self, future: int, kind: str) -> Any:
        """What the future gives, or its error; it is used up."""
        library = self._library
        poll, poll_again, complete, free = library.kinds[kind]
        try:
            while library.sem_trywait(self._at) == 0:
                pass
            poll(future, library.sem_post, self._at)
            while library.sem_trywait(self._at) != 0 and library.sem_wait(self._at) != 0:
                pass  # interrupted by a signal
            poll(future, self._report_at, 0)
            while self._ready.get() != binding._UNIFFI_RUST_FUTURE_POLL_READY:
                # SlateDB's thread that has just called back holds a lock of the future until it
                # has the interpreter once more: who polls now must let go of it.
                poll_again(future, self._report_at, 0)
            result = complete(future, self._status_at)
            if self._status.code:
                raise_of(self._status)
            return result
        finally:
            free(future)


_Job = tuple[Any, "asyncio.Future[Any]"]


class CommitThread:
    """Makes commits of one database, one after the other. Use it from one event loop."""

    def __init__(self, db: Any, flush_options: Any, sync: Callable[[], None], name: str) -> None:
        """Flush by these options, then call `sync`."""
        assert _LIBRARY is not None, "see `available`"
        self._db = db
        self._library = _LIBRARY
        self._sync = sync
        buffer = binding._UniffiFfiConverterTypeFlushOptions.lower(flush_options)
        self._options = ctypes.string_at(buffer.data, buffer.len)
        buffer.free()
        self._lent = Borrowed(len(self._options), self._options)
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"commit {name}", daemon=True)
        self._thread.start()

    async def commit(self, batch: Any) -> Any:
        """Write a batch of the binding and make it durable; gives the handle of the write.

        Raises the binding's errors and OSError. Whoever is cancelled does not stop it.
        """
        done: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.put((batch, done))
        return await done

    async def close(self) -> None:
        """Wait for the commit that is under way, and end."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        waiter = _Waiter(self._library)
        while (job := self._jobs.get()) is not None:
            batch, done = job
            handle, error = None, None
            try:
                handle = self._commit(waiter, batch)
            except Exception as problem:  # noqa: BLE001 - whoever waits is told
                error = problem
            try:
                self._loop.call_soon_threadsafe(_settle, done, handle, error)
            except RuntimeError:  # The loop is closed: nobody waits any more.
                return

    def _commit(self, waiter: _Waiter, batch: Any) -> Any:
        library, status = self._library, Status()
        at = ctypes.addressof(status)
        future = library.write(
            library.clone_db(self._db._handle, at), library.clone_batch(batch._handle, at)
        )
        raw = waiter.result(future, "u64")
        handle = binding._UniffiFfiConverterTypeWriteHandle.lift(raw)
        options = library.from_bytes(self._lent, at)
        waiter.result(library.flush(library.clone_db(self._db._handle, at), options), "void")
        # An empty flush says nothing about leadership; the handle of our own write does.
        waiter.result(library.await_durable(library.clone_handle(handle._handle, at)), "void")
        self._sync()
        return handle


def _settle(done: asyncio.Future[Any], handle: Any, error: Exception | None) -> None:
    if done.done():
        return  # cancelled
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(handle)
