"""The end of a shard: it may be removed once it has nothing, and its number is not used again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from libs.serving.peers.topology import TopologyDirectory
from libs.serving.process.exits import ExitCause, FatalError
from libs.storage.database.roots import Root
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.objects.topology_entries import entry_path_of
from slatemq.errors import FailedPrecondition

log = logging.getLogger(__name__)


class ShardRemoval:
    """What the process of a shard does once the shard, such as `broker/0`, is removed."""

    def __init__(self, root: Root, directory: TopologyDirectory, database: str) -> None:
        self._root = root
        self._directory = directory
        self._database = database
        service, _, number = database.partition("/")
        self._name = f"{service} shard {number}"

    async def wait(self, removed: asyncio.Event) -> ExitCause:
        """Why the process ends that removes the shard, once it has."""
        await removed.wait()
        return ExitCause.clean(f"{self._name} was removed")

    async def check_start(self) -> None:
        """Raises FatalError where the shard was removed, once nothing is left of it."""
        if await RemovedShards(self._root.objects).has(self._database):
            await self.finish()
            raise FatalError(
                ExitCause.usage(
                    f"{self._name} was removed, and its number cannot be used again: start the "
                    "process with the next free number (`slatemq shard add` names it)"
                )
            )

    async def finish(self) -> None:
        """Deletes what is left of the shard, which is removed. Raises StoreUnavailable."""
        await self._directory.remove(entry_path_of(self._database))
        wals = (await self._root.wal_store()).objects
        await RemovedShards(self._root.objects).delete_files(self._database, wals)
        log.info("deleted what was left of %s", self._database)


def check_may_stay(database: str, *, is_certain: bool) -> None:
    """Raises FailedPrecondition (SHARD_LEAVING) once it is certain that a shard is removed."""
    if is_certain:
        service, _, number = database.partition("/")
        raise FailedPrecondition(
            "SHARD_LEAVING",
            f"the removal of {service} shard {number} has begun, and cannot be cancelled any more: "
            "repeat it (`slatemq shard remove`), or start its process again, which finishes it",
            subject=database,
        )


def check_drained(database: str, remaining: Iterable[str], *, is_draining: bool) -> None:
    """Raises FailedPrecondition (SHARD_NOT_DRAINED) where a shard may not be removed yet.

    `remaining` is what it still has, for people.
    """
    left = list(remaining)
    if not is_draining:
        left.insert(0, "it is not being drained")
    if left:
        service, _, number = database.partition("/")
        raise FailedPrecondition(
            "SHARD_NOT_DRAINED",
            f"{service} shard {number} cannot be removed yet: {', '.join(left)}",
            subject=database,
        )
