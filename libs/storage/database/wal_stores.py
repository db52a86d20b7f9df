"""The store that the write-ahead logs of an instance are in: the root's own, or one of their own.

Which one, and how this process reaches it, says the instance's record. SlateDB itself opens a
database with any store, an empty one too, and loses in silence what its WAL had. So a store of the
WALs alone has an object that says to which instance it belongs, and nothing is opened without it::

    <bucket or folder>/<prefix of the root>/wal-store.json   {"id": "8f…", "root": "s3://…"}
                                           /ingest/0/wal/…   as below the root otherwise
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from obstore.exceptions import BaseError
from slatedb.uniffi import Error, ObjectStore, ObjectStoreBuilder, ObjectStoreType

from libs.storage.database.addresses import Address
from libs.storage.errors import (
    CorruptRecord,
    LostWalStore,
    ObjectNotFound,
    OtherWalStore,
    StoreUnavailable,
    readable,
)
from libs.storage.objects.durability import Durability, FolderSync, durability_of
from libs.storage.objects.instance_records import WalStoreRecord
from libs.storage.objects.json_objects import load_json
from libs.storage.objects.small_objects import Objects, open_objects

_TYPES: Final = {
    "file": ObjectStoreType.LOCAL,
    "memory": ObjectStoreType.IN_MEMORY,
    "s3": ObjectStoreType.S3,
    "gs": ObjectStoreType.GCS,
    "az": ObjectStoreType.AZURE,
}
_BUCKET_KEY: Final = {"s3": "bucket", "gs": "bucket", "az": "container_name"}

MARKER: Final = "wal-store.json"

_LOST: Final = (
    "Restore it, or mount what holds it. To go on without what was answered since the last tables, "
    "see `If the store of the WALs is lost` of docs/how-to/wal-store.md"
)


@dataclass(frozen=True)
class WalStore:
    """Where the WALs of an instance are.

    Attributes:
        store: SlateDB's client.
        record: What the instance's record says of it; None where it is the root's own store.
    """

    address: Address
    store: ObjectStore
    objects: Objects
    durability: Durability
    record: WalStoreRecord | None = None

    def name_of(self, path: str) -> str:
        """The path as messages have it: with the URL of the store where it is not the root's."""
        return path if self.record is None else f"{self.address.url}/{path}"

    async def has_marker(self) -> bool:
        """Whether the store says that it is this instance's; False: it says nothing.

        Raises OtherWalStore where it is another's, CorruptRecord, StoreUnavailable.
        """
        assert self.record is not None, "the root's own store needs none"
        try:
            data = await self.objects.get(MARKER)
        except ObjectNotFound:
            return False
        try:
            content = load_json(data)
            found, root = str(content["id"]), str(content["root"])
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptRecord("WAL store", f"{self.name_of(MARKER)}: {error!r}") from error
        if found != self.record.store_id:
            is_named = self.record.url == self.address.url
            advice = (
                "give an empty store"
                if is_named
                else f"give the store that this instance has, {self.record.url}"
            )
            raise OtherWalStore(
                f"wal_store: {self.address.url} has the WALs of another instance, or earlier ones "
                f"of this one ({root}): {advice}"
            )
        self._require_marker()
        return True

    async def check_marker(self) -> None:
        """Raise LostWalStore where the store does not say whose it is any more; as `has_marker`."""
        if not await self.has_marker():
            raise unknown_wal_store(self, is_other=False)

    async def mark(self, root_url: str) -> None:
        """Let the store say whose it is. Raises as `has_marker`."""
        assert self.record is not None, "the root's own store needs none"
        content = {"id": self.record.store_id, "root": root_url}
        if await self.objects.put_if_absent(MARKER, json.dumps(content).encode()):
            self._require_marker()
        else:
            await self.has_marker()

    def _require_marker(self) -> None:
        """Let no commit count as durable once the folder has been emptied."""
        if self.address.folder is not None and isinstance(self.durability, FolderSync):
            self.durability.require(self.address.folder / self.address.prefix / MARKER)


def unknown_wal_store(wal: WalStore, *, is_other: bool) -> LostWalStore | OtherWalStore:
    """The error where an instance has its WALs in a store that does not say so.

    `is_other`: this process was given another URL than the record has.
    """
    assert wal.record is not None, "the root's own store needs no marker"
    if is_other:
        return OtherWalStore(
            f"wal_store: {wal.address.url} is not the store that this instance has its WALs in, "
            f"{wal.record.url}: give that one, or leave the setting out. To move the WALs, see "
            "docs/how-to/wal-store.md"
        )
    return LostWalStore(
        f"wal_store: {wal.address.url} has no {MARKER}, and this instance has its WALs there: "
        f"what it had is lost, or it is not the store. {_LOST}"
    )


def open_wal_store(address: Address, record: WalStoreRecord, *, make: bool, sync: bool) -> WalStore:
    """The store at `address`; sends it nothing. With `make`, its folder is made.

    Raises LostWalStore where there is no folder, StoreUnavailable.
    """
    folder = None if address.folder is None else address.folder / address.prefix
    if folder is not None:
        if not make and not folder.is_dir():
            raise LostWalStore(
                f"wal_store: there is no folder {folder}, and this instance has its WALs there. "
                f"{_LOST}"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"making the folder of the WALs: {error}") from error
    durability = durability_of(folder, sync)
    return WalStore(address, *open_clients(address, folder, durability), durability, record)


def open_clients(
    address: Address, folder: Path | None, durability: Durability
) -> tuple[ObjectStore, Objects]:
    """SlateDB's client of a store, of the bucket or the folder without the prefix; and the objects.

    `folder` is that of the objects. Raises StoreUnavailable for a configuration that is refused.
    """
    at = (address.scheme, address.bucket, address.prefix, folder, address.options)
    try:
        return _slatedb_store(address), open_objects(*at, durability)
    except (Error, BaseError) as error:
        why = readable(str(error))
        raise StoreUnavailable(f"configuring {address.url}: {why}") from error


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
