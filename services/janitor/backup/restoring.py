"""Makes an instance from a backup, below a root that has none.

::

    the copies        before anything is written: where a table or a manifest is gone the restore
                      ends here, and where a payload is, unless it is to go on without
    restoring.json    names the backup: a restore that was interrupted may go on; and the store of
                      the write-ahead logs, where the instance gets one of its own. As long as it
                      is there, no process starts, and no other database is opened
    objects           tables, payloads, archived dead letters; they may be copied ahead. What has
                      rotted is not copied; where that is a table, the restore ends here
    manifests         from here on it is an instance
    each database     opened once, and renumbered; the queue names as the brokers have them
    removed shards    their numbers, which are not used again
    the settings of the instance
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from libs.storage.database.files import manifests_folder, tables_folder
from libs.storage.database.formats import FORMAT
from libs.storage.database.roots import Root
from libs.storage.database.slate import Database
from libs.storage.database.wal_stores import WalStore, unknown_wal_store
from libs.storage.errors import ObjectNotFound, OtherWalStore, StoreUnavailable
from libs.storage.objects.digests import digest_of
from libs.storage.objects.instance_records import WalStoreRecord, with_wal_store
from libs.storage.objects.json_objects import load_json
from libs.storage.objects.queue_names import QueueNames
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.objects.restores import RESTORING
from services.janitor.backup.catalogue import (
    OBJECTS,
    Backup,
    Catalogue,
    SavedDatabase,
    StoredObject,
    stored_manifest,
)
from services.janitor.backup.copying import Copier, Copy, missing, sizes_below
from services.janitor.backup.damage import describe, is_of_database
from services.janitor.backup.queue_places import QueuePlaces
from services.janitor.backup.renumbering import renumber
from services.janitor.backup.shards import KINDS, opened_restored
from services.janitor.jobs.contract import Progress, Report
from slatemq._counts import counted
from slatemq.errors import FailedPrecondition
from slatemq.models import now_ms as wall_ms

log = logging.getLogger(__name__)

PHASES: Final = ("objects", "databases", "queue names")


class _Begun(NamedTuple):
    """What a marker says: the backup, and the store of the WALs of the instance that it becomes."""

    backup_id: str
    wal_store: WalStoreRecord | None = None

    @classmethod
    def decode(cls, marker: bytes, url: str) -> _Begun:
        """Raises FailedPrecondition for one that no restore has written."""
        try:
            content = load_json(marker)
            named = content.get("wal_store")
            wal_store = None if named is None else WalStoreRecord(*map(str, named))
            return cls(str(content["backup_id"]), wal_store)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise FailedPrecondition(
                "ROOT_NOT_EMPTY",
                f"{url} has a {RESTORING} that names no backup: restore to an empty root",
            ) from error


def _is_lost(one: StoredObject, found_bytes: int | None) -> bool:
    if found_bytes is None:
        return True
    return is_of_database(one.stored) and found_bytes != one.size_bytes


@dataclass
class Restoring:
    """One restore.

    Attributes:
        prepare: Only copy objects, so that a later restore has less to copy.
        without_missing: Go on without payloads, and parts of the archive, whose copies are gone.
        report: Called with its progress.
        cancelled: Set it to end the copying soon: JobCancelled.
        copied_count: Objects copied.
        queues_count: Queues found in the brokers' databases.
        rotten: Copies, stored in the backup root, that were left out: they have other bytes than
            when they were written.
        missing: Those that were left out because they are gone.
    """

    catalogue: Catalogue
    backup: Backup
    target: Root
    prepare: bool = False
    without_missing: bool = False
    report: Report = lambda progress: None
    cancelled: threading.Event = field(default_factory=threading.Event)
    now_ms: Callable[[], int] = wall_ms
    copied_count: int = 0
    copied_bytes: int = 0
    queues_count: int = 0
    rotten: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    async def restore(self) -> None:
        """Make the instance. Raises FailedPrecondition, JobCancelled, the errors of the storage."""
        if self.backup.format != FORMAT:
            raise FailedPrecondition(
                "OTHER_FORMAT",
                f"the backup {self.backup.backup_id} has format {self.backup.format}, and this "
                f"version reads format {FORMAT} alone: restore it with the version that made it",
            )
        stored = await self.catalogue.stored(self.backup)
        await self._find_missing(stored)
        await self._begin()
        await self._copy(stored)
        if self.prepare:
            return
        self._say("databases", 0, len(self.backup.databases))
        for one in self.backup.databases:
            await self._put_manifest(one)
        await self._renumber()
        for database in self.backup.removed:
            await RemovedShards(self.target.objects).add(database, self.now_ms())
        wal_store = (await self.target.wal_store()).record
        for path, text in self.backup.instance.items():
            record = with_wal_store(path, text.encode(), wal_store)
            if not await self.target.objects.put_if_absent(path, record):
                raise self._in_use(path)
        await self.target.objects.delete(RESTORING)

    async def _find_missing(self, stored: Sequence[StoredObject]) -> None:
        """Refuse, before anything is written, what cannot end; one list of each root.

        Copies that are gone, and that a restore before has not copied. One of another size has
        rotted: that ends a restore only where it is a table. Raises FailedPrecondition.
        """
        sizes = await sizes_below(self.catalogue.objects, OBJECTS)
        there = await self._there(stored)
        lost = [
            one.stored
            for one in stored
            if there.get(one.path) != one.size_bytes and _is_lost(one, sizes.get(one.stored))
        ]
        manifests = await sizes_below(self.catalogue.objects, self.backup.folder)
        expected = [
            stored_manifest(self.backup.folder, one.database) for one in self.backup.databases
        ]
        lost += [path for path in expected if path not in manifests]
        if not lost:
            return
        begun = f"the backup {self.backup.backup_id} lacks {describe(lost)}"
        if any(map(is_of_database, lost)):
            raise FailedPrecondition(
                "BACKUP_DAMAGED",
                f"{begun}: restore another one, or put them back from the store's versions",
            )
        if not self.without_missing:
            raise FailedPrecondition(
                "BACKUP_DAMAGED",
                f"{begun}: restore another one, put them back from the store's versions, or go on "
                "without them (--without-missing): queues make messages without their payload "
                "dead letters (payload gone)",
            )
        log.warning("%s: it is restored without them", begun)
        self.missing = sorted(lost)

    async def _begin(self) -> None:
        """Raises FailedPrecondition where the root has anything but this restore."""
        objects = self.target.objects
        try:
            begun = _Begun.decode(await objects.get(RESTORING), self.target.url)
        except ObjectNotFound:
            if folders := await objects.folders(""):
                raise FailedPrecondition(
                    "ROOT_NOT_EMPTY",
                    f"{self.target.url} has {folders[0]} already: restore to an empty root",
                ) from None
            begun = _Begun(self.backup.backup_id)
        backup_id = self.backup.backup_id
        if begun.backup_id != backup_id and await self._has_manifests():
            raise FailedPrecondition(
                "OTHER_RESTORE",
                f"a restore of {begun.backup_id} to {self.target.url} has not ended: complete "
                "it, or empty the root",
            )
        wal = await self._wal_store(begun.wal_store)
        named = None if wal is None else wal.record
        await objects.put(
            RESTORING, json.dumps({"backup_id": backup_id, "wal_store": named}).encode()
        )
        if wal is not None:
            await wal.mark(self.target.url)
            self.target.use_wal_store(wal)

    async def _wal_store(self, named: WalStoreRecord | None) -> WalStore | None:
        """The store of the WALs; None: the root's own. `named` is that of a restore before.

        Until there are databases it is the one that this restore was given, which is tried first.
        Raises OtherWalStore where they have their WALs elsewhere, and as `Root.try_wal_store`.
        """
        url = self.target.wal_url
        if not await self._has_manifests():
            if not url:
                return None
            if named is None or named.url != url:
                named = WalStoreRecord.new(url)
            return await self.target.try_wal_store(named)
        if named is None:
            if url:
                raise OtherWalStore(
                    f"wal_store: an interrupted restore to {self.target.url} has its WALs below "
                    "its root: leave the setting out, or empty the root"
                )
            return None
        wal = self.target.open_wal_store(named, make=False)
        if not await wal.has_marker():
            raise unknown_wal_store(wal, is_other=url not in ("", named.url))
        return wal

    async def _has_manifests(self) -> bool:
        for service in KINDS:
            for folder in await self.target.objects.folders(service):
                if await self.target.objects.list(manifests_folder(folder)):
                    return True
        return False

    async def _copy(self, stored: Sequence[StoredObject]) -> None:
        copier = Copier(
            self.catalogue.objects,
            self.target.objects,
            await self._there(stored),
            report=lambda done, count: self._say("objects", done, count),
            cancelled=self.cancelled,
        )
        left_out = {*self.missing}
        copies = [
            Copy(one.stored, one.path, one.size_bytes, one.digest)
            for one in stored
            if one.stored not in left_out
        ]
        await copier.copy(copies)
        self.copied_count, self.copied_bytes = copier.copied_count, copier.copied_bytes
        copies = self._without_rotten(copies, copier.damaged)
        if lost := missing(copies, copier.there):
            raise FailedPrecondition(
                "BACKUP_DAMAGED",
                f"the backup {self.backup.backup_id} lacks {len(lost)} of "
                f"{counted(len(copies), 'object')}, such as {lost[0]}: restore another one",
            )
        if gone := missing(copies, await self._there(stored)):
            raise StoreUnavailable(
                f"{gone[0]} was copied to {self.target.url}, and is not there as it should be: "
                "repeat the restore"
            )

    def _without_rotten(self, copies: Sequence[Copy], damaged: Iterable[str]) -> list[Copy]:
        """Raises FailedPrecondition for a table: no database opens without it.

        One payload, or one part of the archive, must not hold up the instance. It is left out: a
        repeat copies it once the copy is whole, and backups of the new instance are not held up.
        """
        self.rotten = sorted(damaged)
        for path in self.rotten:
            log.warning("the copy %s has rotted, and is not restored", path)
        tables = [path for path in self.rotten if is_of_database(path)]
        if tables:
            raise FailedPrecondition(
                "BACKUP_DAMAGED",
                f"{len(tables)} of the tables of the backup {self.backup.backup_id} have rotted, "
                f"such as {tables[0]}: restore another backup, or put them back from the store's "
                "versions, and repeat the restore",
            )
        left_out = {*self.rotten}
        return [one for one in copies if one.path not in left_out]

    async def _there(self, stored: Iterable[StoredObject]) -> dict[str, int]:
        """What the target has in the folders of the backup's objects."""
        there: dict[str, int] = {}
        folders = {tables_folder(one.database) for one in self.backup.databases}
        for folder in folders | {one.path.partition("/")[0] for one in stored} - {*KINDS}:
            there |= await sizes_below(self.target.objects, folder)
        return there

    async def _put_manifest(self, one: SavedDatabase) -> None:
        path = stored_manifest(self.backup.folder, one.database)
        try:
            data = await self.catalogue.objects.get(path)
        except ObjectNotFound:
            raise FailedPrecondition(
                "BACKUP_DAMAGED", f"the backup {self.backup.backup_id} lacks {path}"
            ) from None
        if await digest_of(data) != one.digest:
            raise FailedPrecondition("BACKUP_DAMAGED", f"{path} has rotted: restore another backup")
        if not await self.target.objects.put_if_absent(one.manifest, data):
            raise self._in_use(one.manifest)

    def _in_use(self, path: str) -> FailedPrecondition:
        return FailedPrecondition(
            "ROOT_IN_USE",
            f"{path} was written by another process: stop all processes of {self.target.url}, "
            "empty it, and restore again",
        )

    async def _renumber(self) -> None:
        """Open each database once; let no number be given out that was given out since."""
        age_s = max(self.now_ms() - self.backup.taken_at_ms, 0) / 1000
        names = [one.database for one in self.backup.databases]
        done, places = 0, QueuePlaces(names)

        async def find(name: str, database: Database) -> None:
            nonlocal done
            done += 1
            await places.find(name, database)
            self._say("databases", done, len(names))

        await renumber(names, self._opened, age_s, find)
        async for count in places.claim(QueueNames(self.target.objects)):
            self.queues_count = count
            self._say("queue names", count, places.queues_count)

    @asynccontextmanager
    async def _opened(self, name: str) -> AsyncIterator[Database]:
        # Those of the instance's jobs, whose manifests were not copied.
        await self.target.forget_snapshots(name)
        async with opened_restored(self.target, name) as database:
            yield database

    def _say(self, phase: str, done: int, count: int) -> None:
        number = PHASES.index(phase) + 1
        self.report(Progress(phase, number, len(PHASES), done, count))
