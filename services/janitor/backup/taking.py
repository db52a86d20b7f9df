"""Takes a backup: what is copied when, so that no shard lacks what another needs.

::

    copies                 a part of them is read again; what has rotted counts as lacking
    payloads, archive      all that the backup root lacks: hours, the first time
    snapshots              of the brokers, then of the ingests: seconds
    payloads, archive      what came meanwhile, and the list of all: seconds
    no job has removed?    else once more from the snapshots on; also where a queue has moved
    tables, manifests      of the snapshots, which are kept alive
    the record             written last

Nothing but the janitor's jobs removes messages and objects, bodies of tasks aside. So if none was
at work from the first snapshot to the last list, then every message that a broker's snapshot has is
in an ingest's, and every object that a snapshot names was listed, and copied.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

from libs.serving.process.instance import refuse_lost_instance
from libs.storage.database.blobs import FOLDER as BLOBS
from libs.storage.database.blobs import digest_in
from libs.storage.database.files import tables_folder
from libs.storage.database.roots import Root
from libs.storage.errors import StorageError
from libs.storage.objects.digests import digest_of
from libs.storage.objects.instance_records import FOLDER as INSTANCE
from libs.storage.objects.queue_names import QueueNames
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.objects.small_objects import ObjectInfo
from services.janitor.archive_paths import ARCHIVE_FOLDER
from services.janitor.backup.catalogue import (
    OBJECTS,
    Backup,
    Catalogue,
    SavedDatabase,
    StoredObject,
    new_backup_id,
    stored_manifest,
    stored_path,
)
from services.janitor.backup.checking import digests_of, in_part, rotten
from services.janitor.backup.copying import Copier, Copy, missing, sizes_below
from services.janitor.backup.damage import describe
from services.janitor.backup.shards import ShardSnapshots
from services.janitor.backup.turns import Turn, turn
from services.janitor.jobs.contract import JobCancelled, Progress, Report
from services.janitor.runs.history import RunStore, Sightings
from services.janitor.snapshots import databases_of
from slatemq.errors import FailedPrecondition, Unavailable
from slatemq.models import now_ms as wall_ms

log = logging.getLogger(__name__)

TASKS: Final = "tasks"
"""Bodies of publishes that wait in the backend of an event queue. An ingest removes one as soon as
its publish is stored, so one may go while it is copied."""

REMOVING: Final = ("retention", "unreferenced", "dead-letters", "restore", "repair")
"""The jobs that remove messages from ingests, or objects."""

PHASES: Final = ("copies", "payloads", "snapshots", "tables")

ATTEMPTS: Final = 5
"""Snapshots taken before a backup gives up, because a job removes something each time."""

QUIET_S: Final = 3600.0
"""How long a backup waits for the jobs of other janitors to end."""

QUIET_LOOK_S: Final = 1.0

TakeSnapshots = Callable[[], AbstractAsyncContextManager[ShardSnapshots]]


@dataclass(frozen=True)
class BackupSource:
    """What a backup is made of.

    `snapshots` takes those of all shards; `runs` are the runs of the instance's jobs.
    """

    root: Root
    snapshots: TakeSnapshots
    runs: RunStore


@dataclass
class Taking:
    """One backup.

    Attributes:
        kept: How many backups stay, this one included.
        dry_run: Count what would be copied; write nothing, and take no snapshots.
        cancelled: Set it to end soon: JobCancelled.
        phases: Those that have ended, with their seconds.
        removed_count: Older backups that were removed.
        damaged_count: Backups that were passed over, because they are damaged.
        checked_count: Copies that were read again.
        rotten_count: Those of them that had other bytes than when they were written.
        payloads_gone_count: Payload objects of the backup before that the instance does not have.
    """

    source: BackupSource
    target: Root
    kept: int
    dry_run: bool = False
    report: Report = lambda progress: None
    cancelled: threading.Event = field(default_factory=threading.Event)
    now_ms: Callable[[], int] = wall_ms
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    phases: list[tuple[str, float]] = field(default_factory=list)
    removed_count: int = 0
    damaged_count: int = 0
    checked_count: int = 0
    rotten_count: int = 0
    payloads_gone_count: int = 0
    _sightings: Sightings = field(default_factory=Sightings, init=False)

    async def take(self) -> Backup:
        """Take the backup, and remove the oldest over `kept`.

        Raises Unavailable where a shard or a store is down, FailedPrecondition, JobCancelled, and
        the errors of the storage.
        """
        if self.dry_run:
            return await self._take(None)
        async with turn(self.target, self.now_ms(), self._pause) as mine:
            return await self._take(mine)

    async def _pause(self, pause_s: float) -> None:
        if self.cancelled.is_set():
            raise JobCancelled("cancelled")
        await self.sleep(pause_s)

    async def _take(self, mine: Turn | None) -> Backup:
        """`mine` is the turn; None where nothing is written."""
        objects, catalogue = self.source.root.objects, Catalogue(self.target.objects)
        await self._refuse_other_source(catalogue)
        # No process starts on what would be restored, and backups that have the record would go.
        await refuse_lost_instance(self.source.root)
        copier = Copier(
            objects,
            self.target.objects,
            await sizes_below(self.target.objects, OBJECTS),
            await catalogue.digests(),
            cancelled=self.cancelled,
            dry_run=self.dry_run,
        )
        self.damaged_count = len(catalogue.damaged)
        before = {stored for stored in copier.digests if stored.startswith(f"{OBJECTS}/{BLOBS}/")}
        if mine is not None:
            with self._phase("copies", copier):
                await self._check_copies(mine, copier)
        with self._phase("payloads", copier):
            listed = await self._objects()
            await self._copy(catalogue, copier, listed)
        self._count_gone(before, {one.stored for one in listed})
        if mine is None:
            return await self._counted(catalogue, copier)
        for _ in range(ATTEMPTS):
            started = await self._wait_quiet()
            async with AsyncExitStack() as stack:
                with self._phase("snapshots", copier):
                    names = QueueNames(objects)
                    claims = await names.numbers()
                    # A shard that is removed later has something in its snapshot.
                    removed = await RemovedShards(objects).all()
                    taken = await stack.enter_async_context(self.source.snapshots())
                    moved = await names.claimed_again(claims)
                    listed = await self._objects()
                    await self._copy(catalogue, copier, listed)
                    listed = [one for one in listed if not _has_gone(one, copier.there)]
                    later = await self._started() - started
                if later:
                    log.warning("%s removed while snapshots were taken: again", min(later))
                    continue
                if moved:
                    log.warning("queue %s moved while snapshots were taken: again", min(moved))
                    continue
                with self._phase("tables", copier):
                    return await self._save(mine, catalogue, copier, taken, listed, removed)
        raise Unavailable(
            f"jobs of other janitors removed messages, or queues moved to other broker shards, "
            f"during each of {ATTEMPTS} tries: run {', '.join(REMOVING)} at another time than "
            "`backup`, and move queues at another time, too",
            reason="REMOVED_MEANWHILE",
        )

    def _count_gone(self, before: Set[str], listed: Set[str]) -> None:
        """Count them; warn where none is left: jobs remove them, but rarely all at once."""
        self.payloads_gone_count = len(before - listed)
        if before and not before & listed:
            log.warning(
                "%s, all of the backup before, are gone from the instance: verify it before "
                "earlier backups are removed, which have them",
                describe([*before]),
            )

    async def _check_copies(self, mine: Turn, copier: Copier) -> None:
        """Read a part of the copies; what has rotted counts as lacking, and is copied again."""
        digests = {
            stored: digest
            for stored, digest in copier.digests.items()
            if stored in copier.there and in_part(stored, mine.number)
        }
        target = self.target.objects
        for stored in await rotten(target, digests, copier.report, self.cancelled):
            log.warning(
                "the copy %s has rotted: it is copied again, if the instance still has the object",
                stored,
            )
            del copier.there[stored]
            self.rotten_count += 1
        self.checked_count = len(digests)

    async def _refuse_other_source(self, catalogue: Catalogue) -> None:
        """Two instances below one backup root would replace each other's objects."""
        source = await catalogue.newest(_source_of)
        if source not in (None, self.source.root.url):
            raise FailedPrecondition(
                "OTHER_INSTANCE",
                f"the backups below {self.target.url} are of {source}: give "
                f"{self.source.root.url} a backup root of its own",
            )

    async def _copy(
        self, catalogue: Catalogue, copier: Copier, objects: Sequence[StoredObject]
    ) -> None:
        """Copy what the backup root lacks. Raises FailedPrecondition for what is damaged."""
        await self._refuse_changed(catalogue, copier.there, objects)
        await copier.copy(map(_copy_of, objects))
        if copier.damaged:
            path, more = min(copier.damaged), len(copier.damaged) - 1
            named = "in its name" if digest_in(path) else "of its copy"
            otherwise = "; if there is none, delete it: queues make its message a dead letter"
            raise FailedPrecondition(
                "OBJECT_DAMAGED",
                f"{path} is damaged: it does not have the digest {named}{_and_more(more)}. "
                f"Restore it from the store's versions{otherwise if digest_in(path) else ''}",
            )

    async def _refuse_changed(
        self, catalogue: Catalogue, there: Mapping[str, int], objects: Iterable[StoredObject]
    ) -> None:
        """Let no object replace a good copy, which all backups share: objects never change.

        A copy that has not the size that its backups say is damaged, and is copied again.
        """
        changed = {
            one.stored: one
            for one in objects
            if there.get(one.stored, one.size_bytes) != one.size_bytes
        }
        for backup_id in await catalogue.ids() if changed else ():
            for saved in await catalogue.stored(await catalogue.get(backup_id)):
                one = changed.get(saved.stored)
                if one is not None and saved.size_bytes != one.size_bytes:
                    raise FailedPrecondition(
                        "OBJECT_DAMAGED",
                        f"{one.path} has {one.size_bytes:,} bytes, and had {saved.size_bytes:,} in "
                        f"the backup {backup_id}: it is damaged. Stop its shard's process, "
                        f"restore it from {saved.stored} of the backup root, and take the backup "
                        "again",
                    )

    async def _objects(self) -> list[StoredObject]:
        """The payloads, archived dead letters and bodies of tasks that there are."""
        objects = self.source.root.objects
        return [
            StoredObject(info.path, stored_path(info), info.size_bytes, digest_in(info.path))
            for folder in (BLOBS, ARCHIVE_FOLDER, TASKS)
            for info in await objects.describe(folder)
        ]

    async def _wait_quiet(self) -> set[str]:
        """Wait until no job removes anything; returns the runs that have begun so far."""
        until = time.monotonic() + QUIET_S
        while True:
            started = await self._started()
            active = [run_id for run_id in started if not await self._is_ended(run_id)]
            if not active:
                return started
            if time.monotonic() > until:
                raise Unavailable(f"{active[0]} has not ended within {QUIET_S:g} s")
            await self._pause(QUIET_LOOK_S)

    async def _started(self) -> set[str]:
        """The runs, of jobs that remove, that have begun; those that wait are not among them."""
        return {
            stored.run.run_id
            for job in REMOVING
            for stored in await self.source.runs.latest(job)
            if stored.run.started_at_ms
        }

    async def _is_ended(self, run_id: str) -> bool:
        found = await self.source.runs.read([run_id])
        return not found or self._sightings.judge(found[0], self.now_ms()).ended

    async def _save(
        self,
        mine: Turn,
        catalogue: Catalogue,
        copier: Copier,
        taken: ShardSnapshots,
        listed: Sequence[StoredObject],
        removed: Iterable[str],
    ) -> Backup:
        root, target = self.source.root, self.target.objects
        databases: list[SavedDatabase] = []
        manifests: dict[str, bytes] = {}
        tables: list[StoredObject] = []
        for one in taken.all:
            files = await root.snapshot_files(one.database, one.snapshot_id)
            infos = {
                info.path: info for info in await root.objects.describe(tables_folder(one.database))
            }
            for path, bytes_min in files.tables.items():
                tables.append(_table(path, bytes_min, infos.get(path)))
            manifests[one.database] = data = await root.objects.get(files.manifest)
            digest = await digest_of(data)
            databases.append(SavedDatabase(one.database, one.taken_at_ms, files.manifest, digest))
        await self._copy(catalogue, copier, tables)
        tables, listed = [await self._with_digests(copier, some) for some in (tables, listed)]
        taken.check()
        wanted = [*map(_copy_of, tables), *map(_copy_of, listed)]
        if gone := missing(wanted, await sizes_below(target, OBJECTS)):
            raise Unavailable(f"{gone[0]} is not there any more")
        now_ms = self.now_ms()
        backup = Backup(
            backup_id=new_backup_id(now_ms, await catalogue.ids(), mine.number),
            source=root.url,
            taken_at_ms=min(one.taken_at_ms for one in databases),
            ended_at_ms=now_ms,
            databases=tuple(sorted(databases, key=lambda one: (one.service, one.shard))),
            instance={
                path: (await root.objects.get(path)).decode()
                for path in await root.objects.list(INSTANCE)
            },
            removed=tuple(sorted(removed)),
            objects_count=len(wanted),
            objects_bytes=sum(one.size_bytes for one in wanted),
            copied_count=copier.copied_count,
            copied_bytes=copier.copied_bytes,
        )
        for database, data in manifests.items():
            await target.put(stored_manifest(backup.folder, database), data)
        taken.check()
        await mine.check()
        try:
            await catalogue.add(backup, tables, listed)
            # It may have stood still since, and another one may have removed what it needs. One
            # that begins later finds its record.
            await mine.look()
        except (Unavailable, StorageError):
            await catalogue.remove(backup.backup_id)
            raise
        self.removed_count = await catalogue.prune(self.kept, mine.check)
        self.damaged_count = len(catalogue.damaged)
        return backup

    async def _with_digests(
        self, copier: Copier, objects: Iterable[StoredObject]
    ) -> list[StoredObject]:
        """Those of copies that a backup has made which did not end are read from them."""
        known = [
            one._replace(digest=one.digest or copier.digests.get(one.stored, "")) for one in objects
        ]
        unknown = [one.stored for one in known if not one.digest]
        copier.digests |= await digests_of(
            self.target.objects, unknown, copier.report, self.cancelled
        )
        return [one._replace(digest=one.digest or copier.digests[one.stored]) for one in known]

    async def _counted(self, catalogue: Catalogue, copier: Copier) -> Backup:
        """What a backup would copy now; its tables would be those of the snapshots."""
        root = self.source.root
        for database in await databases_of(root.objects):
            infos = await root.objects.describe(tables_folder(database))
            tables = [
                StoredObject(info.path, stored_path(info), info.size_bytes, "") for info in infos
            ]
            await self._copy(catalogue, copier, tables)
        now_ms = self.now_ms()
        counts = (len(copier.there), sum(copier.there.values()))
        copied = (copier.copied_count, copier.copied_bytes)
        return Backup("", root.url, now_ms, now_ms, (), {}, (), *counts, *copied)

    @contextmanager
    def _phase(self, name: str, copier: Copier) -> Iterator[None]:
        def report(done: int, count: int) -> None:
            number = PHASES.index(name) + 1
            self.report(Progress(name, number, len(PHASES), done, count))

        report(0, 0)
        copier.report = report
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases.append((name, round(time.monotonic() - began, 3)))


async def _source_of(backup: Backup) -> str:
    return backup.source


def _has_gone(one: StoredObject, there: Mapping[str, int]) -> bool:
    """Whether it is the body of a task that was removed before it was copied."""
    return one.path.startswith(f"{TASKS}/") and one.stored not in there


def _table(path: str, bytes_min: int, info: ObjectInfo | None) -> StoredObject:
    """A table of a snapshot. Raises Unavailable, FailedPrecondition."""
    if info is None:
        raise Unavailable(f"{path} is named by a snapshot, and not there")
    stored = stored_path(info)
    if info.size_bytes < bytes_min:
        raise FailedPrecondition(
            "OBJECT_DAMAGED",
            f"{path} has {info.size_bytes:,} bytes, of {bytes_min:,} at least: it is damaged. Stop "
            f"its shard's process, restore it from {stored} of the backup root, if that is there, "
            "or from the store's versions, and take the backup again",
        )
    return StoredObject(path, stored, info.size_bytes, "")


def _and_more(count: int) -> str:
    return f"; so are {count:,} more" if count else ""


def _copy_of(one: StoredObject) -> Copy:
    return Copy(one.path, one.stored, one.size_bytes, one.digest)
