"""Snapshots: states of a database that stay readable from anywhere while its owner goes on.

A snapshot is a SlateDB checkpoint with a lifetime. A checkpoint lacks what is durable in the WAL
alone, so the owner flushes the memtable first, and the snapshot contains everything that was
committed before `take` was called. An owner that was replaced and has not noticed could have
nothing to flush, and its snapshot would lack what its successor has in the WAL. So `take` always
writes something first, which fails for such an owner. Any process that can read the store can read
a snapshot, by the database's name and the snapshot's ID.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

from slatedb.uniffi import (
    Admin,
    Checkpoint,
    CheckpointOptions,
    DbReader,
    ReaderOptions,
)

from libs.storage.database.binding import CALLS
from libs.storage.database.slate import (
    READ_MEMORY,
    Batch,
    Database,
    bounded,
    scan_options,
    translated,
)
from libs.storage.errors import SnapshotNotFound
from libs.storage.layout.own_keys import CLOCK_KEY
from libs.storage.layout.primitives import Row

SNAPSHOTS_MAX: Final = 64
"""Snapshots at a time: each is an entry in the manifest, and keeps the tables of its time."""

STORE_TIMEOUT_S: Final = 30.0
"""How long the store may take for one change of the manifest."""

NAME: Final = "slatemq-snapshot"
"""The name of our checkpoints; those made with SlateDB's own tools have others."""

NEVER_PUT: Final = CLOCK_KEY + b"\xff"
"""A key that is never put: deleting it is a write that changes nothing."""

BATCH_BYTES: Final = 8 << 20
"""The size that batches of a scan aim at: enough for columns, little for an executor."""

BATCH_ROWS_MIN: Final = 16
BATCH_ROWS_MAX: Final = 8192

READER_OPTIONS: Final = ReaderOptions(
    manifest_poll_interval_ms=60_000,
    checkpoint_lifetime_ms=600_000,
    max_memtable_bytes=1 << 20,
    skip_wal_replay=True,
    object_store_max_retries=3,
)
"""A snapshot never changes, so nothing is polled; it holds all rows in its tables, so no WAL."""

LATEST_OPTIONS: Final = ReaderOptions(
    manifest_poll_interval_ms=60_000,
    checkpoint_lifetime_ms=600_000,
    max_memtable_bytes=64 << 20,
    skip_wal_replay=False,
    object_store_max_retries=0,
)
"""For a database without an owner: the rows of its WAL are wanted, too. What is damaged is read
again and again to find where the damage ends, so a read that fails is not repeated."""

T = TypeVar("T")


class TooManySnapshots(Exception):
    """The database has SNAPSHOTS_MAX snapshots; release one, or wait until one expires."""


class Snapshots:
    """The snapshots of one database, for its owner. Made by `Root.snapshots`.

    Every method raises StoreUnavailable or StoreFailed when the store fails; `take` also raises the
    errors of a commit.
    """

    def __init__(
        self, database: Database, admin: Admin, now_s: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._admin = admin
        self._now_s = now_s
        self._taking = asyncio.Lock()

    @property
    def database(self) -> str:
        """The database's name below the root."""
        return self._database.name

    async def take(self, lifetime_ms: int) -> str:
        """The ID of a new snapshot of all that was committed before. Raises TooManySnapshots.

        Commits go on meanwhile. SlateDB counts lifetimes in whole seconds. Raises Fenced when
        another process owns the database.
        """
        async with self._taking:
            if len(await self._alive()) >= SNAPSHOTS_MAX:
                raise TooManySnapshots
            proof = Batch()
            proof.delete(NEVER_PUT)
            await self._database.write(proof)
            await self._database.flush_memtable()
            options = CheckpointOptions(lifetime_ms=lifetime_ms, source=None, name=NAME)
            made = await self._call("taking", self._admin.create_detached_checkpoint(options))
            return str(made.id)

    async def renew(self, snapshot_id: str, lifetime_ms: int) -> None:
        """Let the snapshot expire `lifetime_ms` from now. Raises SnapshotNotFound."""
        if snapshot_id not in await self._alive():
            raise SnapshotNotFound(snapshot_id)
        await self._call("renewing", self._admin.refresh_checkpoint(snapshot_id, lifetime_ms))

    async def release(self, snapshot_id: str) -> None:
        """End the snapshot; no error if it has ended."""
        if snapshot_id in await self._alive():
            await self._call("releasing", self._admin.delete_checkpoint(snapshot_id))

    async def _alive(self) -> set[str]:
        listed: list[Checkpoint] = await self._call("listing", self._admin.list_checkpoints(NAME))
        now_s = self._now_s()
        return {
            str(one.id)
            for one in listed
            if one.expire_time_secs is None or one.expire_time_secs > now_s
        }

    async def _call(self, doing: str, call: Awaitable[T]) -> T:
        async with bounded(f"{doing} a snapshot of {self.database}", STORE_TIMEOUT_S):
            return await call


class SnapshotReader:
    """Reads one snapshot. Made by `Root.open_snapshot`; close it.

    Attributes:
        rows_read: How many rows scans and gets have returned so far.
    """

    def __init__(self, reader: DbReader, name: str) -> None:
        self._reader = reader
        self._name = name
        self.rows_read = 0

    async def get(self, key: bytes) -> bytes | None:
        with translated(f"reading a snapshot of {self._name}"):
            value = await CALLS.get(self._reader, key, READ_MEMORY)
        self.rows_read += value is not None
        return value

    async def scan(
        self,
        start: bytes,
        end: bytes,
        limit: int | None = None,
        descending: bool = False,
        rows_max: int = BATCH_ROWS_MAX,
    ) -> AsyncIterator[list[Row]]:
        """Rows with start ≤ key < end in key order (or backwards), in lists of some BATCH_BYTES.

        A list has `rows_max` rows at most: after small rows all the next ones may be large.
        """
        if start >= end or limit == 0:
            return
        short = limit is not None and limit <= BATCH_ROWS_MIN
        options = scan_options(durable=True, short=short, descending=descending)
        left = limit
        count = BATCH_ROWS_MIN
        with translated(f"scanning a snapshot of {self._name}"):
            iterator = await CALLS.scan(self._reader, start, end, options)
            while left is None or left > 0:
                wanted = count if left is None else min(count, left)
                rows = await CALLS.next_rows(iterator, wanted)
                self.rows_read += len(rows)
                if rows:
                    yield rows
                if len(rows) < wanted:
                    return
                if left is not None:
                    left -= len(rows)
                count = min(_next_count(count, rows), rows_max)

    async def close(self) -> None:
        with translated(f"closing a snapshot of {self._name}"):
            await self._reader.shutdown()


def _next_count(count: int, rows: list[Row]) -> int:
    """How many rows to read next: about BATCH_BYTES, growing fourfold at most."""
    size_bytes = sum(len(value) for _, value in rows) // len(rows) + 1
    return max(BATCH_ROWS_MIN, min(BATCH_BYTES // size_bytes, 4 * count, BATCH_ROWS_MAX))
