"""The object store of a simulated world, and SlateDB's part of it.

Small objects, as `obstore` has them, and databases, as SlateDB's binding has them: what
`libs.storage` calls is its own code, and stands on these. Each request takes its time, on the way
there and on the way back, may be lost on either, and takes effect at one moment between, whether
its caller still lives then or not.

A database is what its log holds: a flush appends one object, in the name of the epoch that the
writer opened it with. Opening it raises the epoch, so that nothing of an earlier writer lands
after it, and the earlier one notices by its next flush, or by a look within a second, or a minute.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias, TypeVar

from obstore.exceptions import (
    AlreadyExistsError,
    GenericError,
    NotFoundError,
    PreconditionError,
)
from slatedb.uniffi import (
    CloseReason,
    DefaultMetricsRecorder,
    DurabilityLevel,
    Error,
    FlushType,
    IterationOrder,
)
from sortedcontainers import SortedDict

from libs.storage.database import slate, snapshots
from libs.storage.database.addresses import Address
from libs.storage.database.binding import PublicCalls
from libs.storage.database.formats import settle_format
from libs.storage.database.roots import Root
from libs.storage.database.settings import Kind, Tuning, tuning_of
from libs.storage.database.slate import Batch, Database
from libs.storage.database.snapshots import NEVER_PUT
from libs.storage.errors import StoreUnavailable
from libs.storage.layout.primitives import Row
from libs.storage.objects.durability import NoSync
from libs.storage.objects.small_objects import Objects
from tests.simulation.loop import MACHINE, WorldLoop

T = TypeVar("T")

Rows: TypeAlias = SortedDict[bytes, tuple[bytes, int]]
"""The rows of a database, by key: each with its value and the time of its write."""

ADDRESS: Final = Address("s3", "simulated", "instance", None, ())

RETRIES_S: Final = 12.0
"""How long the store's clients try a request again, before they give up."""

SLOW: Final = 60.0
"""How many times as long a request of a machine takes for which the store is slow."""

LOOKS_S: Final = (1.0, 1.0, 60.0)
"""How often a writer looks whether it was replaced: as on a disk, or where a look is paid."""


@dataclass
class StoreFaults:
    """How the store behaves.

    Attributes:
        latency_s: Of one way, in the mean.
        lost_requests: Share of requests that do not arrive; their client tries again.
        lost_answers: Share of answers that do not arrive: what was asked for has happened.
        late: Share of requests that arrive seconds later, when their client has tried again.
        down_until_s: Time of the world until which nothing is answered.
        unreachable_until_s: The same for single machines, by name: others have the store meanwhile.
        slow_until_s: Time of the world until which machines wait SLOW times as long for it.
    """

    latency_s: float = 0.004
    lost_requests: float = 0.0
    lost_answers: float = 0.0
    late: float = 0.0
    down_until_s: float = 0.0
    unreachable_until_s: dict[str, float] = field(default_factory=dict)
    slow_until_s: dict[str, float] = field(default_factory=dict)

    def clear(self) -> None:
        """No faults from now on."""
        self.lost_requests = self.lost_answers = self.late = self.down_until_s = 0.0
        self.unreachable_until_s.clear()
        self.slow_until_s.clear()


@dataclass
class _Stored:
    data: bytes
    tag: str
    modified_s: float


@dataclass
class _Log:
    """What is durable of a database."""

    rows: Rows = field(default_factory=SortedDict)
    epoch: int = 0
    tick_ms: int = 0


class SimulatedStore:
    """Everything that is durable in the world.

    Attributes:
        snapshots: The rows of databases as they were, by the ID of the snapshot.
        on_landed: Called with the name of a database whose commit has landed.
        on_append: By database, what to call once its next commit has landed, unanswered as yet.
    """

    def __init__(self, loop: WorldLoop, seed: str) -> None:
        self.loop = loop
        self.faults = StoreFaults()
        self.chance = random.Random(f"{seed}/store")
        self.objects: SortedDict[str, _Stored] = SortedDict()
        self.logs: dict[str, _Log] = {}
        self.snapshots: dict[str, Rows] = {}
        self.on_landed: Callable[[str], object] = _nothing_of
        self.on_append: dict[str, Callable[[], None]] = {}
        self.requests = 0
        self._tags = 0

    async def request(self, effect: Callable[[], T]) -> T:
        """What `effect` gives, or raises, at the moment at which the request takes effect.

        It is tried again, effect and all, when the request or its answer was lost. Raises OSError
        when that goes on for too long.
        """
        began_s, machine = self.loop.time(), MACHINE.get().name
        while True:
            self.requests += 1
            answer: asyncio.Future[T | None] = self.loop.create_future()
            arrives_s = self.loop.time() + self._way_s(machine)
            if self.faults.late and self.chance.random() < self.faults.late:
                arrives_s += self.chance.uniform(0.0, 6.0)
            if not self.is_down(machine):
                is_lost = self.chance.random() < self.faults.lost_requests
                if not is_lost:
                    # On the store's own machine: it happens although the caller has ended.
                    self.loop.at(
                        arrives_s, self.loop.world, self._take_effect, effect, answer, machine
                    )
            try:
                async with asyncio.timeout(2.0):
                    return await answer  # type: ignore[return-value]
            except TimeoutError:
                if self.loop.time() - began_s > RETRIES_S:
                    raise OSError("no answer from the store") from None

    def is_down(self, machine: str) -> bool:
        """Whether a machine, by its name, gets no answers now."""
        until_s = max(self.faults.down_until_s, self.faults.unreachable_until_s.get(machine, 0.0))
        return self.loop.time() < until_s

    def _take_effect(
        self, effect: Callable[[], T], answer: asyncio.Future[T], machine: str
    ) -> None:
        result: T | None = None
        error: Exception | None = None
        try:
            result = effect()
        except Exception as problem:
            error = problem
        if self.chance.random() < self.faults.lost_answers:
            return

        def arrive() -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        self.loop.call_later(self._way_s(machine), arrive)

    def _way_s(self, machine: str) -> float:
        latency_s = self.faults.latency_s
        slow = 8.0 if self.chance.random() < 0.02 else 1.0
        if self.loop.time() < self.faults.slow_until_s.get(machine, 0.0):
            slow *= SLOW
        return self.chance.uniform(0.2, 1.8) * latency_s * slow

    def next_tag(self) -> str:
        self._tags += 1
        return f"tag-{self._tags}"

    def log_of(self, name: str) -> _Log:
        return self.logs.setdefault(name, _Log())


# --- Small objects ----------------------------------------------------------


Page = list[Mapping[str, Any]]


class _Result:
    def __init__(self, path: str, stored: _Stored) -> None:
        self.meta = _meta(path, stored)
        self._data = stored.data

    async def bytes_async(self) -> bytes:
        return self._data

    async def stream(self, min_chunk_size: int) -> AsyncIterator[bytes]:
        for begin in range(0, len(self._data), min_chunk_size):
            yield self._data[begin : begin + min_chunk_size]


def _meta(path: str, stored: _Stored) -> dict[str, Any]:
    return {
        "path": path,
        "size": len(stored.data),
        "e_tag": stored.tag,
        "last_modified": datetime.fromtimestamp(stored.modified_s, UTC),
    }


class ObjectStore:
    """The calls of obstore's stores that `libs.storage.objects` makes."""

    def __init__(self, store: SimulatedStore) -> None:
        self._store = store
        self._objects = store.objects

    async def get_async(self, path: str) -> _Result:
        return await self._asked(lambda: _Result(path, self._found(path)))

    async def head_async(self, path: str) -> Mapping[str, Any]:
        return await self._asked(lambda: _meta(path, self._found(path)))

    async def put_async(
        self, path: str, data: bytes, mode: Any = None, chunk_size: int = 0
    ) -> Mapping[str, Any]:
        def put() -> Mapping[str, Any]:
            known = self._objects.get(path)
            if mode == "create" and known is not None:
                raise AlreadyExistsError(path)
            if isinstance(mode, dict) and (known is None or known.tag != mode["e_tag"]):
                raise PreconditionError(path)
            stored = _Stored(bytes(data), self._store.next_tag(), time.time())
            self._objects[path] = stored
            return _meta(path, stored)

        return await self._asked(put)

    async def delete_async(self, paths: str | Sequence[str]) -> None:
        def delete() -> None:
            for path in [paths] if isinstance(paths, str) else paths:
                self._objects.pop(path, None)

        await self._asked(delete)

    async def list(
        self, prefix: str, offset: str | None = None, chunk_size: int = 50
    ) -> AsyncIterator[Page]:
        found = await self._asked(lambda: self._below(prefix, offset or ""))
        for begin in range(0, len(found), chunk_size):
            yield found[begin : begin + chunk_size]

    async def list_with_delimiter_async(self, prefix: str) -> Mapping[str, Any]:
        found = await self._asked(lambda: self._below(prefix, ""))
        rests = {meta["path"][len(prefix) + 1 :]: meta for meta in found}
        folders = {rest.partition("/")[0] for rest in rests if "/" in rest}
        return {
            "common_prefixes": [f"{prefix}/{name}" for name in sorted(folders)],
            "objects": [meta for rest, meta in rests.items() if "/" not in rest],
        }

    def _below(self, prefix: str, offset: str) -> Page:
        begin = f"{prefix}/"
        paths = self._objects.irange(begin, begin + "\U0010ffff")
        return [_meta(path, self._objects[path]) for path in paths if path > offset]

    def _found(self, path: str) -> _Stored:
        stored: _Stored | None = self._objects.get(path)
        if stored is None:
            raise NotFoundError(path)
        return stored

    async def _asked(self, effect: Callable[[], T]) -> T:
        try:
            return await self._store.request(effect)
        except OSError as error:
            raise GenericError(str(error)) from None


# --- Databases --------------------------------------------------------------


class WriteBatch:
    """The binding's WriteBatch."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes | None] = {}

    def put(self, key: bytes, value: bytes) -> None:
        self.rows[key] = value

    def delete(self, key: bytes) -> None:
        self.rows[key] = None


class WriteHandle:
    """The binding's WriteHandle."""

    def __init__(self, db: Db, number: int) -> None:
        self._db = db
        self._number = number

    async def await_durable(self) -> None:
        while self._db.durable_number < self._number:
            await self._db.flushed()


@dataclass(frozen=True)
class _Status:
    close_reason: CloseReason | None


@dataclass(frozen=True)
class _KeyValue:
    key: bytes
    value: bytes
    create_ts: int


class Db:
    """The calls of the binding's Db that `libs.storage.database` makes.

    Attributes:
        durable_number: Of the last write that is known to be durable.
    """

    def __init__(self, store: SimulatedStore, name: str, log: _Log, epoch: int) -> None:
        self._store = store
        self._log = log
        self._name = name
        self._epoch = epoch
        # What it sees: the log at its opening, and what it has written since.
        self._memory: Rows = log.rows.copy()
        self._durable: Rows = log.rows.copy()
        self._pending: list[tuple[int, int, dict[bytes, bytes | None]]] = []
        self._written = 0
        self._landed = 0
        self._tick_ms = log.tick_ms
        self.durable_number = 0
        self._flushing = asyncio.Lock()
        self._flushed = asyncio.Event()
        self._reason: CloseReason | None = None
        self._machine = MACHINE.get().name
        # When its own look at the manifest shows it that another has opened the database.
        self._look_s = store.chance.uniform(0.0, store.chance.choice(LOOKS_S))
        self._outdated_s: float | None = None

    def status(self) -> _Status:
        self._look()
        return _Status(self._reason)

    def _look(self) -> None:
        if self._reason is not None or self._log.epoch == self._epoch:
            return
        now_s = self._store.loop.time()
        if self._outdated_s is None:
            self._outdated_s = now_s
        if now_s - self._outdated_s >= self._look_s and not self._store.is_down(self._machine):
            self._close(CloseReason.FENCED)

    def _close(self, reason: CloseReason) -> None:
        self._reason = reason
        self._flushed.set()

    def _check(self) -> None:
        if self._reason is not None:
            raise Error.Closed(reason=self._reason, message=f"closed: {self._reason.name}")

    async def write(self, batch: WriteBatch) -> WriteHandle:
        self._check()
        await asyncio.sleep(0)
        self._check()
        tick_ms = int(time.time() * 1000)
        if tick_ms < self._tick_ms:
            self._close(CloseReason.UNKNOWN)
            raise Error.Invalid(message=f"invalid clock tick {tick_ms}")
        self._tick_ms = tick_ms
        self._written += 1
        _apply(self._memory, batch.rows, tick_ms)
        self._pending.append((self._written, tick_ms, batch.rows))
        return WriteHandle(self, self._written)

    async def flush_with_options(self, options: Any) -> None:
        self._check()
        async with self._flushing:
            self._check()
            if self._pending:
                await self._append()
            if options.flush_type == FlushType.MEM_TABLE:
                await self._asked(lambda: None)

    async def _append(self) -> None:
        # Nothing lands before what was written before it, also where an earlier flush failed.
        pending = self._pending.copy()

        def append() -> bool:
            if self._landed >= pending[-1][0]:
                return True  # A repeated request finds what the first one wrote.
            if self._log.epoch != self._epoch:
                return False
            for number, tick_ms, rows in pending:
                if number > self._landed:
                    self._landed = number
                    _apply(self._log.rows, rows, tick_ms)
                    self._log.tick_ms = max(self._log.tick_ms, tick_ms)
            self._store.on_landed(self._name)
            self._store.on_append.pop(self._name, _nothing)()
            return True

        if not await self._asked(append):
            self._close(CloseReason.FENCED)
            self._check()
        for number, tick_ms, rows in pending:
            _apply(self._durable, rows, tick_ms)
            self.durable_number = number
        del self._pending[: len(pending)]
        self._flushed.set()
        self._flushed = asyncio.Event()

    async def flushed(self) -> None:
        self._check()
        await self._flushed.wait()
        self._check()

    async def get_with_options(self, key: bytes, options: Any) -> bytes | None:
        self._check()
        await self._seek()
        found = self._seen(options).get(key)
        return None if found is None else found[0]

    async def get_key_value_with_options(self, key: bytes, options: Any) -> _KeyValue | None:
        self._check()
        await self._seek()
        found = self._seen(options).get(key)
        return None if found is None else _KeyValue(key, *found)

    async def scan_with_options(self, span: Any, options: Any) -> _Scan:
        self._check()
        rows = self._seen(options)
        keys = rows.irange(
            span.start, span.end, (True, False), options.order == IterationOrder.DESCENDING
        )
        # All of it now: what is written meanwhile does not appear.
        found = [(key, rows[key][0]) for key in keys]
        await self._seek()
        return _Scan(self, found)

    def _seen(self, options: Any) -> Rows:
        is_durable = options.durability_filter == DurabilityLevel.REMOTE
        return self._durable if is_durable else self._memory

    async def _seek(self) -> None:
        """What is read comes from memory mostly, and else from the store."""
        if self._store.chance.random() < 0.02:
            await self._asked(lambda: None)
        else:
            await asyncio.sleep(0)

    async def _asked(self, effect: Callable[[], T]) -> T:
        try:
            return await self._store.request(effect)
        except OSError as error:
            raise Error.Unavailable(message=str(error)) from None

    async def shutdown(self) -> None:
        await self.flush_with_options(slate._FLUSH_WAL)
        self._close(CloseReason.CLEAN)

    async def shutdown_with_options(self, options: Any) -> None:
        self._close(CloseReason.CLEAN)


def _nothing() -> None:
    """Nothing waits for this commit."""


def _nothing_of(name: str) -> None:
    """Nothing looks at what is durable."""


class _Scan:
    """The binding's DbIterator."""

    def __init__(self, db: Db, rows: list[Row]) -> None:
        self._db = db
        self._rows = rows
        self._at = 0

    async def next_batch(self, count: int) -> list[_KeyValue]:
        self._db._check()
        await asyncio.sleep(0)
        rows = self._rows[self._at : self._at + count]
        self._at += len(rows)
        return [_KeyValue(key, value, 0) for key, value in rows]


def _apply(
    rows: Rows,
    changes: Mapping[bytes, bytes | None],
    tick_ms: int,
) -> None:
    for key, value in changes.items():
        if value is None:
            rows.pop(key, None)
        else:
            rows[key] = (value, tick_ms)


# --- A root -----------------------------------------------------------------


class SimulatedRoot(Root):
    """The instance's place in the store."""

    def __init__(self, store: SimulatedStore) -> None:
        no_sync = NoSync()
        own: Any = ObjectStore(store)
        none: Any = None  # SlateDB's store, which `database` does without.
        super().__init__(ADDRESS, none, Objects(own, None, no_sync), no_sync, 10.0)
        self._simulated = store

    async def database(
        self, name: str, kind: Kind, tuning: Tuning | None = None, *, is_restored: bool = False
    ) -> Database:
        """As of Root: takes the database over from whoever has it."""
        log = self._simulated.log_of(name)

        def begin() -> int:
            log.epoch += 1
            return log.epoch

        try:
            epoch = await self._simulated.request(begin)
            await self._simulated.request(lambda: None)
        except OSError as error:
            raise StoreUnavailable(f"opening {name}: {error}") from None
        db: Any = Db(self._simulated, name, log, epoch)
        tuning = tuning_of(kind, "s3")
        database = Database(
            db,
            name,
            self.durability,
            tuning.replay,
            DefaultMetricsRecorder(),
            self.durability,
            tuning.uncompacted_tables_max,
        )
        try:
            await settle_format(database, self.url)
        except BaseException:
            await database.close()
            raise
        return database

    def snapshots(self, database: Database) -> Any:
        return SimulatedSnapshots(self._simulated, database)


class SimulatedSnapshots:
    """The calls of `Snapshots` that services make; `SimulatedStore.snapshots` has what was taken.

    They are kept for ever, and written by nobody.
    """

    def __init__(self, store: SimulatedStore, database: Database) -> None:
        self._store = store
        self._database = database

    @property
    def database(self) -> str:
        return self._database.name

    async def take(self, lifetime_ms: int) -> str:
        # As the real ones: a write of this owner is durable first, so it has not been replaced.
        proof = Batch()
        proof.delete(NEVER_PUT)
        await self._database.write(proof)
        await self._database.flush_memtable()
        log = self._store.log_of(self.database)
        try:
            rows: Rows = await self._store.request(log.rows.copy)
        except OSError as error:
            raise StoreUnavailable(f"a snapshot of {self.database}: {error}") from None
        name = f"snapshot-{len(self._store.snapshots)}"
        self._store.snapshots[name] = rows
        return name


def install() -> None:
    """Let `libs.storage` make the batches of this store, by the public calls of the binding."""
    public = PublicCalls()
    modules: list[Any] = [slate, snapshots]
    for module in modules:
        module.CALLS = public
    modules[0].WriteBatch = WriteBatch
