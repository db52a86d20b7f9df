"""A root: the place, named by a URL, that holds everything of one SlateMQ instance.

    file:///folder                     a folder of this machine, made if absent
    memory:///                         in this process only, as long as the Root object lives
    s3://bucket/prefix?endpoint=&region=&allow_http=true
    gs://bucket/prefix
    az://container/prefix?endpoint=&allow_http=true

Below it: `ingest/<shard>` and `broker/<shard>` (SlateDB), `blobs/`, `queue-names/`,
`shard-owners/`, `topology/`, `instance/`, `janitor/`.
Credentials come from the usual environment variables of each store, never from the URL.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from obstore.exceptions import BaseError
from slatedb.uniffi import (
    Admin,
    AdminBuilder,
    DbBuilder,
    DbCache,
    DbReaderBuilder,
    Error,
    FoyerCacheOptions,
    ObjectStore,
    ObjectStoreBuilder,
    ObjectStoreType,
    ReaderMode,
    ReaderOptions,
)

from libs.storage.database.files import SnapshotFiles, files_of
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
from libs.storage.errors import SnapshotNotFound, StoreUnavailable, readable
from libs.storage.layout.own_keys import FORMAT_KEY
from libs.storage.objects.durability import Durability, durability_of
from libs.storage.objects.small_objects import Objects, open_objects

SILENCE_S: Final = 10.0
"""How long a store may not respond before it counts as unreachable. Opening a database may take far
longer: see libs.storage.database.opening."""

_OPTIONS: Final = {
    "file": frozenset[str](),
    "memory": frozenset[str](),
    "s3": frozenset({"endpoint", "region", "allow_http"}),
    "gs": frozenset[str](),
    "az": frozenset({"endpoint", "allow_http"}),
}
_TYPES: Final = {
    "file": ObjectStoreType.LOCAL,
    "memory": ObjectStoreType.IN_MEMORY,
    "s3": ObjectStoreType.S3,
    "gs": ObjectStoreType.GCS,
    "az": ObjectStoreType.AZURE,
}
_BUCKET_KEY: Final = {"s3": "bucket", "gs": "bucket", "az": "container_name"}


@dataclass(frozen=True)
class Address:
    """A root URL taken apart; `prefix` has no outer slash, `bucket` may be empty (file, memory)."""

    scheme: str
    bucket: str
    prefix: str
    folder: Path | None
    options: tuple[tuple[str, str], ...]

    @property
    def url(self) -> str:
        """The URL without its options: what stored URIs start with."""
        if self.folder is not None:
            return self.folder.as_uri()
        if self.scheme == "memory":
            return f"memory:///{self.prefix}"
        tail = f"/{self.prefix}" if self.prefix else ""
        return f"{self.scheme}://{self.bucket}{tail}"


def parse_root(url: str) -> Address:
    """Take a root URL apart. Raises ValueError naming what is wrong, never repeating a secret."""
    parts = urlsplit(url)
    scheme = parts.scheme
    if scheme not in _OPTIONS:
        known = ", ".join(f"{name}://" for name in _OPTIONS)
        raise ValueError(f"root URL: unknown scheme {scheme!r}, expected one of {known}")
    if "@" in parts.netloc:
        raise ValueError("root URL: credentials belong in the environment, not in the URL")
    if parts.fragment:
        raise ValueError("root URL: it has a fragment (#...), which has no meaning here: remove it")
    options = parse_qsl(parts.query, keep_blank_values=True)
    for name, value in options:
        if name not in _OPTIONS[scheme]:
            raise ValueError(f"root URL: unknown option {name!r} for {scheme}://")
        if "@" in value:
            raise ValueError(
                f"root URL: credentials belong in the environment, not in the option {name!r}"
            )
        if name == "allow_http" and value not in ("true", "false"):
            raise ValueError("root URL: allow_http must be true or false")
        if not value:
            raise ValueError(f"root URL: option {name!r} is empty")
    path = unquote(parts.path)
    if scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"root URL: file:// takes no host, found {parts.netloc!r}")
        if path in ("", "/"):
            raise ValueError("root URL: file:// needs a folder, as in file:///var/lib/slatemq")
        return Address(scheme, "", "", Path(path).resolve(), ())
    if scheme == "memory":
        if parts.netloc:
            raise ValueError("root URL: memory:// takes no host: write memory:///")
    elif not parts.netloc:
        raise ValueError(f"root URL: {scheme}:// needs a bucket, as in {scheme}://bucket/prefix")
    segments = [segment for segment in path.split("/") if segment]
    if any(segment in (".", "..") for segment in segments):
        raise ValueError("root URL: the path contains . or ..")
    return Address(scheme, parts.netloc, "/".join(segments), None, tuple(options))


def overlap(one: Address, other: Address) -> bool:
    """Whether one of two roots is the other, or lies below it."""
    places = [(at.scheme, at.bucket, dict(at.options).get("endpoint")) for at in (one, other)]
    if places[0] != places[1]:
        return False
    if one.folder is not None and other.folder is not None:
        return one.folder.is_relative_to(other.folder) or other.folder.is_relative_to(one.folder)
    first, second = (f"{part}/" if part else "" for part in (one.prefix, other.prefix))
    return first.startswith(second) or second.startswith(first)


class Root:
    """The place of an instance in a store: its databases and small objects. See `open_root`."""

    def __init__(
        self,
        address: Address,
        store: ObjectStore,
        objects: Objects,
        durability: Durability,
        timeout_s: float,
    ) -> None:
        self.address = address
        self.objects = objects
        self.durability = durability
        self._store = store
        self._timeout_s = timeout_s

    @property
    def url(self) -> str:
        return self.address.url

    async def database(
        self, name: str, kind: Kind, tuning: Tuning | None = None, *, is_restored: bool = False
    ) -> Database:
        """Open the database `name` (such as `ingest/0`) for writing; fences an older writer.

        Takes as long as the replay needs. Raises StoreUnavailable when the store does not respond
        within the root's timeout, DamagedStore when SlateDB cannot read its own files or they are
        lost, and OtherFormat. `is_restored`: it has been copied from a snapshot, without a WAL.
        """
        chosen = tuning or tuning_of(kind, self.address.scheme)
        builder = DbBuilder(self._path(name), self._store)
        builder.with_settings(slatedb_settings(chosen))
        builder.with_db_cache(_cache(chosen), 0)
        admin = self._admin(name)
        opening = Opening(builder, name)
        with translated(f"opening {name} below {self.url}"):
            await self.objects.check(self._timeout_s)
            db = await opening.build(
                lambda: refuse_losses(admin, self.objects, name, is_restored=is_restored),
                self._timeout_s,
                lambda: self.objects.check(self._timeout_s),
            )
        database = Database(db, name, self.durability, chosen.replay, opening.recorder)
        try:
            await settle_format(database, f"{name} below {self.url}")
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
        mode = ReaderMode.CHECKPOINT(snapshot_id)
        return await self._open_reader(name, mode, READER_OPTIONS, self._timeout_s)

    async def open_latest(self, name: str) -> SnapshotReader:
        """Open all that is durable in the database `name` for reading; writes nothing.

        For a database whose owner is stopped: while one goes on, what this reads changes. Takes as
        long as the replay of the WAL needs. Raises DamagedStore, OtherFormat, StoreUnavailable.
        """
        return await self._open_reader(name, ReaderMode.FOLLOW_LATEST(), LATEST_OPTIONS, None)

    async def _open_reader(
        self, name: str, mode: Any, options: ReaderOptions, timeout_s: float | None
    ) -> SnapshotReader:
        builder = DbReaderBuilder(self._path(name), self._store)
        builder.with_reader_mode(mode)
        builder.with_options(options)
        builder.with_db_cache_disabled()
        what = f"opening {name} below {self.url} for reading"
        async with bounded(what, timeout_s):
            reader = await builder.build()
        try:
            with translated(what):
                check_format(await reader.get(FORMAT_KEY), f"{name} below {self.url}")
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
        return await look_at_files(self._admin(name), self.objects, name, self._timeout_s)

    async def wal_fault(self, name: str, files: DatabaseFiles) -> FileFault | None:
        """Read the WAL of the database `name`; what is wrong with it, if anything."""
        return await read_wal(self._store, self._path(name), name, files)

    def _admin(self, name: str) -> Admin:
        return AdminBuilder(self._path(name), self._store).build()

    def _path(self, name: str) -> str:
        prefix = self.address.prefix
        return f"{prefix}/{name}" if prefix else name


def _cache(tuning: Tuning) -> DbCache:
    def part(size: int) -> DbCache:
        return DbCache.new_foyer_cache(FoyerCacheOptions(max_capacity=size, shards=4))

    return DbCache.new_split_cache(part(tuning.block_cache_bytes), part(tuning.meta_cache_bytes))


def _slatedb_store(address: Address) -> ObjectStore:
    kind = _TYPES[address.scheme]
    if address.folder is not None:
        builder = ObjectStoreBuilder(kind)
        builder.with_config("local_path", str(address.folder))
        return builder.build()
    if address.scheme == "memory":
        return ObjectStoreBuilder(kind).build()
    builder = ObjectStoreBuilder.from_env(kind)
    builder.with_config(_BUCKET_KEY[address.scheme], address.bucket)
    for name, value in address.options:
        builder.with_config(name, value)
    return builder.build()


def open_root(url: str, *, timeout_s: float = SILENCE_S, sync: bool = True) -> Root:
    """The root at `url`; sends the store nothing, but makes the folder of a file:// URL.

    `timeout_s` is how long the store may not respond. `sync=False` leaves out the syncs of file://
    (for measurements: commits then survive a crash of the process, not a power failure). Raises
    ValueError for a bad URL, StoreUnavailable for a folder that cannot be made or a store that
    refuses its configuration.
    """
    address = parse_root(url)
    if address.folder is not None:
        try:
            address.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"making the data folder: {error}") from error
    durability = durability_of(address.folder, sync)
    try:
        store = _slatedb_store(address)
        objects = open_objects(
            address.scheme,
            address.bucket,
            address.prefix,
            address.folder,
            address.options,
            durability,
        )
    except (Error, BaseError) as error:
        why = readable(str(error))
        raise StoreUnavailable(f"configuring {address.url}: {why}") from error
    return Root(address, store, objects, durability, timeout_s)
