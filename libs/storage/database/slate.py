"""One SlateDB database, opened for writing.

A write is visible in memory when it returns, and durable only after `flush`. Reads default to
memory; ask for `durable=True` wherever a response must not rest on what a crash would undo.

After a failed write or flush, memory is ahead of the disk and the object stays failed: every later
write or flush raises the same error. Stop the process and restart it from disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from itertools import chain, count, islice
from typing import Any, Final

from slatedb.uniffi import (
    CloseOptions,
    CloseReason,
    Db,
    DefaultMetricsRecorder,
    DurabilityLevel,
    Error,
    FlushOptions,
    FlushType,
    InternalError,
    IterationOrder,
    ReadOptions,
    ScanOptions,
    WriteBatch,
)

from libs.storage.database.binding import CALLS
from libs.storage.database.commit_thread import CommitThread
from libs.storage.database.settings import ReplayBound
from libs.storage.database.statistics import Statistics, statistics_of
from libs.storage.errors import (
    DamagedStore,
    Fenced,
    SnapshotNotFound,
    StorageError,
    StoreFailed,
    StoreUnavailable,
    readable,
)
from libs.storage.layout.primitives import Row, RowChange
from libs.storage.objects.durability import Durability, FolderSync

_log = logging.getLogger(__name__)

READ_AHEAD_BYTES: Final = 4 << 20
"""For long scans; the default of one block costs 57 µs a row instead of 5."""

SHORT_READ_AHEAD_BYTES: Final = 64 << 10
"""For scans of at most SHORT_SCAN_ROWS: ten rows in 0.3 ms, with 4 MiB of read-ahead in 3 ms."""

SHORT_SCAN_ROWS: Final = 1000
BATCH_ROWS: Final = 1000
"""Rows per call into SlateDB: 1.1 MB of 1 KiB payloads, a few milliseconds of the event loop."""

STATUS_POLL_S: Final = 1.0
"""How often `wait_closed` polls; SlateDB itself notices a newer writer once a second."""

FILL_NS: Final = 250_000
"""How long one step of the event loop copies rows into SlateDB's batch."""

FILL_ROWS: Final = 8
"""Rows copied between two looks at the clock: 0.1 ms, 2 ms where each has 64 KiB."""

_OVERHEAD_BYTES: Final = 32
"""What a row costs beyond its key and value: sequence, timestamps, lengths (an estimate)."""


class Batch:
    """Puts and deletes that are written together or not at all. Single use; one task fills it."""

    __slots__ = ("_later", "_rows", "commit", "size_bytes")

    def __init__(self) -> None:
        self._rows: list[RowChange] = []
        self._later: list[Iterable[RowChange]] = []
        self.size_bytes = 0
        """Keys and values so far, with an estimate of the overhead per row."""
        self.commit = 0
        """Number of the group commit that this batch belongs to; 0 outside of one."""

    def put(self, key: bytes, value: bytes) -> None:
        """Set `key` to `value`; the last operation on a key wins."""
        self._rows.append((key, value))
        self.size_bytes += len(key) + len(value) + _OVERHEAD_BYTES

    def put_all(self, rows: Sequence[RowChange]) -> None:
        """Set each key to its value, or remove it where that is None."""
        self._rows += rows
        self.size_bytes += sum([len(key) + len(value or b"") for key, value in rows])
        self.size_bytes += _OVERHEAD_BYTES * len(rows)

    def put_later(self, rows: Iterable[RowChange], size_bytes: int) -> None:
        """Like `put_all`, for rows that are made while the batch is written, of about this size.

        They count as one operation, and are written after all others.
        """
        self._later.append(rows)
        self.size_bytes += size_bytes

    def delete(self, key: bytes) -> None:
        """Remove `key`; no error if it is absent."""
        self._rows.append((key, None))
        self.size_bytes += len(key) + _OVERHEAD_BYTES

    def __len__(self) -> int:
        return len(self._rows) + len(self._later)

    async def fill(self) -> Any:
        """The binding's own batch, filled in steps. Call it once."""
        filled = WriteBatch()
        rows = chain(self._rows, *self._later)
        until_ns = time.perf_counter_ns() + FILL_NS
        while some := list(islice(rows, FILL_ROWS)):
            CALLS.put_all(filled, some)
            if time.perf_counter_ns() > until_ns:
                await asyncio.sleep(0)
                until_ns = time.perf_counter_ns() + FILL_NS
        return filled


def _read_options(durable: bool) -> ReadOptions:
    level = DurabilityLevel.REMOTE if durable else DurabilityLevel.MEMORY
    return ReadOptions(durability_filter=level, dirty=False, cache_blocks=True)


@cache
def scan_options(*, durable: bool, short: bool, descending: bool) -> ScanOptions:
    """Options of a scan; a short one reads less ahead."""
    return ScanOptions(
        durability_filter=DurabilityLevel.REMOTE if durable else DurabilityLevel.MEMORY,
        dirty=False,
        read_ahead_bytes=SHORT_READ_AHEAD_BYTES if short else READ_AHEAD_BYTES,
        cache_blocks=False,
        max_fetch_tasks=4,
        order=IterationOrder.DESCENDING if descending else IterationOrder.ASCENDING,
    )


READ_MEMORY = _read_options(durable=False)
_READ_DURABLE = _read_options(durable=True)
_OF_DAMAGE: Final = ("(e.g. manifest)", "WAL replay", "wal_replay")
"""In the messages of internal errors that damaged files cause, such as a WAL out of order."""

_FLUSH_WAL = FlushOptions(flush_type=FlushType.WAL)
_FLUSH_MEMTABLE = FlushOptions(flush_type=FlushType.MEM_TABLE)


def translate(error: Error | InternalError, what: str) -> StorageError:
    """The storage error for an error of SlateDB; `what` says what failed."""
    if isinstance(error, InternalError):  # a panic, as over damage that no checksum covers
        return DamagedStore(f"{what}: {readable(str(error))}")
    if isinstance(error, Error.Closed):
        if error.reason is CloseReason.FENCED:
            return Fenced(f"{what}: another process has opened this database")
        return StoreFailed(f"{what}: the database is closed ({error.message})")
    if isinstance(error, Error.Unavailable):
        if "range was invalid" in error.message or "InvalidRange" in error.message:
            # An object is shorter than the manifest says, which no retry changes.
            return DamagedStore(f"{what}: a file was cut off: {readable(error.message)}")
        return StoreUnavailable(f"{what}: {readable(error.message)}")
    if isinstance(error, Error.Data):
        if "checkpoint missing" in error.message:
            return SnapshotNotFound(error.message.rpartition("=")[2].strip("`"))
        return DamagedStore(f"{what}: {readable(error.message)}")
    if isinstance(error, Error.Internal) and any(one in error.message for one in _OF_DAMAGE):
        return DamagedStore(f"{what}: {readable(error.message)}")
    return StoreFailed(f"{what}: {readable(repr(error))}")


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise a storage error for an error of SlateDB; `what` is being done."""
    try:
        yield
    except (Error, InternalError) as error:
        raise translate(error, what) from error


@asynccontextmanager
async def bounded(what: str, timeout_s: float | None) -> AsyncIterator[None]:
    """Like `translated`; raises StoreUnavailable after `timeout_s` seconds, None: never."""
    try:
        async with asyncio.timeout(timeout_s):
            with translated(what):
                yield
    except TimeoutError:
        raise StoreUnavailable(f"{what}: no answer within {timeout_s:g} s") from None


class Database:
    """A database, opened for writing. Made by `Root.database`.

    Every method raises `Fenced` once another writer has taken over and this one has noticed,
    `StoreUnavailable` or `StoreFailed` when the store fails, `DamagedStore` on damage.
    """

    def __init__(
        self,
        db: Db,
        name: str,
        durability: Durability,
        replay: ReplayBound,
        recorder: DefaultMetricsRecorder,
        of_commits: Durability,
        uncompacted_tables_max: int,
    ) -> None:
        """`durability` syncs all that is written, `of_commits` the WAL, which has the commits."""
        self._db = db
        self._recorder = recorder
        self._durability = durability
        self._of_commits = of_commits
        self._replay = replay
        # What this start has replayed is flushed with the first commit.
        self._unflushed_commits = replay.commits
        self._flush_timer: asyncio.TimerHandle | None = None
        self._bounding: asyncio.Task[None] | None = None
        self._handle: Any = None  # of the newest write
        self._thread: CommitThread | None = None
        self._closed = False
        self._outlasts = False
        self._reads: dict[int, float] = {}
        self._read_numbers = count()
        self.name = name
        self.uncompacted_tables_max = uncompacted_tables_max
        """Sorted tables that may wait to be compacted: with as many, writes wait."""
        self.failed: StorageError | None = None
        """Why nothing can be written any more; None while it can."""

    async def get(self, key: bytes, durable: bool = False) -> bytes | None:
        """The value of `key`, or None; `durable` hides what a crash would undo."""
        options = _READ_DURABLE if durable else READ_MEMORY
        with self._reading(f"reading from {self.name}"), self._waiting():
            return await CALLS.get(self._db, key, options)

    @property
    def flush_commits(self) -> int:
        """Commits after which their rows go into tables."""
        return self._replay.commits

    def reading_ms(self) -> int:
        """For how long the oldest read has waited for the store, in milliseconds; 0: none does."""
        began_s = next(iter(self._reads.values()), None)
        return 0 if began_s is None else int((time.monotonic() - began_s) * 1000)

    async def written_ms(self, key: bytes) -> int | None:
        """When `key` was last put, by SlateDB's own clock (its tick), in ms; None if absent.

        Every commit has the clock record, so its time is that of the last commit: SlateDB accepts
        no write before the wall clock is past it.
        """
        with self._reading(f"reading from {self.name}"):
            row = await self._db.get_key_value_with_options(key, _READ_DURABLE)
        return None if row is None else int(row.create_ts)

    async def get_many(self, keys: Iterable[bytes], durable: bool = False) -> list[bytes | None]:
        """The values of `keys`, in their order, read concurrently; None where absent."""
        return await asyncio.gather(*(self.get(key, durable) for key in keys))

    async def scan(
        self,
        start: bytes,
        end: bytes,
        limit: int | None = None,
        durable: bool = False,
        descending: bool = False,
    ) -> AsyncIterator[list[Row]]:
        """Rows with start ≤ key < end in key order (or backwards), in non-empty lists.

        At most `limit` rows in all. Do not start before deleted rows: each costs 1.5 µs, every
        time.
        """
        if start >= end or limit == 0:
            return
        short = limit is not None and limit <= SHORT_SCAN_ROWS
        options = scan_options(durable=durable, short=short, descending=descending)
        left = limit
        with self._reading(f"scanning {self.name}"):
            with self._waiting():
                iterator = await CALLS.scan(self._db, start, end, options)
            while left is None or left > 0:
                wanted = BATCH_ROWS if left is None else min(BATCH_ROWS, left)
                with self._waiting():
                    rows = await CALLS.next_rows(iterator, wanted)
                if rows:
                    yield rows
                if len(rows) < wanted:
                    return
                if left is not None:
                    left -= len(rows)

    async def write(self, batch: Batch, alone: bool = False) -> bool:
        """Apply `batch` atomically; a batch is written once. Returns whether it is durable already.

        With `alone`, for a small batch while no other is on its way to the disk, a commit thread
        makes it durable too, where there is one. Otherwise it is durable after `flush`.
        """
        self._check()
        with self._changing(f"writing to {self.name}"):
            filled = await batch.fill()
            thread = self._commit_thread() if alone else None
            if thread is None:
                self._handle = await self._db.write(filled)
                return False
            before = self._handle
            handle = await thread.commit(filled)
        if self._handle is before:
            self._handle = handle
        self._bound_replay()
        return True

    def _commit_thread(self) -> CommitThread | None:
        if self._thread is None and isinstance(self._of_commits, FolderSync):
            committer = CALLS.committer(self._db, _FLUSH_WAL)
            if committer is not None:
                self._thread = CommitThread(committer, self._of_commits.sync_now, self.name)
        return self._thread

    async def flush(self) -> None:
        """Make everything durable that was written before this call."""
        self._check()
        handle = self._handle
        with self._changing(f"making a commit of {self.name} durable"):
            await self._db.flush_with_options(_FLUSH_WAL)
            # An empty flush says nothing about leadership; the handle of our own write does.
            if handle is not None:
                await handle.await_durable()
            await self._of_commits.sync()
        self._bound_replay()

    async def commit(self, batch: Batch) -> None:
        """Write `batch` and make it durable. Await it before writing what must come later."""
        if not await self.write(batch, alone=True):
            await self.flush()

    async def flush_memtable(self) -> None:
        """Move everything into sorted tables, durably, so that a checkpoint contains it."""
        self._check()
        with self._changing(f"flushing the memtable of {self.name}"):
            await self._db.flush_with_options(_FLUSH_MEMTABLE)
            await self._durability.sync()

    def lose_wal_store(self, error: StorageError) -> None:
        """Let no commit count from now on, for this error; `close` puts those that did into tables.

        For a store of the WALs that has lost what it had: so nothing is lost that was answered.
        """
        if self.failed is None:
            self._outlasts = True
        self._fail(error)

    async def outlast_wal_store(self) -> None:
        """Have what is durable outlast the loss of the store of the WALs, where that is another."""
        if self._of_commits is not self._durability:
            await self.flush_memtable()

    def _bound_replay(self) -> None:
        """Count a commit; flush the memtable behind it when that is due."""
        self._unflushed_commits += 1
        self._arm_flush()
        if self._unflushed_commits >= self._replay.commits:
            self._begin_flush()

    def _arm_flush(self) -> None:
        if self._flush_timer is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._flush_timer = loop.call_later(self._replay.age_s, self._begin_flush)

    def _begin_flush(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._closed or self.failed is not None:
            return
        if self._bounding is None or self._bounding.done():
            self._unflushed_commits = 0
            self._bounding = asyncio.create_task(self._flush_behind())
        else:  # It may have begun before the last commit, and that may stay the last one.
            self._arm_flush()

    async def _flush_behind(self) -> None:
        try:
            await self._db.flush_with_options(_FLUSH_MEMTABLE)
            await self._durability.sync()
        except (Error, InternalError, OSError) as error:
            # The commits themselves are in the WAL; the next one reports what is wrong.
            _log.warning("flushing the memtable of %s: %r", self.name, error)
            self._arm_flush()

    def statistics(self) -> Statistics:
        """What SlateDB has counted so far; from any thread, in some 3 ms."""
        return statistics_of(self._recorder)

    @property
    def closed_reason(self) -> str | None:
        """None while open, else `clean`, `fenced`, `panic` or `unknown`."""
        reason = self._db.status().close_reason
        return None if reason is None else str(reason.name).lower()

    async def wait_closed(self) -> str:
        """Return the reason once this database is fenced or closed; polls once a second."""
        while True:
            reason = self.closed_reason
            if reason is not None:
                return reason
            await asyncio.sleep(STATUS_POLL_S)

    async def close(self) -> None:
        """Flush and close. Does not raise for a database that is closed, fenced or failed already.

        A failed one is closed without a flush: what only memory has was never acknowledged. But see
        `lose_wal_store`.
        """
        if self._closed:
            return
        self._closed = True
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        if self._thread is not None:
            await self._thread.close()
        if self._bounding is not None:
            await self._bounding
        if self.closed_reason is not None:
            return
        try:
            if self.failed is not None:
                if self._outlasts:
                    await self._db.flush_with_options(_FLUSH_MEMTABLE)
                    await self._durability.sync()
                await self._db.shutdown_with_options(CloseOptions(flush_type=None))
                return
            await self._db.shutdown()
            await self._durability.sync()
        except Error.Closed:
            return
        except (Error, InternalError, OSError) as error:
            if self.failed is not None:
                _log.warning("closing %s after it had failed: %r", self.name, error)
            elif isinstance(error, Error):
                raise translate(error, f"closing {self.name}") from error
            else:
                raise StoreFailed(f"closing {self.name}: {readable(str(error))}") from error

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """A read of the store: see `reading_ms`."""
        number = next(self._read_numbers)
        self._reads[number] = time.monotonic()
        try:
            yield
        finally:
            del self._reads[number]

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Like `translated`; where a failed change has closed the database, that is the error."""
        try:
            yield
        except (Error, InternalError) as error:
            if self.failed is not None and isinstance(error, Error.Closed):
                raise self.failed from error
            raise translate(error, what) from error

    def _check(self) -> None:
        if self.failed is not None:
            raise self.failed
        if self._closed:
            raise StoreFailed(f"{self.name} is closed")

    @contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """Any error in it makes the database fail permanently; `what` says what is being done."""
        try:
            yield
        except InternalError as panic:
            # What is read after it may be whole: a writer goes on from there, as after a crash.
            cause = StoreFailed(f"{what}: {readable(str(panic))}")
            raise self._fail(cause) from panic
        except Error as error:
            raise self._fail(translate(error, what)) from error
        except StorageError as error:
            raise self._fail(error) from error
        except OSError as error:
            cause = StoreFailed(f"syncing the data folder of {self.name}: {error}")
            raise self._fail(cause) from error

    def _fail(self, error: StorageError) -> StorageError:
        if self.failed is None:
            self.failed = error
        return self.failed
