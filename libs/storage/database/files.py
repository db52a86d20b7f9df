"""The objects of a database: what is copied when it moves to another root.

::

    <database>/manifest/<number, 20 digits>.manifest   names the tables; the highest is valid
    <database>/compacted/<ULID>.sst                    a table: written once, never changed
    <database>/wal/…                                   what is not in a table yet

A snapshot is a manifest with its tables: all of its rows are in these, and none in the WAL. A root
that has them, and no other manifest of the database, has the database as it was then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from slatedb.uniffi import VersionedManifest

from libs.storage.errors import DamagedStore


class SnapshotFiles(NamedTuple):
    """The paths, below the root, of a snapshot's manifest and tables."""

    manifest: str
    tables: tuple[str, ...]


def tables_folder(database: str) -> str:
    return f"{database}/compacted"


def manifests_folder(database: str) -> str:
    return f"{database}/manifest"


def files_of(database: str, manifest: VersionedManifest) -> SnapshotFiles:
    """The objects of one manifest. Raises DamagedStore for one that names those of others."""
    if manifest.external_dbs or manifest.segments:
        raise DamagedStore(f"{database}: its manifest names objects of other databases")
    folder = tables_folder(database)
    return SnapshotFiles(
        f"{manifests_folder(database)}/{manifest.id:020}.manifest",
        tuple(sorted({f"{folder}/{table}.sst" for table in _tables(manifest)})),
    )


def _tables(manifest: VersionedManifest) -> Iterator[str]:
    for view in manifest.l0:
        yield view.sst.id.value
    for run in manifest.compacted:
        for view in run.sst_views:
            yield view.sst.id.value
