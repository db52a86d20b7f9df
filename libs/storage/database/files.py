"""The objects of a database: what is copied when it moves to another root.

::

    <database>/manifest/<number, 20 digits>.manifest   names the tables; the highest is valid
    <database>/compacted/<ULID>.sst                    a table: written once, never changed
    <database>/wal/…                                   what is not in a table yet
    <database>/compactions/<number>.compactions        what is compacted; the highest is valid

A snapshot is a manifest with its tables: all of its rows are in these, and none in the WAL. A root
that has them, and no other manifest of the database, has the database as it was then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from slatedb.uniffi import SsTableHandle, VersionedManifest

from libs.storage.errors import DamagedStore


class SnapshotFiles(NamedTuple):
    """The paths, below the root, of a snapshot's manifest and tables.

    Each table's file has so many bytes at least.
    """

    manifest: str
    tables: Mapping[str, int]


def tables_folder(database: str) -> str:
    return f"{database}/compacted"


def manifests_folder(database: str) -> str:
    return f"{database}/manifest"


def compactions_folder(database: str) -> str:
    return f"{database}/compactions"


def files_folders(database: str) -> Sequence[str]:
    """All that a database has its objects in; that of the WAL is empty where it has a store."""
    return (manifests_folder(database), tables_folder(database), f"{database}/wal")


def files_of(database: str, manifest: VersionedManifest) -> SnapshotFiles:
    """The objects of one manifest. Raises DamagedStore for one that names those of others."""
    if manifest.external_dbs or manifest.segments:
        raise DamagedStore(f"{database}: its manifest names objects of other databases")
    folder = tables_folder(database)
    return SnapshotFiles(
        f"{manifests_folder(database)}/{manifest.id:020}.manifest",
        {f"{folder}/{table.id.value}.sst": bytes_needed(table) for table in _tables(manifest)},
    )


def bytes_needed(table: SsTableHandle) -> int:
    """What a table's file has at least: up to the end of its index and its filter."""
    info = table.info
    parts = ((info.index_offset, info.index_len), (info.filter_offset, info.filter_len))
    return max(int(offset) + int(size) for offset, size in parts)


def _tables(manifest: VersionedManifest) -> Iterator[SsTableHandle]:
    for view in manifest.l0:
        yield view.sst
    for run in manifest.compacted:
        for view in run.sst_views:
            yield view.sst
