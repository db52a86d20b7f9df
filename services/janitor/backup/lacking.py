"""Finds the messages of a backup whose payload is an object that the backup lacks.

Such an object was gone before the backup was taken: by a rule of the bucket, or with a volume that
was not mounted. The ingests' databases say which messages name it. Their tables, and no payloads,
are copied into a temporary folder, of one ingest at a time, and read there.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from libs.storage.database.files import tables_folder
from libs.storage.database.roots import open_root
from libs.storage.database.snapshots import SnapshotReader
from libs.storage.layout.keys import RecordType, payload_range
from libs.storage.records.catalogue import KINDS
from libs.storage.records.payloads import PayloadUri
from services.janitor.backup.catalogue import (
    Backup,
    Catalogue,
    SavedDatabase,
    StoredObject,
    stored_manifest,
)
from services.janitor.backup.copying import Copier, Copy
from services.janitor.jobs.contract import Progress, Report

_PAYLOADS: Final = KINDS[RecordType.PAYLOAD]


class LackingMessage(NamedTuple):
    """A message, and the path of its payload below the instance's root."""

    message_id: int
    path: str


@dataclass
class LackingSearch:
    """One search. The backup must be one of which `Verifying` found no damage.

    Attributes:
        found: The messages, in the order of their IDs.
    """

    catalogue: Catalogue
    backup: Backup
    report: Report = lambda progress: None
    cancelled: threading.Event = field(default_factory=threading.Event)
    found: list[LackingMessage] = field(default_factory=list)

    async def search(self) -> None:
        """Raises FailedPrecondition, JobCancelled, the errors of the storage."""
        stored = await self.catalogue.stored(self.backup)
        copied = {one.path for one in stored}
        ingests = [one for one in self.backup.databases if one.database.startswith("ingest/")]
        for number, saved in enumerate(ingests, 1):
            with tempfile.TemporaryDirectory(prefix="slatemq-backup-") as folder:
                reader = await self._opened(Path(folder), saved, stored, number, len(ingests))
                try:
                    await self._read(reader, copied)
                finally:
                    await reader.close()
        self.found.sort()

    async def _opened(
        self,
        folder: Path,
        saved: SavedDatabase,
        stored: Sequence[StoredObject],
        number: int,
        count: int,
    ) -> SnapshotReader:
        """The database, from copies of its tables and its manifest."""
        root = open_root(folder.as_uri(), sync=False)
        copier = Copier(
            self.catalogue.objects,
            root.objects,
            {},
            report=lambda done, of: self.report(Progress(saved.database, number, count, done, of)),
            cancelled=self.cancelled,
        )
        tables = f"{tables_folder(saved.database)}/"
        await copier.copy(
            Copy(one.stored, one.path, one.size_bytes, one.digest)
            for one in stored
            if one.path.startswith(tables)
        )
        manifest = stored_manifest(self.backup.folder, saved.database)
        await root.objects.put(saved.manifest, await self.catalogue.objects.get(manifest))
        return await root.open_latest(saved.database)

    async def _read(self, reader: SnapshotReader, copied: Set[str]) -> None:
        span = payload_range()
        async for rows in reader.scan(span.start, span.end):
            for key, value in rows:
                payload = _PAYLOADS.decode(value)
                if isinstance(payload, PayloadUri) and payload.uri not in copied:
                    message_id = int(_PAYLOADS.parse_key(key))
                    self.found.append(LackingMessage(message_id, payload.uri))
