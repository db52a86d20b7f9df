"""What a backup has, and which backups there are.

::

    <backup root>/backups/<ID>/backup.json    written last: a backup without it is none
                              /tables.gz      a line for each object that the backup needs
                              /objects.gz     the same for payloads and archived dead letters
                              /ingest/0.manifest
                 /objects/…                   the objects themselves, shared by all backups
                 /turns/00000007.json         see `turns`

Objects are written once by SlateMQ and never changed; each is stored under its path below the
instance's root, so the next backup copies only those that are new. Parts of the archive are
numbered, and an instance that was restored may use a number again: the time of writing is a part of
their names here.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeVar

from libs.storage.database.formats import FORMAT
from libs.storage.errors import ObjectNotFound
from libs.storage.objects.json_objects import load_json
from libs.storage.objects.small_objects import ObjectInfo, Objects
from services.janitor.archive_paths import ARCHIVE_FOLDER
from services.janitor.snapshots import ShardDatabase
from slatemq.errors import FailedPrecondition, NotFound

log = logging.getLogger(__name__)

T = TypeVar("T")

BACKUPS: Final = "backups"
OBJECTS: Final = "objects"
_RECORD: Final = "backup.json"
_LISTS: Final = ("tables", "objects")


class StoredObject(NamedTuple):
    """An object of an instance: its path below the instance's root, and in the backup root.

    In a backup that is complete the digest is the XXH3-128 of its copy, as it was written.
    """

    path: str
    stored: str
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class SavedDatabase(ShardDatabase):
    """One database of a backup.

    Attributes:
        taken_at_ms: By its owner's clock; all that it had answered before is in the backup.
        manifest: The path of its manifest below the instance's root.
        digest: The XXH3-128 of the manifest.
    """

    taken_at_ms: int
    manifest: str
    digest: str


@dataclass(frozen=True)
class Backup:
    """A backup that is complete.

    Attributes:
        source: URL of the instance's root.
        taken_at_ms: All that the instance had answered before is in the backup.
        format: Of the databases.
        instance: The records of the instance's settings: path and content.
        removed: The shards that had been removed for ever, such as `ingest/1`.
        objects_bytes: Of all objects, those that earlier backups have copied included.
        copied_bytes: Of those that this one has copied.
    """

    backup_id: str
    source: str
    taken_at_ms: int
    ended_at_ms: int
    databases: tuple[SavedDatabase, ...]
    instance: Mapping[str, str] = field(repr=False)
    removed: tuple[str, ...]
    objects_count: int
    objects_bytes: int
    copied_count: int
    copied_bytes: int
    format: int = FORMAT

    @property
    def folder(self) -> str:
        return f"{BACKUPS}/{self.backup_id}"


def new_backup_id(now_ms: int, ids: Iterable[str], turn: int) -> str:
    """An ID that sorts by time, and behind those that there are: clocks are set back.

    A turn that was lost has a lower number, and so another ID, also behind the same ones.
    """
    after_ms = (found_ms + turn for found_ms in map(_ms_of, ids) if found_ms is not None)
    id_ms = max((now_ms, *after_ms))
    return f"{datetime.fromtimestamp(id_ms // 1000, UTC):%Y%m%d-%H%M%S}-{id_ms % 1000:03d}"


def _ms_of(backup_id: str) -> int | None:
    """None for a name that was given by hand."""
    try:
        moment = datetime.strptime(backup_id, "%Y%m%d-%H%M%S-%f").replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(moment.timestamp()) * 1000 + moment.microsecond // 1000


def stored_path(info: ObjectInfo) -> str:
    """Where an object of an instance is stored in the backup root."""
    suffix = f".{info.modified_ms}" if info.path.startswith(f"{ARCHIVE_FOLDER}/") else ""
    return f"{OBJECTS}/{info.path}{suffix}"


def stored_manifest(folder: str, database: str) -> str:
    return f"{folder}/{database}.manifest"


class Catalogue:
    """The backups below one root. Every method raises StoreUnavailable.

    Attributes:
        damaged: The backups that `newest` and `prune` have passed over.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.damaged: set[str] = set()

    async def ids(self) -> list[str]:
        """The IDs of all complete backups, the newest first."""
        paths = await self.objects.list(BACKUPS)
        return sorted(
            (path.split("/")[1] for path in paths if path.endswith(f"/{_RECORD}")), reverse=True
        )

    async def get(self, backup_id: str = "") -> Backup:
        """A backup, or the newest. Raises NotFound, and FailedPrecondition for a damaged one."""
        found = await self.ids() if not backup_id else [backup_id]
        if not found:
            raise NotFound("backup", "the newest")
        path = f"{BACKUPS}/{found[0]}/{_RECORD}"
        try:
            return _decode(path, await self.objects.get(path))
        except ObjectNotFound:
            raise NotFound("backup", found[0]) from None

    async def stored(self, backup: Backup) -> list[StoredObject]:
        """All objects that the backup needs. Raises FailedPrecondition for a damaged list."""
        found: list[StoredObject] = []
        for name in _LISTS:
            path = f"{backup.folder}/{name}.gz"
            try:
                data = await self.objects.get(path)
            except ObjectNotFound:
                raise _damaged(path, "is not there") from None
            found += await asyncio.to_thread(_decode_list, path, data)
        return found

    async def newest(self, read: Callable[[Backup], Awaitable[T]], before: str = "") -> T | None:
        """What `read` gives of the newest backup of which it can; None where there is none.

        `before`: of those with an older ID alone.

        One that is damaged is passed over: it must not hold up those that come.
        """
        for backup_id in await self.ids():
            if before and backup_id >= before:
                continue
            try:
                return await read(await self.get(backup_id))
            except NotFound:
                continue  # It was removed since.
            except FailedPrecondition as error:
                self._pass_over(backup_id, error)
        return None

    async def digests(self) -> dict[str, str]:
        """Those of all objects of the newest backup, by where they are stored; none without one."""
        return await self.newest(self._digests_of) or {}

    async def _digests_of(self, backup: Backup) -> dict[str, str]:
        return {one.stored: one.digest for one in await self.stored(backup)}

    def _pass_over(self, backup_id: str, error: FailedPrecondition) -> None:
        if backup_id not in self.damaged:
            self.damaged.add(backup_id)
            log.warning("a backup is damaged, and passed over: %s", error.message)

    async def add(
        self, backup: Backup, tables: Sequence[StoredObject], objects: Sequence[StoredObject]
    ) -> None:
        """Write down a backup whose objects and manifests are stored."""
        for name, some in zip(_LISTS, (tables, objects), strict=True):
            # In a thread: the turn is renewed meanwhile.
            data = await asyncio.to_thread(_encode_list, some)
            await self.objects.put(f"{backup.folder}/{name}.gz", data)
        record = json.dumps(asdict(backup), indent=1).encode()
        if not await self.objects.put_if_absent(f"{backup.folder}/{_RECORD}", record):
            raise FailedPrecondition("BACKUP_EXISTS", f"there is a backup {backup.backup_id}")

    async def remove(self, backup_id: str) -> None:
        """Remove a backup; the objects that it needs stay."""
        # The record first: what loses its objects is no backup any more.
        await self.objects.delete(f"{BACKUPS}/{backup_id}/{_RECORD}")
        for path in await self.objects.list(f"{BACKUPS}/{backup_id}"):
            await self.objects.delete(path)

    async def prune(self, kept: int, check: Callable[[], Awaitable[None]]) -> int:
        """Remove the oldest backups over `kept`, and what no other needs; returns their count.

        As long as one that stays is damaged, nothing says what it needs, and all objects stay.
        `check` is called before each backup and each object is removed, and raises where another
        backup may need it.
        """
        ids = await self.ids()
        for backup_id in reversed(ids[kept:]):
            await check()
            await self.remove(backup_id)
        if len(ids) > kept and (needed := await self._needed()) is not None:
            for path in await self.objects.list(OBJECTS):
                if path not in needed:
                    await check()
                    await self.objects.delete(path)
        return len(ids[kept:])

    async def _needed(self) -> set[str] | None:
        """Where the objects of all backups are stored; None where one of them is damaged."""
        needed: set[str] = set()
        for backup_id in await self.ids():
            try:
                needed.update(one.stored for one in await self.stored(await self.get(backup_id)))
            except FailedPrecondition as error:
                self._pass_over(backup_id, error)
                return None
        return needed


def _decode(path: str, data: bytes) -> Backup:
    try:
        values: dict[str, Any] = load_json(data)
        databases = tuple(SavedDatabase(**one) for one in values.pop("databases"))
        removed = tuple(map(str, values.pop("removed")))
        return Backup(databases=databases, removed=removed, **values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"is not the record of a backup: {error!r}") from error


def _encode_list(objects: Iterable[StoredObject]) -> bytes:
    text = "".join(f"{json.dumps(one)}\n" for one in objects)
    return gzip.compress(text.encode(), compresslevel=1)


def _decode_list(path: str, data: bytes) -> list[StoredObject]:
    try:
        lines = gzip.decompress(data).splitlines()
        return [StoredObject(*load_json(line)) for line in lines]
    except (OSError, EOFError, zlib.error, ValueError, TypeError) as error:
        raise _damaged(path, f"is not a list of the objects of a backup: {error!r}") from error


def _damaged(path: str, why: str) -> FailedPrecondition:
    folder = path.rpartition("/")[0]
    return FailedPrecondition(
        "BACKUP_DAMAGED",
        f"{path} {why}. Restore it from the store's versions; if there is none, this backup cannot "
        f"be restored: use another one, and delete {folder}/",
    )
