"""A root: the place, named by a URL, that holds everything of one SlateMQ instance.

Below it: `ingest/<shard>` and `broker/<shard>` (SlateDB), `blobs/`, `queue-names/`,
`shard-owners/`, `topology/`, `instance/`, `janitor/`. The write-ahead logs of the databases may be
in a store of their own: see `libs.storage.database.wal_stores`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from slatedb.uniffi import (
    Admin,
    AdminBuilder,
    DbBuilder,
    DbCache,
    DbReaderBuilder,
    FoyerCacheOptions,
    ObjectStore,
    ReaderMode,
    ReaderOptions,
)

from libs.storage.database.addresses import (
    Address,
    check_variables,
    parse_root,
    parse_wal_store,
)
from libs.storage.database.files import SnapshotFiles, files_folders, files_of
from libs.storage.database.formats import check_format, settle_format
from libs.storage.database.integrity import (
    DatabaseFiles,
    FileFault,
    look_at_files,
    read_wal,
    refuse_losses,
)
from libs.storage.database.opening import Opening
from libs.storage.database.settings import Kind, Tuning, slatedb_settings, tuning_of
from libs.storage.database.slate import Database, bounded, translated
from libs.storage.database.snapshots import (
    LATEST_OPTIONS,
    READER_OPTIONS,
    SnapshotReader,
    Snapshots,
)
from libs.storage.database.wal_stores import (
    WalStore,
    open_clients,
    open_wal_store,
    unknown_wal_store,
)
from libs.storage.errors import (
    OtherWalStore,
    SnapshotNotFound,
    StoreUnavailable,
)
from libs.storage.layout.own_keys import FORMAT_KEY
from libs.storage.objects.durability import BothSyncs, Durability, NoSync, durability_of
from libs.storage.objects.instance_records import InstanceRecords, WalStoreRecord
from libs.storage.objects.patience import patience_s
from libs.storage.objects.probe import probe_store
from libs.storage.objects.restores import refuse_unfinished_restore
from libs.storage.objects.small_objects import Objects

_log = logging.getLogger(__name__)

SILENCE_S: Final = 10.0
"""How long a store may not respond before it counts as unreachable. Opening a database may take far
longer: see libs.storage.database.opening."""


OPENINGS_MAX: Final = 3
"""Times that a start opens its database, as long as the store fails. SlateDB repeats a request for
some 20 s; each opening leaves an object in the WAL, and replays those of the ones before."""


class Root:
    """The place of an instance in a store: its databases and small objects. See `open_root`."""

    def __init__(
        self,
        address: Address,
        store: ObjectStore,
        objects: Objects,
        durability: Durability,
        timeout_s: float,
        wal_url: str = "",
    ) -> None:
        """`wal_url` is where this process reaches the store of the WALs; empty: as recorded."""
        self.address = address
        self.objects = objects
        self.durability = durability
        self.wal_url = wal_url
        self._store = store
        self._timeout_s = timeout_s
        self._wal: WalStore | None = None

    @property
    def url(self) -> str:
        return self.address.url

    async def wal_store(self) -> WalStore:
        """The store of the WALs, as the instance's record has it: the root's own, or another.

        Asks once; of a new instance it marks the other one. Raises OtherWalStore where this
        process was given one that the instance does not have, LostWalStore, CorruptRecord,
        StoreUnavailable.
        """
        if self._wal is not None:
            return self._wal
        record = await InstanceRecords(self.objects).latest()
        named = None if record is None else record.wal_store
        if named is None:
            if self.wal_url:
                raise OtherWalStore(
                    "wal_store: this instance has its WALs below its root, and keeps them there: "
                    "leave the setting out. To move them, see docs/how-to/wal-store.md"
                )
            own = self.own_wal_store()
            if record is not None:
                self._wal = own
            return own
        is_other = self.wal_url not in ("", named.url)
        is_new = not is_other and not await self.has_databases()
        wal = self.open_wal_store(named, make=is_new)
        if not await wal.has_marker():
            if is_new:
                await wal.mark(self.url)
            # Else another process of a new instance may have marked it, and begun, meanwhile.
            elif not await wal.has_marker():
                raise unknown_wal_store(wal, is_other=is_other)
        self._wal = wal
        return wal

    async def new_wal_store(self) -> WalStoreRecord | None:
        """What the record of a new instance says of the store that this process was given.

        None where it was given none, or the instance has its record. The store is tried first: the
        record binds the instance to it. Raises as `try_wal_store`.
        """
        records = InstanceRecords(self.objects)
        if not self.wal_url or await records.latest() is not None:
            return None
        named = WalStoreRecord.new(self.wal_url)
        try:
            await self.try_wal_store(named)
        except OtherWalStore:
            if await records.latest() is None:
                raise
            return None  # Another process has just made the instance, with this store.
        return named

    async def try_wal_store(self, named: WalStoreRecord) -> WalStore:
        """Make and test the store that an instance is to have its WALs in; what it says stays.

        Raises OtherWalStore where another instance has it, StoreUnavailable, as `probe_store`.
        """
        wal = self.open_wal_store(named, make=True)
        await probe_store(wal.objects)
        await wal.has_marker()
        return wal

    @property
    def wal_address(self) -> Address:
        """Where the WALs are, once a database has been opened; until then the root's own."""
        return self.address if self._wal is None else self._wal.address

    @property
    def folders(self) -> Mapping[str, Path]:
        """Those of file://, by what is in them: `data`, and `wal` as of `wal_address`."""
        addresses = {"data": self.address}
        if self.wal_address != self.address:
            addresses["wal"] = self.wal_address
        return {name: at.folder for name, at in addresses.items() if at.folder is not None}

    def own_wal_store(self) -> WalStore:
        return WalStore(self.address, self._store, self.objects, self.durability)

    def open_wal_store(self, named: WalStoreRecord, *, make: bool) -> WalStore:
        """The other store, whatever its marker says; see `wal_stores.open_wal_store`.

        Raises OtherWalStore for a URL that cannot be one.
        """
        try:
            address = parse_wal_store(self.wal_url or named.url, self.address)
        except ValueError as error:
            raise OtherWalStore(str(error)) from error
        return open_wal_store(
            address, named, make=make, sync=not isinstance(self.durability, NoSync)
        )

    def use_wal_store(self, wal: WalStore) -> None:
        """Have the WALs in this store, whatever the instance's record says by now."""
        self._wal = wal

    async def check_stores(self) -> WalStore:
        """Raise StoreUnavailable, within the timeout, if a store cannot be read; gives the WALs'.

        Raises as `wal_store` too.
        """
        await self.objects.check(self._timeout_s)
        wal = await self.wal_store()
        if wal.record is not None:
            await wal.objects.check(self._timeout_s)
        return wal

    async def check_wal_store(self) -> None:
        """Raise OtherWalStore if the record names another store than the one that is used.

        For an owner that has opened a database: from here on no other process moves its WAL.
        """
        used = await self.wal_store()
        record = await InstanceRecords(self.objects).latest()
        if (None if record is None else record.wal_store) != used.record:
            raise OtherWalStore("wal_store: the WALs were moved meanwhile: start again")

    async def sync(self) -> None:
        """Sync the folders of the root and of the WALs. Raises StorageError."""
        wal = await self.wal_store()
        try:
            await self._durability_of(wal).sync()
        except OSError as error:
            raise StoreUnavailable(f"syncing the data folder: {error}") from error

    def _durability_of(self, wal: WalStore) -> Durability:
        """Syncs all that a database writes; its commits are in the WAL alone."""
        return self.durability if wal.record is None else BothSyncs(self.durability, wal.durability)

    async def has_databases(self) -> bool:
        """Whether any shard has begun below this root. Raises StoreUnavailable.

        A folder alone says nothing: on file:// it may be empty, or what a volume is mounted on.
        """
        for kind in Kind:
            for database in await self.objects.folders(kind):
                for folder in files_folders(database):
                    if await self.objects.has_any(folder):
                        return True
        return False

    async def database(
        self, name: str, kind: Kind, tuning: Tuning | None = None, *, is_restored: bool = False
    ) -> Database:
        """Open the database `name` (such as `ingest/0`) for writing; fences an older writer.

        Takes as long as the replay needs. Raises StoreUnavailable when the store does not respond
        within the root's timeout, DamagedStore when SlateDB cannot read its own files or they are
        lost, OtherFormat, and UnfinishedRestore. `is_restored`: for the restore itself, which has
        copied it from a snapshot, without a WAL.
        """
        number = 1
        while True:
            wal = await self.check_stores()
            if not is_restored:
                await refuse_unfinished_restore(self.objects, self.url)
            try:
                return await self._open(name, kind, wal, tuning, is_restored=is_restored)
            except StoreUnavailable as error:
                if not patience_s() or number == OPENINGS_MAX:
                    raise
                _log.warning("the start waits for the store, and opens it again: %s", error)
                number += 1

    async def _open(
        self, name: str, kind: Kind, wal: WalStore, tuning: Tuning | None, *, is_restored: bool
    ) -> Database:
        chosen = tuning or tuning_of(kind, self.address.scheme, wal.address.scheme)
        builder = DbBuilder(self._path(name), self._store)
        if wal.record is not None:
            builder.with_wal_object_store(wal.store)
        builder.with_settings(slatedb_settings(chosen))
        builder.with_db_cache(_cache(chosen), 0)
        admin = self._admin(name)
        opening = Opening(builder, name)
        with translated(f"opening {name} below {self.url}"):
            db = await opening.build(
                lambda: refuse_losses(admin, self.objects, wal, name, is_restored=is_restored),
                self._timeout_s,
                self.check_stores,
            )
        durability = self._durability_of(wal)
        database = Database(
            db,
            name,
            durability,
            chosen.replay,
            opening.recorder,
            wal.durability,
            chosen.uncompacted_tables_max,
        )
        try:
            await settle_format(database, self.url)
            if wal.record is not None:
                # Commits sync the WAL alone: what it goes on from must not be newer on the disk.
                await self.sync()
        except BaseException:
            await database.close()
            raise
        return database

    def snapshots(self, database: Database) -> Snapshots:
        return Snapshots(database, self._admin(database.name))

    async def open_snapshot(self, name: str, snapshot_id: str) -> SnapshotReader:
        """Open a snapshot of the database `name` for reading; needs no owner.

        Raises SnapshotNotFound, OtherFormat, and StoreUnavailable within the root's timeout.
        """
        # All of its rows are in tables: no WAL is read.
        builder = DbReaderBuilder(self._path(name), self._store)
        builder.with_reader_mode(ReaderMode.CHECKPOINT(snapshot_id))
        return await self._open_reader(name, builder, READER_OPTIONS, self._timeout_s)

    async def open_latest(self, name: str) -> SnapshotReader:
        """Open all that is durable in the database `name` for reading; writes nothing.

        For a database whose owner is stopped: while one goes on, what this reads changes. Takes as
        long as the replay of the WAL needs. Raises DamagedStore, OtherFormat, StoreUnavailable.
        """
        wal = await self.wal_store()
        builder = DbReaderBuilder(self._path(name), self._store)
        builder.with_reader_mode(ReaderMode.FOLLOW_LATEST())
        if wal.record is not None:
            builder.with_wal_object_store(wal.store)
        return await self._open_reader(name, builder, LATEST_OPTIONS, None)

    async def _open_reader(
        self, name: str, builder: Any, options: ReaderOptions, timeout_s: float | None
    ) -> SnapshotReader:
        builder.with_options(options)
        builder.with_db_cache_disabled()
        what = f"opening {name} below {self.url} for reading"
        async with bounded(what, timeout_s):
            reader = await builder.build()
        try:
            with translated(what):
                check_format(await reader.get(FORMAT_KEY), name, self.url)
        except BaseException:
            await reader.shutdown()
            raise
        return SnapshotReader(reader, name)

    async def snapshot_files(self, name: str, snapshot_id: str) -> SnapshotFiles:
        """The objects that a snapshot of the database `name` consists of; needs no owner.

        Raises SnapshotNotFound, StoreUnavailable.
        """
        admin = self._admin(name)
        async with bounded(f"reading the manifest of {name} below {self.url}", self._timeout_s):
            found = await admin.list_checkpoints(None)
            number = next((one.manifest_id for one in found if one.id == snapshot_id), None)
            manifest = None if number is None else await admin.read_manifest(number)
        if manifest is None:
            raise SnapshotNotFound(snapshot_id)
        return files_of(name, manifest)

    async def forget_snapshots(self, name: str) -> None:
        """Drop all snapshots of the database `name`, which no process has open."""
        admin = self._admin(name)
        async with bounded(f"dropping the snapshots of {name} below {self.url}", self._timeout_s):
            for checkpoint in await admin.list_checkpoints(None):
                await admin.delete_checkpoint(checkpoint.id)

    async def files(self, name: str) -> DatabaseFiles:
        """The files of the database `name`, open or not. Raises DamagedStore, StoreUnavailable."""
        wal = await self.wal_store()
        return await look_at_files(self._admin(name), self.objects, wal, name, self._timeout_s)

    async def wal_fault(self, name: str, files: DatabaseFiles) -> FileFault | None:
        """Read the WAL of the database `name`; what is wrong with it, if anything."""
        wal = await self.wal_store()
        return await read_wal(self._store, wal, self._path(name), name, files)

    def _admin(self, name: str) -> Admin:
        return AdminBuilder(self._path(name), self._store).build()

    def _path(self, name: str) -> str:
        prefix = self.address.prefix
        return f"{prefix}/{name}" if prefix else name


def _cache(tuning: Tuning) -> DbCache:
    def part(size: int) -> DbCache:
        return DbCache.new_foyer_cache(FoyerCacheOptions(max_capacity=size, shards=4))

    return DbCache.new_split_cache(part(tuning.block_cache_bytes), part(tuning.meta_cache_bytes))


def check_folder(url: str) -> None:
    """Raise ValueError for the URL of a folder that is not there, which `open_root` would make."""
    folder = parse_root(url).folder
    if folder is not None and not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")


def open_root(
    url: str, wal_url: str = "", *, timeout_s: float = SILENCE_S, sync: bool = True
) -> Root:
    """The root at `url`; sends the store nothing, but makes the folder of a file:// URL.

    `wal_url` is where this process reaches the store of the WALs alone: see `Root.wal_store`.
    `timeout_s` is how long the store may not respond. `sync=False` leaves out the syncs of file://
    (for measurements: commits then survive a crash of the process, not a power failure). Raises
    ValueError for a bad URL, StoreUnavailable for a folder that cannot be made or a store that
    refuses its configuration.
    """
    address = parse_root(url)
    check_variables(address.scheme, os.environ)
    if wal_url:
        check_variables(parse_wal_store(wal_url, address).scheme, os.environ)
    if address.folder is not None:
        try:
            address.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"making the data folder: {error}") from error
    durability = durability_of(address.folder, sync)
    store, objects = open_clients(address, address.folder, durability)
    return Root(address, store, objects, durability, timeout_s, wal_url)
