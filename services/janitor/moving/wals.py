"""Moves the write-ahead logs of a stopped instance to another store.

::

    the next record    names the new store, which has no marker yet: no process starts from here on
    each database      opened with the old store, so that an owner that runs on is fenced; all that
                       its log has goes into tables
    each database      opened with the new store, which begins its log there
    the marker         the new store is the instance's: processes start again

The old WALs stay: an owner that was frozen all the while finds by them that it was fenced.
Each step may be repeated, so a move that was interrupted goes on when it is run again. Where the
old store is lost, the second step is left out: what was answered since the last tables is lost
then, what may have been given out since is renumbered, and the names of the queues are claimed for
the shards that have them, as in a copy of the instance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from libs.storage.database.integrity import WAL
from libs.storage.database.roots import Root
from libs.storage.database.slate import Database
from libs.storage.database.wal_stores import WalStore, unknown_wal_store
from libs.storage.objects.instance_records import InstanceRecord, InstanceRecords, WalStoreRecord
from libs.storage.objects.queue_names import QueueNames
from services.janitor.backup.queue_places import QueuePlaces
from services.janitor.backup.renumbering import renumber
from services.janitor.backup.shards import kind_of, opened_restored
from services.janitor.snapshots import databases_of
from slatemq._counts import counted
from slatemq.errors import FailedPrecondition
from slatemq.models import now_ms

LOST_COMMITS_S: Final = 3600.0
"""For how long commits may have been lost, to leave IDs out for their messages: tables are written
a minute after a commit at most, while their store takes them."""


@dataclass
class WalMove:
    """One move.

    Attributes:
        source: A root of its own, which reaches the old store.
        target: A root of its own; its `wal_url` is of the new store.
        is_lost: The old store is lost.
    """

    source: Root
    target: Root
    is_lost: bool = False
    say: Callable[[str], None] = lambda line: None
    databases: Sequence[str] = field(default=(), init=False)

    async def move(self) -> None:
        """Raises FailedPrecondition, and the errors of the storage."""
        record, named = await self._begin()
        self.databases = await databases_of(self.target.objects)
        new = self.target.open_wal_store(named, make=True)
        self.target.use_wal_store(new)
        old = await self._old_store(named)
        if await new.has_marker():
            return
        if record.wal_store != named:
            await self._refuse_used(new)
            await self._write(record, named)
        await (self._begin_without() if self.is_lost else self._flush_and_begin(old))
        await new.mark(self.target.url)

    async def _begin(self) -> tuple[InstanceRecord, WalStoreRecord]:
        """The latest record, and the new store as it, or the next one, has it."""
        record = await InstanceRecords(self.target.objects).latest()
        if record is None:
            raise FailedPrecondition("NO_INSTANCE", f"there is no instance below {self.target.url}")
        if record.wal_store is not None and record.wal_store.url == self.target.wal_url:
            return record, record.wal_store
        named = WalStoreRecord.new(self.target.wal_url)
        if self.is_lost and record.wal_store is None:
            raise FailedPrecondition(
                "WALS_AT_ROOT",
                "the WALs of this instance are below its root, in no store of their own: see "
                "docs/how-to/repair.md for what is lost there",
            )
        if not self.is_lost:
            await self.source.wal_store()  # Raises where it is down: before anything is changed.
        return record, named

    async def _old_store(self, named: WalStoreRecord) -> WalStore:
        """The store that the WALs were in before; that of the lost ones is not used."""
        before = await InstanceRecords(self.target.objects).latest()
        if before is None or before.wal_store == named:
            before = await InstanceRecords(self.target.objects).before(named)
        if self.is_lost or before is None or before.wal_store is None:
            old = self.source.own_wal_store()
        else:
            old = self.source.open_wal_store(before.wal_store, make=False)
        self.source.use_wal_store(old)
        return old

    async def _write(self, record: InstanceRecord, named: WalStoreRecord) -> None:
        following = record._replace(
            number=record.number + 1, written_at_ms=now_ms(), wal_store=named
        )
        if not await InstanceRecords(self.target.objects).create(following):
            raise FailedPrecondition(
                "CHANGED_MEANWHILE",
                "the settings of the instance were changed meanwhile: stop its processes, and "
                "repeat this",
            )

    async def _flush_and_begin(self, old: WalStore) -> None:
        if old.record is not None and not await old.has_marker():
            raise unknown_wal_store(old, is_other=False)
        for name in self.databases:
            database = await self.source.database(name, kind_of(name))
            try:
                await database.flush_memtable()
            finally:
                await database.close()
            self.say(f"{name}: all of its log is in tables")
        for name in self.databases:
            async with opened_restored(self.target, name):
                self.say(f"{name}: its log begins in {self.target.wal_url}")

    async def _begin_without(self) -> None:
        places = QueuePlaces(self.databases)

        async def done(name: str, database: Database) -> None:
            await places.find(name, database)
            self.say(f"{name}: goes on from its tables in {self.target.wal_url}")

        opened = partial(opened_restored, self.target)
        await renumber(self.databases, opened, LOST_COMMITS_S, done)
        async for _ in places.claim(QueueNames(self.target.objects)):
            pass
        self.say(
            f"the names of {counted(places.queues_count, 'queue')} are claimed for the shards "
            "that have them"
        )

    async def _refuse_used(self, new: WalStore) -> None:
        for name in self.databases:
            if await new.objects.list(f"{name}/{WAL}"):
                raise FailedPrecondition(
                    "STORE_NOT_EMPTY",
                    f"{new.name_of(name)} has a log already: give an empty store",
                )
