"""The settings of the instance: numbered objects below its root, the highest of which is valid.

    instance/<number, 20 digits>.json
        {"number": 2, "written_at_ms": 1767225600000, "nonce": "8f…",
         "settings": {"payload_bytes_max": 67108864, "replay_window_s": 604800, …},
         "wal_store": {"url": "file:///fast/slatemq", "id": "5d…"}}

`wal_store` is null where the write-ahead logs are below the root; `id` is of that store's own
object: see `libs.storage.database.wal_stores`.

An object is created only if it is absent, and neither changed nor removed. So a change is a
compare-and-swap on the number before it, in a folder as in an object store, and the objects are the
history of the settings. The meaning of a setting is not known here.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Final, NamedTuple

from libs.storage.errors import CorruptRecord
from libs.storage.objects.json_objects import load_json
from libs.storage.objects.small_objects import Objects

FOLDER: Final = "instance"
_NONCE_BYTES: Final = 8


class WalStoreRecord(NamedTuple):
    """The store of the write-ahead logs alone: its URL, and what its own object must say."""

    url: str
    store_id: str

    @classmethod
    def new(cls, url: str) -> WalStoreRecord:
        """That of a store which has no instance yet."""
        return cls(url, secrets.token_hex(_NONCE_BYTES))


class InstanceRecord(NamedTuple):
    """The settings of the instance as one change left them; the first has the number 1."""

    number: int
    written_at_ms: int
    settings: Mapping[str, int]
    wal_store: WalStoreRecord | None = None


class InstanceRecords:
    """The records of one root. Every method raises StoreUnavailable."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def latest(self) -> InstanceRecord | None:
        """The valid record; None before the instance is made. Raises CorruptRecord.

        Costs a LIST and a GET.
        """
        paths = [path for path in await self._objects.list(FOLDER) if path.endswith(".json")]
        if not paths:
            return None
        return _decode(paths[-1], await self._objects.get(paths[-1]))

    async def before(self, wal_store: WalStoreRecord) -> InstanceRecord | None:
        """The last record that has another store of the WALs; None where all have this one.

        Raises CorruptRecord.
        """
        for path in reversed(await self._objects.list(FOLDER)):
            if path.endswith(".json"):
                record = _decode(path, await self._objects.get(path))
                if record.wal_store != wal_store:
                    return record
        return None

    async def create(self, record: InstanceRecord) -> bool:
        """Write the record, durably, if its number is free.

        False: another writer was first; read the latest again.
        """
        return await self._objects.put_if_absent(path_of(record.number), _encode(record))


def with_wal_store(path: str, data: bytes, wal_store: WalStoreRecord | None) -> bytes:
    """A record as it is stored, with another store of the WALs: for a copied instance.

    Raises CorruptRecord.
    """
    _decode(path, data)
    return json.dumps(load_json(data) | {"wal_store": _encode_wal_store(wal_store)}).encode()


def path_of(number: int) -> str:
    """Where the record of this number is."""
    return f"{FOLDER}/{number:020}.json"


def _encode(record: InstanceRecord) -> bytes:
    content = {
        **record._asdict(),
        "wal_store": _encode_wal_store(record.wal_store),
        "nonce": secrets.token_hex(_NONCE_BYTES),
    }
    return json.dumps(content).encode()


def _encode_wal_store(wal_store: WalStoreRecord | None) -> Mapping[str, str] | None:
    return None if wal_store is None else {"url": wal_store.url, "id": wal_store.store_id}


def _decode(path: str, data: bytes) -> InstanceRecord:
    try:
        content = load_json(data)
        named = content["wal_store"]
        record = InstanceRecord(
            content["number"],
            content["written_at_ms"],
            dict(content["settings"]),
            None if named is None else WalStoreRecord(named["url"], named["id"]),
        )
        numbers = [record.number, record.written_at_ms, *record.settings.values()]
        if any(type(number) is not int for number in numbers):
            raise ValueError("it has a value that is not a whole number")
        if any(type(text) is not str for text in record.wal_store or ()):
            raise ValueError("its wal_store has a value that is not a text")
        if path != path_of(record.number):
            raise ValueError(f"its content has the number {record.number}")
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptRecord("instance record", f"{path}: {error!r}") from error
    return record
