"""The shards that were removed: an object for each, which stays, since no number is used again.

    removed-shards/<service>-<shard>.json   {"removed_at_ms": 1767225600000}
    …of one that was given up               {"removed_at_ms": 1767225600000, "given_up": true}

A shard's process writes it once the shard is empty, and then removes the database, its owners and
its entry in the topology. A process that starts with such a number finishes that, and ends.

A shard that was given up was not empty: an operator does without what it had.
"""

from __future__ import annotations

import json
from typing import Final

from libs.storage.errors import ObjectNotFound
from libs.storage.objects.json_objects import load_json
from libs.storage.objects.shard_owners import FOLDER as OWNERS
from libs.storage.objects.small_objects import Objects

FOLDER: Final = "removed-shards"

_ENDING: Final = ".json"


class RemovedShards:
    """Those of one root. Databases are named as `broker/3`. Methods raise StoreUnavailable."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def add(self, database: str, now_ms: int, *, is_given_up: bool = False) -> None:
        """Note, durably, that a shard is removed."""
        fields: dict[str, int | bool] = {"removed_at_ms": now_ms}
        if is_given_up:
            fields["given_up"] = True
        await self._objects.put_if_absent(_path(database), json.dumps(fields).encode())

    async def has(self, database: str) -> bool:
        """Whether it was removed, or given up."""
        return await self._objects.exists(_path(database))

    async def is_given_up(self, database: str) -> bool:
        """Whether it is gone with what it had."""
        try:
            fields = load_json(await self._objects.get(_path(database)))
        except (ObjectNotFound, ValueError):
            return False
        return isinstance(fields, dict) and fields.get("given_up") is True

    async def all(self) -> frozenset[str]:
        paths = await self._objects.list(FOLDER)
        return frozenset(
            path.removeprefix(f"{FOLDER}/").removesuffix(_ENDING).replace("-", "/")
            for path in paths
        )

    async def numbers(self, service: str) -> list[int]:
        """Those of the removed shards of `ingest` or `broker`, ascending."""
        names = (name.partition("/") for name in await self.all())
        return sorted(int(number) for kind, _, number in names if kind == service)

    async def delete_files(self, database: str, wals: Objects) -> None:
        """Delete what is left of a removed shard but its entry in the topology.

        `wals` are the objects of the store that has the write-ahead logs.
        """
        await wals.delete_folder(database)
        for folder in (database, f"{OWNERS}/{database}"):
            await self._objects.delete_folder(folder)


def _path(database: str) -> str:
    return f"{FOLDER}/{database.replace('/', '-')}{_ENDING}"
