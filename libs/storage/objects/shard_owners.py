"""The process that may own a shard: numbered objects, the highest of which is valid.

    shard-owners/<database, such as broker/0>/<number, 20 digits>.json
        {"owner": "6b1f…", "address": "10.0.0.7:7419", "is_free": false, "replaced": ["0c9e…", …],
         "nonce": "8f…"}

SlateDB gives a database to the process that opens it last. So a process that was replaced and that
its supervisor starts again would take the shard back, and the two would fence each other endlessly.
Where a supervisor gives its process a name that lasts over restarts (the UID of a pod), the process
claims the shard by this name before it opens the database; a replaced name never gets it again.

A process without a name takes the shard whenever it starts, and replaces the name that has it. It
writes no claim where there is none of a name to replace, nor one that was given free.

A standby takes a shard only from the claim that it has watched: `take` fails where there has been
another one since. So of several standbys one gets it, and the others watch that one. An owner that
has stood by gives its shard free when it stops.

An object is created only if it is absent, and never changed: a claim is a compare-and-swap on the
number before it. A claim removes the objects before its own, so a claimant that read long ago can
create a used number again. That is why an owner looks once more after it has opened the database.

A claim that is damaged has its number, and counts as of a process without a name, so that the next
one replaces it. The names before it are forgotten: one of them could take the shard back, once.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from typing import Final, NamedTuple

from libs.storage.errors import Fenced
from libs.storage.objects.json_objects import load_json
from libs.storage.objects.small_objects import Objects

FOLDER: Final = "shard-owners"

REPLACED_MAX: Final = 256
"""Names that are remembered, the latest first: a pod that outlives this many successors could
take its shard back, once."""

_NONCE_BYTES: Final = 8


class Owner(NamedTuple):
    """A process that may own a shard.

    Attributes:
        name: Empty where it has none.
        address: `host:port` where the other services reach it; empty: they cannot.
    """

    name: str = ""
    address: str = ""


class OwnerRecord(NamedTuple):
    """One claim.

    Attributes:
        number: Of the object; 0 where no claim was ever made.
        replaced: The names that had the shard before, latest first.
        is_free: Whether its owner has given it free.
        damage: Why it cannot be read; empty where it can.
    """

    number: int
    owner: Owner
    replaced: tuple[str, ...]
    is_free: bool = False
    damage: str = ""


_CLAIM: Final = re.compile(rf"{FOLDER}/.+/\d{{20}}\.json")

_UNCLAIMED: Final = OwnerRecord(0, Owner(), ())


class ShardOwners:
    """The claims of one database. Every method raises StoreUnavailable."""

    def __init__(self, objects: Objects, database: str) -> None:
        """For a database by its name below the root, such as `broker/0`."""
        self._objects = objects
        self._database = database
        self._folder = f"{FOLDER}/{database}"

    async def claim(self, owner: Owner) -> None:
        """Make this process the owner; raises Fenced where another one has replaced its name.

        Call it before opening the database. Costs a LIST and a GET, and a PUT for a new owner.
        """
        while True:
            latest = await self.latest()
            if owner.name and owner.name in latest.replaced:
                raise self._fenced(owner.name, latest)
            # What was given free is claimed by every process: a standby may take it until then.
            is_same = owner == latest.owner if owner.name else not latest.owner.name
            if (is_same and not latest.is_free) or await self._create(owner, latest):
                return

    async def take(self, owner: Owner, watched: OwnerRecord) -> bool:
        """Make this process the owner if the claim that it has watched is still the latest.

        Where it fails, the claim may have been made, or be made yet: `latest` has this name then.
        """
        return await self._create(owner, watched)

    async def give_free(self, name: str) -> None:
        """End the claim of this name, which never gets the shard again, if it has the shard.

        Call it with the database closed.
        """
        latest = await self.latest()
        if latest.owner.name == name:
            await self._create(Owner(), latest, is_free=True)

    async def check(self, name: str) -> None:
        """Raise Fenced if another one has claimed the shard. Call it with the database open."""
        latest = await self.latest()
        if latest.owner.name != name:
            raise self._fenced(name, latest)

    async def latest(self) -> OwnerRecord:
        """The valid claim."""
        found = await self._objects.last(self._folder, _CLAIM)
        return _decode(*found) if found else _UNCLAIMED

    async def _create(self, owner: Owner, latest: OwnerRecord, *, is_free: bool = False) -> bool:
        """Create the claim behind the latest one; False where another one has come before it."""
        named = (latest.owner.name,) if latest.owner.name else ()
        replaced = [name for name in (*named, *latest.replaced) if name != owner.name]
        content = {
            "owner": owner.name,
            "address": owner.address,
            "is_free": is_free,
            "replaced": replaced[:REPLACED_MAX],
            # Objects that compete for a path must differ: see Objects.put_if_absent.
            "nonce": secrets.token_hex(_NONCE_BYTES),
        }
        path = f"{self._folder}/{latest.number + 1:020}.json"
        if not await self._objects.put_if_absent(path, json.dumps(content).encode()):
            return False
        paths = await self._objects.list(self._folder, _CLAIM)
        # The number behind an old claim is free again once two have come since.
        is_latest = paths[-1:] == [path]
        old = [one for one in paths if one < path] if is_latest else [path]
        await asyncio.gather(*map(self._objects.delete, old))
        return is_latest

    def _fenced(self, name: str, latest: OwnerRecord) -> Fenced:
        by = repr(latest.owner.name) if latest.owner.name else "a process without an owner name"
        return Fenced(f"{self._database}: {by} has replaced {name!r}")


def _decode(path: str, data: bytes) -> OwnerRecord:
    number = int(path.rpartition("/")[2].removesuffix(".json"))
    try:
        content = load_json(data)
        owner = Owner(content["owner"], content["address"])
        record = OwnerRecord(number, owner, tuple(content["replaced"]), content["is_free"])
        if not all(type(text) is str for text in (*owner, *record.replaced)):
            raise ValueError("it has a name or an address that is not text")
        if type(record.is_free) is not bool:
            raise ValueError("is_free is not a truth value")
    except (ValueError, KeyError, TypeError) as error:
        return _UNCLAIMED._replace(number=number, damage=f"{path}: {error!r}")
    return record
