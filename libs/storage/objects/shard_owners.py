"""The process that may own a shard: numbered objects, the highest of which is valid.

    shard-owners/<database, such as broker/0>/<number, 20 digits>.json
        {"owner": "6b1f…", "replaced": ["0c9e…", …], "nonce": "8f…"}

SlateDB gives a database to the process that opens it last. So a process that was replaced and that
its supervisor starts again would take the shard back, and the two would fence each other endlessly.
Where a supervisor gives its process a name that lasts over restarts (the UID of a pod), the process
claims the shard by this name before it opens the database; a replaced name never gets it again.

A process without a name takes the shard whenever it starts, and replaces the name that has it.

An object is created only if it is absent, and never changed: a claim is a compare-and-swap on the
number before it. A claim removes the objects before its own, so a claimant that read long ago can
create a used number again. That is why an owner looks once more after it has opened the database.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Final, NamedTuple

from libs.storage.errors import CorruptRecord, Fenced, ObjectNotFound
from libs.storage.objects.json_objects import load_json
from libs.storage.objects.small_objects import Objects

FOLDER: Final = "shard-owners"

REPLACED_MAX: Final = 256
"""Names that are remembered, the latest first: a pod that outlives this many successors could
take its shard back, once."""

_NONCE_BYTES: Final = 8


class OwnerRecord(NamedTuple):
    """One claim; an owner without a name is empty.

    Attributes:
        number: Of the object; 0 where no claim was ever made.
        replaced: The names that had the shard before, latest first.
    """

    number: int
    owner: str
    replaced: tuple[str, ...]


_UNCLAIMED: Final = OwnerRecord(0, "", ())


class ShardOwners:
    """The claims of one database. Every method raises StoreUnavailable and CorruptRecord."""

    def __init__(self, objects: Objects, database: str) -> None:
        """For a database by its name below the root, such as `broker/0`."""
        self._objects = objects
        self._database = database
        self._folder = f"{FOLDER}/{database}"

    async def claim(self, owner: str) -> None:
        """Make this name the owner; raises Fenced where another one has replaced it.

        Call it before opening the database. Costs a LIST and a GET, and a PUT for a new owner.
        """
        while True:
            latest = await self.latest()
            if owner and owner in latest.replaced:
                raise self._fenced(owner, latest)
            if owner == latest.owner or await self._create(owner, latest):
                return

    async def check(self, owner: str) -> None:
        """Raise Fenced if another one has claimed the shard. Call it with the database open."""
        latest = await self.latest()
        if latest.owner != owner:
            raise self._fenced(owner, latest)

    async def latest(self) -> OwnerRecord:
        """The valid claim."""
        while paths := await self._objects.list(self._folder):
            try:
                return _decode(paths[-1], await self._objects.get(paths[-1]))
            except ObjectNotFound:
                continue  # A higher number was created since, and this one was removed.
        return _UNCLAIMED

    async def _create(self, owner: str, latest: OwnerRecord) -> bool:
        named = (latest.owner,) if latest.owner else ()
        replaced = [name for name in (*named, *latest.replaced) if name != owner]
        content = {
            "owner": owner,
            "replaced": replaced[:REPLACED_MAX],
            # Objects that compete for a path must differ: see Objects.put_if_absent.
            "nonce": secrets.token_hex(_NONCE_BYTES),
        }
        path = f"{self._folder}/{latest.number + 1:020}.json"
        if not await self._objects.put_if_absent(path, json.dumps(content).encode()):
            return False
        paths = await self._objects.list(self._folder)
        await asyncio.gather(*(self._objects.delete(one) for one in paths if one < path))
        return True

    def _fenced(self, owner: str, latest: OwnerRecord) -> Fenced:
        by = repr(latest.owner) if latest.owner else "a process without an owner name"
        return Fenced(f"{self._database}: {by} has replaced {owner!r}")


def _decode(path: str, data: bytes) -> OwnerRecord:
    try:
        content = load_json(data)
        number = int(path.rpartition("/")[2].removesuffix(".json"))
        record = OwnerRecord(number, content["owner"], tuple(content["replaced"]))
        if not all(type(name) is str for name in (record.owner, *record.replaced)):
            raise ValueError("it has a name that is not text")
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptRecord("shard owner", f"{path}: {error!r}") from error
    return record
