"""Whether the files of a database are there, and whole: see `files`.

Every file of the WAL (`<database>/wal/<number, 20 digits>.sst`) after the last one that is in the
tables is needed, and their numbers have no gap: SlateDB reads them in order. They may be in another
store than the tables; messages then name them by its URL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from slatedb.uniffi import (
    Admin,
    Error,
    InternalError,
    ObjectStore,
    SlateDbWalReader,
    SsTableHandle,
    SsTableView,
    VersionedCompactions,
    VersionedManifest,
)

from libs.storage.database.files import (
    bytes_needed,
    compactions_folder,
    manifests_folder,
    tables_folder,
)
from libs.storage.database.slate import bounded
from libs.storage.database.wal_stores import WalStore
from libs.storage.errors import (
    DamagedStore,
    LostDatabase,
    ObjectNotFound,
    StoreFailed,
    readable,
)
from libs.storage.objects.small_objects import ObjectInfo, Objects
from libs.storage.objects.topology_entries import entry_path_of

WAL: Final = "wal"

READS_AT_ONCE: Final = 16

WAL_FILE_S: Final = 60.0
"""How long one file of the WAL may take: its reader waits for one that is not there."""

DELETE_COMPACTIONS: Final = (
    "stop the shard's process, and delete this file: it has no rows, only which tables were being "
    "compacted, and its owner begins these compactions again"
)
"""What to do about a damaged file of compactions."""

_CLOCKS_DIFFER_MS: Final = 3600 * 1000
"""A compaction may seem to have begun so long after its file was written, by the store's clock."""


class TableFile(NamedTuple):
    """A sorted table that the manifest names; its file has `bytes_min` at least.

    The keys are those of its first and last rows, which the file has behind its index; empty where
    the manifest does not say. `size_bytes` is 0 while nothing was found.
    """

    path: str
    bytes_min: int
    first_key: bytes
    last_key: bytes
    size_bytes: int = 0


class FileFault(NamedTuple):
    """A file that is missing or cannot be whole."""

    path: str
    wrong: str


class DatabaseFiles(NamedTuple):
    """What a database consists of, as one look found it.

    Attributes:
        tables: What the newest manifest names.
        replay_after: The last WAL file whose rows are all in tables.
        last_seq: The number of the last commit that is in tables.
        wal: Numbers of the WAL files after it, ascending.
        faults: What is missing, or too short.
        compactions: What is wrong with the newest file of compactions, without which all rows are
            there.
    """

    tables: Sequence[TableFile]
    replay_after: int
    last_seq: int
    wal: Sequence[int]
    faults: Sequence[FileFault]
    compactions: FileFault | None


async def find_exchanged(objects: Objects, tables: Sequence[TableFile]) -> list[FileFault]:
    """The tables whose files are of others: their ends do not have the keys of the manifest."""
    faults: list[FileFault] = []
    for start in range(0, len(tables), READS_AT_ONCE):
        some = [one for one in tables[start : start + READS_AT_ONCE] if one.size_bytes]
        found = await asyncio.gather(*(_exchange_of(objects, table) for table in some))
        faults += [fault for fault in found if fault is not None]
    return faults


async def _exchange_of(objects: Objects, table: TableFile) -> FileFault | None:
    if table.size_bytes <= table.bytes_min:
        return None  # too short, which was found already
    try:
        end = await objects.get_range(table.path, table.bytes_min, table.size_bytes)
    except ObjectNotFound:
        return None  # compacted since: the manifest has moved on
    if table.first_key in end and table.last_key in end:
        return None
    return FileFault(table.path, "it is whole, and not the table that the manifest names")


async def read_wal(
    store: ObjectStore, wal: WalStore, database_path: str, database: str, files: DatabaseFiles
) -> FileFault | None:
    """Read the WAL file by file; the first fault ends it, as it would end a replay."""
    if not files.wal:
        return None
    if wal.record is None:
        reader = SlateDbWalReader(database_path, store)
    else:
        reader = SlateDbWalReader.with_wal_object_store(database_path, store, wal.store)
    number, last_seq = files.replay_after + 1, files.last_seq
    try:
        iterator = await asyncio.wait_for(reader.iterator(number), WAL_FILE_S)
        while number <= files.wal[-1]:
            found = await asyncio.wait_for(iterator.next(), WAL_FILE_S)
            if found is None:
                break
            number = int(found.last_consumed_wal_file_id)
            seqs = [int(row.seq) for row in found.rows]
            if seqs and min(seqs) > last_seq + 1:
                wrong = f"commits {last_seq + 1} to {min(seqs) - 1} are missing before it"
                return FileFault(_wal_name_of(wal, database, number), wrong)
            last_seq = max([last_seq, *seqs])
            number += 1
    except (Error, InternalError, TimeoutError) as error:
        why = readable(str(getattr(error, "message", error))) or "it cannot be read"
        return FileFault(_wal_name_of(wal, database, number), why)
    return None


def _wal_name_of(wal: WalStore, database: str, number: int) -> str:
    return wal.name_of(f"{database}/{WAL}/{_wal_name(number)}")


def _wal_name(number: int) -> str:
    return f"{number:020}.sst"


async def refuse_losses(
    admin: Admin, objects: Objects, wal: WalStore, database: str, *, is_restored: bool
) -> int:
    """How many files of the WAL a replay reads.

    Raises DamagedStore where an opening would pass over a loss in silence: where a file of the WAL
    is gone, or all are; where there is no manifest, and anything shows that there was a database,
    which would begin with ID 1 again (LostDatabase where only the topology shows it). The last
    file, once gone, is not missed: nothing says that there was one. A database that `is_restored`
    has no WAL. Also where SlateDB would not open it for a damaged file of compactions, which it
    does not name. Costs six requests, for a new database four.
    """
    count, loss = await _find_loss(admin, objects, wal, database, is_restored)
    if loss is not None:
        # An owner that still goes on may have begun the database, or had files removed, since.
        count, loss = await _find_loss(admin, objects, wal, database, is_restored)
    if loss is not None:
        raise loss
    return count


async def _find_loss(
    admin: Admin, objects: Objects, wal: WalStore, database: str, is_restored: bool
) -> tuple[int, DamagedStore | None]:
    """How many files of the WAL there are to replay; what is lost, and what to do."""
    compactions = await _newest_compactions(admin, objects, database)
    manifest = await _newest_manifest(admin, database)
    if manifest is None:
        return 0, await _lost_manifests(objects, wal, database)
    if fault := _fault_of_compactions(compactions, manifest):
        return 0, DamagedStore(f"{fault.path}: {fault.wrong}: {DELETE_COMPACTIONS}")
    replay_after = int(manifest.replay_after_wal_id)
    needed = _wal_name(max(replay_after - 1, 0))
    listed = await wal.objects.describe(f"{database}/{WAL}", needed)
    if not is_restored and (fault := await _lost_wal(objects, wal, database, replay_after, listed)):
        return 0, DamagedStore(f"{fault.path}: {fault.wrong}: {_RESTORE}. {_GO_ON}")
    numbers = _numbers_after(replay_after, listed)
    if gaps := _wal_gaps(wal, database, replay_after, numbers):
        more = f", and there are {len(gaps) - 1} more gaps" if len(gaps) > 1 else ""
        wrong = f"{gaps[0].wrong}{more}"
        return 0, DamagedStore(f"{gaps[0].path}: {wrong}: {_RESTORE}. {_GO_ON}")
    return len(numbers), None


_RESTORE: Final = "restore it from the store's versions or a copy, or mount what holds it"
_GO_ON: Final = "To go on without those commits, put an empty object in its place; then verify"


async def _lost_manifests(objects: Objects, wal: WalStore, database: str) -> DamagedStore | None:
    """What shows that a database without a manifest is not a new one, and what to do."""
    folders = (f"{database}/{WAL}/", f"{tables_folder(database)}/")
    stored = [path for path in await objects.list(database) if path.startswith(folders)]
    if wal.record is not None:
        stored += await wal.objects.list(f"{database}/{WAL}")
    if stored:
        files = f"{len(stored)} other files"
        return DamagedStore(f"{database} has no manifest, and {files}: {_RESTORE}")
    if await _is_announced(objects, database):
        return LostDatabase(
            f"{database} is gone, and {entry_path_of(database)} says that it was there: {_RESTORE}"
            ". To do without it permanently, see `Give a shard up` of docs/how-to/repair.md"
        )
    return None


async def _lost_wal(
    objects: Objects, wal: WalStore, database: str, replay_after: int, listed: Sequence[ObjectInfo]
) -> FileFault | None:
    """Whether the WAL is gone as a whole; `listed` has those of its files that must be there.

    An opening writes the first one, and SlateDB keeps the last one whose rows are all in tables.
    """
    if listed or not (replay_after or await _is_announced(objects, database)):
        return None
    if not await objects.list(manifests_folder(database)):
        return None  # of memory:///, where SlateDB's files are not among the objects
    wrong = "it was there, and so may have been later ones, and the WAL has no file"
    return FileFault(_wal_name_of(wal, database, max(replay_after, 1)), wrong)


async def _is_announced(objects: Objects, database: str) -> bool:
    """Whether the topology has the shard: its owner writes that after its first commit."""
    return await objects.exists(entry_path_of(database))


def _numbers_after(replay_after: int, listed: Sequence[ObjectInfo]) -> list[int]:
    numbers = (_number_of(file.path, "sst") for file in listed)
    return sorted(number for number in numbers if number > replay_after)


async def look_at_files(
    admin: Admin, objects: Objects, wal: WalStore, database: str, timeout_s: float
) -> DatabaseFiles:
    """The files of a database, which its owner may have open.

    Raises DamagedStore or StoreFailed where the manifest cannot be read, and StoreUnavailable,
    also where that takes longer than `timeout_s`.
    """
    # The WAL before the manifest: what a collector removes meanwhile is in tables by then.
    wal_files = await wal.objects.describe(f"{database}/{WAL}")
    compactions = await _newest_compactions(admin, objects, database, timeout_s)
    manifest = await _read_manifest(admin, database, timeout_s)
    table_files = {one.path: one for one in await objects.describe(tables_folder(database))}
    tables = [_table_of(database, view.sst) for view in _views(manifest)]
    sizes = {path: found.size_bytes for path, found in table_files.items()}
    found_tables = {one.path: one._replace(size_bytes=sizes.get(one.path, 0)) for one in tables}
    tables = sorted(found_tables.values())
    replay_after = int(manifest.replay_after_wal_id)
    numbers = _numbers_after(replay_after, wal_files)
    last_seq = int(manifest.last_l0_seq)
    faults = [
        *(fault for table in tables if (fault := _fault_of(table, table_files.get(table.path)))),
        *_wal_gaps(wal, database, replay_after, numbers),
    ]
    if (lost := await _lost_wal(objects, wal, database, replay_after, wal_files)) is not None:
        faults.append(lost)
    of_compactions = _fault_of_compactions(compactions, manifest)
    return DatabaseFiles(tables, replay_after, last_seq, numbers, faults, of_compactions)


async def _read_manifest(
    admin: Admin, database: str, timeout_s: float | None = None
) -> VersionedManifest:
    manifest = await _newest_manifest(admin, database, timeout_s)
    if manifest is None:
        raise DamagedStore(f"reading the manifest of {database}: there is none")
    return manifest


async def _newest_manifest(
    admin: Admin, database: str, timeout_s: float | None = None
) -> VersionedManifest | None:
    """The newest manifest; None in a new database. Raises StorageError."""
    async with bounded(f"reading the manifest of {database}", timeout_s):
        return await admin.read_manifest(None)


class _NewestCompactions(NamedTuple):
    """The newest file of compactions: its content, or what SlateDB says where it cannot read it."""

    file: ObjectInfo
    content: VersionedCompactions | str


async def _newest_compactions(
    admin: Admin, objects: Objects, database: str, timeout_s: float | None = None
) -> _NewestCompactions | None:
    """The newest file of compactions; None where there is none, as of memory:///.

    Read it before the manifest, to which an owner that opens the database writes first. Costs two
    requests. Raises StoreUnavailable.
    """
    files = await objects.describe(compactions_folder(database))
    numbered = [file for file in files if _number_of(file.path, "compactions")]
    if not numbered:
        return None
    newest = numbered[-1]
    number = _number_of(newest.path, "compactions")
    try:
        async with bounded(f"reading the compactions of {database}", timeout_s):
            content = await admin.read_compactions(number)
    except (DamagedStore, StoreFailed) as error:
        return _NewestCompactions(newest, str(error))
    return None if content is None else _NewestCompactions(newest, content)


def _fault_of_compactions(
    found: _NewestCompactions | None, manifest: VersionedManifest
) -> FileFault | None:
    """Why SlateDB would refuse the newest file of compactions, which has no checksum."""
    if found is None:
        return None
    path, content = found.file.path, found.content
    if isinstance(content, str):
        return FileFault(path, content)
    if content.compactor_epoch > manifest.compactor_epoch:
        return FileFault(path, "it is of a later owner than the manifest")
    began_ms = max((_ms_of(one.id) for one in content.recent_compactions), default=0)
    if began_ms > found.file.modified_ms + _CLOCKS_DIFFER_MS:
        return FileFault(path, "it has a compaction that began after the file was written")
    return None


_DIGITS: Final = str.maketrans("JKMNPQRSTVWXYZ", "IJKLMNOPQRSTUV")
"""Digits of Crockford's base 32, which a ULID has, as Python's."""


def _ms_of(ulid: str) -> int:
    return int(ulid[:10].translate(_DIGITS), 32)


def _views(manifest: VersionedManifest) -> list[SsTableView]:
    trees = (manifest, *manifest.segments)
    return [
        view
        for tree in trees
        for views in (tree.l0, *(run.sst_views for run in tree.compacted))
        for view in views
    ]


def _table_of(database: str, sst: SsTableHandle) -> TableFile:
    info = sst.info
    path = f"{tables_folder(database)}/{sst.id.value}.sst"
    first, last = bytes(info.first_entry or b""), bytes(info.last_entry or b"")
    return TableFile(path, bytes_needed(sst), first, last)


def _fault_of(table: TableFile, found: ObjectInfo | None) -> FileFault | None:
    if found is None:
        return FileFault(table.path, "the manifest names it, and it is gone")
    if found.size_bytes < table.bytes_min:
        return FileFault(
            table.path, f"it has {found.size_bytes} bytes, of {table.bytes_min} at least"
        )
    return None


def _number_of(path: str, kind: str) -> int:
    """The number that is the name of a file, `<number>.<kind>`; 0 of other files."""
    stem, _, ending = path.rpartition("/")[2].partition(".")
    return int(stem) if ending == kind and stem.isdigit() else 0


def _wal_gaps(
    wal: WalStore, database: str, replay_after: int, numbers: Sequence[int]
) -> list[FileFault]:
    """The files that a replay misses, in front of those that are there: a fault for each run.

    A manifest that has rotted may miss millions.
    """
    faults = []
    for before, number in pairwise([replay_after, *numbers]):
        first, last = before + 1, number - 1
        if first > last:
            continue
        more = f"; so are all up to {last:020}.sst, {last - before:,} files" if last > first else ""
        wrong = f"a commit is in it, later ones follow, and it is gone{more}"
        faults.append(FileFault(_wal_name_of(wal, database, first), wrong))
    return faults
