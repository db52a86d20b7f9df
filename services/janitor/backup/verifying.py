"""Reads all that a backup needs: whether it is there, with the bytes that were written."""

from __future__ import annotations

import threading
from collections.abc import Set
from dataclasses import dataclass, field

from services.janitor.backup.catalogue import OBJECTS, Backup, Catalogue, stored_manifest
from services.janitor.backup.checking import rotten
from services.janitor.backup.copying import sizes_below
from services.janitor.backup.damage import PAYLOADS, place_of
from services.janitor.jobs.contract import Progress, Report


@dataclass
class Verifying:
    """One look at a backup.

    Attributes:
        report: Called with its progress.
        cancelled: Set it to end soon: JobCancelled.
        missing: The paths, below the backup root, of what is not there with its size.
        rotten: Those of what has other bytes than when it was written.
        checked_count: How many objects the backup needs.
        payloads_gone: The copies of payloads that the backup before has, and this one lacks. Jobs
            of the janitor may have removed their messages.
        before: The ID of that backup; empty: there is none.
    """

    catalogue: Catalogue
    backup: Backup
    report: Report = lambda progress: None
    cancelled: threading.Event = field(default_factory=threading.Event)
    missing: list[str] = field(default_factory=list)
    rotten: list[str] = field(default_factory=list)
    checked_count: int = 0
    payloads_gone: list[str] = field(default_factory=list)
    before: str = ""

    async def verify(self) -> None:
        """Raises FailedPrecondition, JobCancelled, the errors of the storage."""
        objects, folder = self.catalogue.objects, self.backup.folder
        sizes = await sizes_below(objects, OBJECTS)
        manifests = await sizes_below(objects, folder)
        digests: dict[str, str] = {}
        stored = await self.catalogue.stored(self.backup)
        await self._find_gone({one.stored for one in stored})
        for one in stored:
            if sizes.get(one.stored) == one.size_bytes:
                digests[one.stored] = one.digest
            else:
                self.missing.append(one.stored)
        for saved in self.backup.databases:
            path = stored_manifest(folder, saved.database)
            if path in manifests:
                digests[path] = saved.digest
            else:
                self.missing.append(path)
        self.checked_count = len(digests) + len(self.missing)
        self.rotten = await rotten(objects, digests, self._say, self.cancelled)

    async def _find_gone(self, stored: Set[str]) -> None:
        found = await self.catalogue.newest(self._payloads_of, before=self.backup.backup_id)
        if found is not None:
            self.before, had = found
            self.payloads_gone = sorted(had - stored)

    async def _payloads_of(self, backup: Backup) -> tuple[str, set[str]]:
        stored = await self.catalogue.stored(backup)
        return backup.backup_id, {one.stored for one in stored if place_of(one.stored) == PAYLOADS}

    def _say(self, done: int, count: int) -> None:
        self.report(Progress("objects", 1, 1, done, count))
