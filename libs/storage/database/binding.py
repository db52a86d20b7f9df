"""The one door to SlateDB's binding beside its public calls: private names stay in this file.

The generated binding builds every argument byte by byte in Python (about 7 MB/s, holding the event
loop) and reads rows field by field. `DirectCalls` calls the same foreign functions with arguments
made by one copy each, lifts rows in one pass, and commits from a thread. Where the binding is not
the known one, `PublicCalls` does the same work by public calls alone, more slowly
(docs/decisions/0060 has the measurements), and one warning says so.

For a new version of slatedb:

1.  Pin it in pyproject.toml, `make lock`, and set `KNOWN_VERSION` here.
2.  Run tests/unit/storage/database/test_binding.py. `UnknownBinding` names what differs: a private
    name, an argument's size, or a layout.
3.  Compare what it names with `slatedb/uniffi/_slatedb_uniffi/slatedb.py` of the new version:
    the functions' `argtypes`, `_uniffi_rust_call_async`, and the converters' `write`. Change this
    file alone. If "who frees what" has changed too, change it before anything is called.
4.  `make proofs ARGS="-k 'binding or commit_thread'"` looks for leaks and deadlocks, too. Then run
    `python -m benchmarks.binding_calls`, and write its numbers into 0060.
5.  If a call cannot be repaired, leave its method out of `DirectCalls`: the public one serves.

Who frees what (UniFFI's rules): a buffer given as an argument belongs to the callee, also when the
call fails; one that is returned belongs to us, and the binding's own code frees it once our lifting
has copied it. A handle given as an argument is consumed, hence the clone before each call. The
short calls go through `ctypes.PyDLL`, which keeps the GIL: none of them waits for anything.

Layouts here are UniFFI's own, all numbers big-endian: bytes are `length i32 | bytes`, an optional
is `flag u8 | value`, a list is `count i32 | elements`, a row (KeyValue) is
`key bytes | value bytes | seq u64 | create_ts i64 | expire_ts optional i64`, and a KeyRange is
`start optional bytes | inclusive u8 | end optional bytes | inclusive u8`.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import struct
import sys
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any, Final

import slatedb.uniffi._slatedb_uniffi.slatedb as binding

from libs.storage.layout.primitives import Row, RowChange

KNOWN_VERSION: Final = "0.17.0"

_log = logging.getLogger(__name__)
_LENGTH: Final = struct.Struct(">i")
_TAIL_BYTES: Final = 16
"""seq and create_ts of a row, which no caller here needs."""

_SEMAPHORE_BYTES: Final = 64
"""More than a sem_t has on any platform."""


class UnknownBinding(Exception):
    """The installed binding differs from the one that `DirectCalls` knows."""

    def __init__(self, difference: str) -> None:
        super().__init__(
            f"SlateDB's binding is not the known one: {difference}. Commits use its public calls, "
            "which are slower. To repair that, follow the steps for a new version of slatedb at "
            "the head of libs/storage/database/binding.py."
        )


class PublicCalls:
    """The calls of the hot paths by the binding's public names: right with any version.

    A `database` is the binding's `Db` or `DbReader`.
    """

    def put_all(self, batch: binding.WriteBatch, rows: Iterable[RowChange]) -> None:
        """Append a put or a delete for each row, in order; the last one of a key wins."""
        for key, value in rows:
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)

    async def get(self, database: Any, key: bytes, options: binding.ReadOptions) -> bytes | None:
        """The value of `key`, or None. `options` are kept: use the same ones again."""
        value: bytes | None = await database.get_with_options(key, options)
        return value

    async def scan(
        self, database: Any, start: bytes, end: bytes, options: binding.ScanOptions
    ) -> Any:
        """An iterator of the rows with start ≤ key < end. `options` are kept, as in `get`."""
        span = binding.KeyRange(start=start, start_inclusive=True, end=end, end_inclusive=False)
        return await database.scan_with_options(span, options)

    async def next_rows(self, iterator: Any, count: int) -> list[Row]:
        """Up to `count` further rows of a scan; fewer means the end."""
        return [(row.key, row.value) for row in await iterator.next_batch(count)]

    def committer(self, db: binding.Db, options: binding.FlushOptions) -> Committer | None:
        """Commits from a thread; None where only the event loop can commit."""
        return None


class Buffer(ctypes.Structure):
    """UniFFI's RustBuffer, with `data` as a plain address."""

    _fields_ = (
        ("capacity", ctypes.c_uint64),
        ("len", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
    )


class Borrowed(ctypes.Structure):
    """UniFFI's ForeignBytes: memory of ours that the callee only reads, during the call."""

    _fields_ = (("len", ctypes.c_int32), ("data", ctypes.c_char_p))


class Status(ctypes.Structure):
    """UniFFI's RustCallStatus: 0 success, 1 the call's own error, 2 a panic."""

    _fields_ = (("code", ctypes.c_int8), ("error", Buffer))


class _Library:
    """The foreign functions, declared with the structures above.

    All but `poll_again` and the waits keep the interpreter's lock.
    """

    def __init__(self) -> None:
        loaded = binding._UniffiLib
        self._short = ctypes.PyDLL(loaded._name, handle=loaded._handle)
        self._long = ctypes.CDLL(loaded._name, handle=loaded._handle)
        # A plain address: an int costs nothing, unlike a pointer object.
        u64, address = ctypes.c_uint64, ctypes.c_void_p
        own, ffi = "uniffi_slatedb_uniffi_fn", "ffi_slatedb_uniffi"
        declared = self._declared
        self.from_bytes = declared(f"{ffi}_rustbuffer_from_bytes", Buffer, Borrowed, address)
        self.clone_batch = declared(f"{own}_clone_writebatch", u64, u64, address)
        self.clone_db = declared(f"{own}_clone_db", u64, u64, address)
        self.clone_write = declared(f"{own}_clone_writehandle", u64, u64, address)
        batch = f"{own}_method_writebatch"
        self.put = declared(f"{batch}_put", None, u64, Buffer, Buffer, address)
        self.delete = declared(f"{batch}_delete", None, u64, Buffer, address)
        self.write = declared(f"{own}_method_db_write", u64, u64, u64)
        self.flush = declared(f"{own}_method_db_flush_with_options", u64, u64, Buffer)
        self.await_durable = declared(f"{own}_method_writehandle_await_durable", u64, u64)
        self.next_batch = declared(f"{own}_method_dbiterator_next_batch", u64, u64, ctypes.c_uint32)
        self.clone_iterator = declared(f"{own}_clone_dbiterator", u64, u64, address)
        self.readers = {
            kind: tuple(
                declared(f"{own}_{name}", u64, u64, *arguments)
                for name, arguments in (
                    (f"clone_{kind.__name__.lower()}", (address,)),
                    (f"method_{kind.__name__.lower()}_get_with_options", (Buffer, Buffer)),
                    (f"method_{kind.__name__.lower()}_scan_with_options", (Buffer, Buffer)),
                )
            )
            for kind in (binding.Db, binding.DbReader)
        }
        self.futures = {}
        for kind, result in (("u64", u64), ("void", None)):
            future = f"{ffi}_rust_future"
            self.futures[kind] = (
                declared(f"{future}_poll_{kind}", None, u64, address, u64),
                declared(f"{future}_poll_{kind}", None, u64, address, u64, short=False),
                declared(f"{future}_complete_{kind}", result, u64, address),
                declared(f"{future}_free_{kind}", None, u64),
            )
        self.awaited_u64, self.awaited_buffer = (
            tuple(
                getattr(loaded, f"{ffi}_rust_future_{step}_{kind}")
                for step in ("poll", "complete", "free")
            )
            for kind in ("u64", "rust_buffer")
        )
        self._await = binding._uniffi_rust_call_async
        self._status = binding._UniffiRustCallStatus
        self._check_status = binding._uniffi_check_call_status
        self._error = binding._UniffiFfiConverterTypeError
        self.lift_iterator = binding._UniffiFfiConverterTypeDbIterator.lift
        self.lift_write = binding._UniffiFfiConverterTypeWriteHandle.lift
        self.callback = binding._UNIFFI_RUST_FUTURE_CONTINUATION_CALLBACK
        self.ready = binding._UNIFFI_RUST_FUTURE_POLL_READY

    async def result(self, future: int, steps: tuple[Any, ...], lift: Callable[[Any], Any]) -> Any:
        """Await a future of the binding by its own loop of polls."""
        return await self._await(future, *steps, lift, self._error)

    def raise_of(self, status: Status) -> None:
        """Raise what a failed call reports; the binding's own code lifts and frees the error."""
        same = self._status.from_buffer_copy(status)
        status.code = 0
        self._check_status(self._error, same)

    def _declared(self, name: str, result: Any, *arguments: Any, short: bool = True) -> Any:
        """A function object of our own; the binding's declarations stay as they are."""
        stock = getattr(binding._UniffiLib, name)
        if [*map(ctypes.sizeof, stock.argtypes)] != [*map(ctypes.sizeof, arguments)]:
            raise UnknownBinding(f"{name} takes other arguments")
        function = (self._short if short else self._long)[name]
        function.restype = result
        function.argtypes = arguments
        return function


class _Semaphores:
    """The C library's semaphores; Linux alone."""

    def __init__(self) -> None:
        address = ctypes.c_void_p
        libc, libc_short = ctypes.CDLL(None), ctypes.PyDLL(None)
        self.post = ctypes.cast(libc.sem_post, address).value
        self.init = libc.sem_init
        self.init.argtypes = (address, ctypes.c_int, ctypes.c_uint)
        self.wait = libc.sem_wait
        self.wait.argtypes = (address,)
        self.trywait = libc_short.sem_trywait
        self.trywait.argtypes = (address,)


class DirectCalls(PublicCalls):
    """The calls on the known version: one copy for each argument, rows lifted in one pass."""

    def __init__(self, library: _Library) -> None:
        self._library = library
        self._semaphores = _Semaphores() if sys.platform == "linux" else None
        self._options: dict[int, tuple[Any, Borrowed]] = {}
        # Cloning a handle and copying bytes cannot fail: their status is never read.
        self._unread = Status()
        self._unread_at = ctypes.addressof(self._unread)

    def put_all(self, batch: binding.WriteBatch, rows: Iterable[RowChange]) -> None:
        library, handle, status = self._library, batch._handle, Status()
        put, clone, from_bytes = library.put, library.clone_batch, library.from_bytes
        at = ctypes.addressof(status)
        length = _LENGTH.pack
        lent_key, lent_value = Borrowed(), Borrowed()
        # As `_framed` does, but without a call for each: a commit may have twenty thousand rows.
        for key, value in rows:
            lent_key.data = framed = length(len(key)) + key
            lent_key.len = len(framed)
            if value is None:
                library.delete(clone(handle, at), from_bytes(lent_key, at), at)
            else:
                lent_value.data = framed = length(len(value)) + value
                lent_value.len = len(framed)
                put(clone(handle, at), from_bytes(lent_key, at), from_bytes(lent_value, at), at)
            if status.code:
                library.raise_of(status)

    async def get(self, database: Any, key: bytes, options: binding.ReadOptions) -> bytes | None:
        library, at = self._library, self._unread_at
        clone, get, _ = library.readers[type(database)]
        future = get(
            clone(database._handle, at),
            library.from_bytes(_lent(_framed(key)), at),
            library.from_bytes(self._lowered(options, "ReadOptions"), at),
        )
        value: bytes | None = await library.result(future, library.awaited_buffer, _lift_value)
        return value

    async def scan(
        self, database: Any, start: bytes, end: bytes, options: binding.ScanOptions
    ) -> Any:
        library, at = self._library, self._unread_at
        clone, _, scan = library.readers[type(database)]
        future = scan(
            clone(database._handle, at),
            library.from_bytes(_lent(_range(start, end)), at),
            library.from_bytes(self._lowered(options, "ScanOptions"), at),
        )
        return await library.result(future, library.awaited_u64, library.lift_iterator)

    async def next_rows(self, iterator: Any, count: int) -> list[Row]:
        library = self._library
        future = library.next_batch(
            library.clone_iterator(iterator._handle, self._unread_at), count
        )
        rows: list[Row] = await library.result(future, library.awaited_buffer, _lift_rows)
        return rows

    def committer(self, db: binding.Db, options: binding.FlushOptions) -> Committer | None:
        if self._semaphores is None:
            return None
        lowered = self._lowered(options, "FlushOptions")
        return Committer(self._library, self._semaphores, db, lowered)

    def _lowered(self, options: Any, kind: str) -> Borrowed:
        known = self._options.get(id(options))
        if known is None:
            data = _stock_bytes(getattr(binding, f"_UniffiFfiConverterType{kind}"), options)
            known = self._options[id(options)] = options, _lent(data)
        return known[1]


class Committer:
    """Commits to one database in the calling thread, which sleeps while SlateDB works.

    It sleeps in a semaphore of the C library, which SlateDB's own threads post, so that no thread
    needs the interpreter before a step is over, and then only this one does, for microseconds.

    UniFFI passes "ready" or "poll again" to the callback of a poll; a semaphore loses which. So
    once it was posted, the future is polled again with a callback in Python: a future that is
    ready, as nearly always, calls it immediately, any other calls it later.
    """

    def __init__(
        self, library: _Library, semaphores: _Semaphores, db: binding.Db, options: Borrowed
    ) -> None:
        self._library = library
        self._semaphores = semaphores
        self._db = db
        self._options = options
        self._semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
        self._at = ctypes.addressof(self._semaphore)
        if semaphores.init(self._at, 0, 0) != 0:
            raise OSError("the C library cannot make a semaphore")
        self._status = Status()
        self._status_at = ctypes.addressof(self._status)
        self._polls: SimpleQueue[int] = SimpleQueue()
        put = self._polls.put
        self._report = library.callback(lambda _, code: put(code))
        self._report_at = ctypes.cast(self._report, ctypes.c_void_p).value

    def commit(self, batch: binding.WriteBatch) -> binding.WriteHandle:
        """Write the batch, flush it, and return its handle once it is durable in the store.

        Raises the binding's errors.
        """
        library, at = self._library, self._status_at
        db = self._db._handle
        future = library.write(library.clone_db(db, at), library.clone_batch(batch._handle, at))
        handle = library.lift_write(self._result(future, "u64"))
        options = library.from_bytes(self._options, at)
        self._result(library.flush(library.clone_db(db, at), options), "void")
        # An empty flush says nothing about leadership; the handle of our own write does.
        durable = library.await_durable(library.clone_write(handle._handle, at))
        self._result(durable, "void")
        return handle

    def _result(self, future: int, kind: str) -> Any:
        semaphores = self._semaphores
        library = self._library
        poll, poll_again, complete, free = library.futures[kind]
        try:
            while semaphores.trywait(self._at) == 0:
                pass
            poll(future, semaphores.post, self._at)
            while semaphores.trywait(self._at) != 0 and semaphores.wait(self._at) != 0:
                pass  # interrupted by a signal
            poll(future, self._report_at, 0)
            while self._polls.get() != library.ready:
                # The thread of SlateDB that has just called back holds a lock of the future until
                # it has the interpreter again, so this poll must let go of the interpreter.
                poll_again(future, self._report_at, 0)
            result = complete(future, self._status_at)
            if self._status.code:
                library.raise_of(self._status)
            return result
        finally:
            free(future)


def _lent(data: bytes) -> Borrowed:
    return Borrowed(len(data), data)


def _framed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _range(start: bytes, end: bytes) -> bytes:
    return b"".join((b"\x01", _framed(start), b"\x01\x01", _framed(end), b"\x00"))


def _taken(buffer: Any) -> bytes:
    """The bytes of a buffer that belongs to us."""
    try:
        return ctypes.string_at(buffer.data, buffer.len)
    finally:
        buffer.free()


def _lift_value(buffer: Any) -> bytes | None:
    return value_of(_taken(buffer))


def _lift_rows(buffer: Any) -> list[Row]:
    return rows_of(_taken(buffer))


def value_of(data: bytes) -> bytes | None:
    """The bytes of an optional in UniFFI's layout."""
    return data[5:] if data[0] else None


def rows_of(data: bytes) -> list[Row]:
    """Rows from a list of KeyValue in UniFFI's layout."""
    rows: list[Row] = []
    unpack = _LENGTH.unpack_from
    at = 4
    for _ in range(unpack(data, 0)[0]):
        start = at + 4
        key_end = start + unpack(data, at)[0]
        value_start = key_end + 4
        at = value_start + unpack(data, key_end)[0]
        rows.append((data[start:key_end], data[value_start:at]))
        at += _TAIL_BYTES + (9 if data[at + _TAIL_BYTES] else 1)
    return rows


def _stock_bytes(converter: Any, value: Any) -> bytes:
    """A value in UniFFI's layout, by the binding's own code."""
    return _taken(converter.lower(value))


def _check_layouts() -> None:
    """Compare our layouts with the binding's own code; raises UnknownBinding where they differ."""
    rows = [
        binding.KeyValue(key=b"k", value=b"", seq=1, create_ts=2, expire_ts=None),
        binding.KeyValue(key=b"", value=b"v" * 300, seq=3, create_ts=4, expire_ts=5),
    ]
    span = binding.KeyRange(start=b"a", start_inclusive=True, end=b"bc", end_inclusive=False)
    optional = binding._UniffiFfiConverterOptionalBytes
    layouts = {
        "bytes": _stock_bytes(binding._UniffiFfiConverterBytes, b"abc") == _framed(b"abc"),
        "KeyRange": _stock_bytes(binding._UniffiFfiConverterTypeKeyRange, span)
        == _range(b"a", b"bc"),
        "an optional": [value_of(_stock_bytes(optional, value)) for value in (b"v", b"", None)]
        == [b"v", b"", None],
        "rows": rows_of(_stock_bytes(binding._UniffiFfiConverterSequenceTypeKeyValue, rows))
        == [(row.key, row.value) for row in rows],
    }
    for name, same in layouts.items():
        if not same:
            raise UnknownBinding(f"it lays out {name} in another way")


def direct_calls(version: str) -> DirectCalls:
    """The direct calls, once every internal that they need was tried; raises UnknownBinding."""
    if version != KNOWN_VERSION:
        raise UnknownBinding(f"its version is {version}, known is {KNOWN_VERSION}")
    try:
        calls = DirectCalls(_Library())
        _check_layouts()
        calls.put_all(binding.WriteBatch(), [(b"k", b"v"), (b"k", None)])
    except (AttributeError, LookupError, TypeError, ValueError, OSError, struct.error) as why:
        raise UnknownBinding(f"{type(why).__name__}: {why}") from why
    return calls


def choose(version: str) -> PublicCalls:
    """The direct calls where the binding is the known one, else the public ones and a warning."""
    try:
        return direct_calls(version)
    except UnknownBinding as why:
        _log.warning("%s", why)
        return PublicCalls()


CALLS: Final[PublicCalls] = choose(importlib.metadata.version("slatedb"))
"""What this process uses."""
