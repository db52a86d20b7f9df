"""The end of a shard: it may be removed once it has nothing, and its number is not used again.

    serving ──drain──► draining ──nothing is left──► drained ──► leaving ──► removed
       ▲                  │                             │
       └──────cancel──────┴─────────────────────────────┘

Draining is a row of the database: it lasts over restarts, and a process that was replaced cannot
change it. So is leaving, from which there is no way back. That a shard is removed is an object
beside the databases, since the shard's own goes. Every process can write an object, at any time,
without an answer, too: so leaving is durable before.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from opentelemetry.metrics import Meter, Observation

from libs.serving.peers.topology import TopologyDirectory
from libs.serving.process.exits import ExitCause, FatalError
from libs.storage.database.clocks import Clock
from libs.storage.database.commits import GroupCommit
from libs.storage.database.roots import Root
from libs.storage.database.slate import Database
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
            raise FatalError.usage(
                f"{self._name} was removed, or given up, and its number cannot be used again: "
                "start the process with the next free number (`slatemq shard add` names it)"
            )

    async def finish(self) -> None:
        """Deletes what is left of the shard, which is removed. Raises StoreUnavailable."""
        await self._directory.remove(entry_path_of(self._database))
        wals = (await self._root.wal_store()).objects
        await RemovedShards(self._root.objects).delete_files(self._database, wals)
        log.info("deleted what was left of %s", self._database)


class Leaving(Protocol):
    """What stores nothing more of others once `is_leaving` is set."""

    is_leaving: bool


def measure_draining(meter: Meter, drain: ShardDrain) -> None:
    """Registers whether the shard drains: its process may end for ever, and its standby before."""
    meter.create_observable_gauge(
        "slatemq.shard.draining",
        callbacks=[lambda _: [Observation(int(drain.is_draining))]],
        description="1 while the shard takes nothing new, since it is to be removed, else 0",
    )


class ShardDrain(ABC):
    """The drain of a shard that this process has, and its removal.

    Attributes:
        removed: Set once the shard is removed: its process ends.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock,
        commits: GroupCommit,
        leaving: Leaving,
        removed_shards: RemovedShards,
    ) -> None:
        self._database = database
        service, _, number = database.name.partition("/")
        self._shard = int(number)
        self._name = f"{service} shard {number}"
        self._clock = clock
        self._commits = commits
        self._leaving = leaving
        self._removed_shards = removed_shards
        self.removed = asyncio.Event()
        self._is_certain = leaving.is_leaving
        self._deciding = asyncio.Lock()

    @property
    @abstractmethod
    def is_draining(self) -> bool:
        """Whether it takes nothing new."""

    @abstractmethod
    async def remaining(self) -> Sequence[str]:
        """What has to go before the shard can be removed, for people."""

    @abstractmethod
    async def _set(self, *, draining: bool) -> None:
        """Store whether it drains, durably."""

    @abstractmethod
    async def _leave(self) -> None:
        """Put the row that it leaves, and set `_is_certain` in the same turn."""

    async def begin(self) -> None:
        """Take nothing new from now on, durably. Raises as `cancel`."""
        await self._set(draining=True)

    async def cancel(self) -> None:
        """Take what is new again, durably.

        Raises FailedPrecondition (SHARD_LEAVING), Unavailable while the shard may be removed, and
        the errors of the store.
        """
        await self._set(draining=False)

    async def remove(
        self, others_have: Callable[[], Awaitable[Sequence[str]]] | None = None
    ) -> None:
        """Remove the shard; `others_have` says what others have for it.

        Raises FailedPrecondition (SHARD_NOT_DRAINED), Unavailable, the errors of the store. After
        StoreUnavailable the shard takes nothing more, and the call is to be repeated.
        """
        async with self._deciding:
            if not self._is_certain:
                await self._decide(others_have)
        await self.finish()

    async def finish(self) -> None:
        """Finish a removal that is certain, be it since a former process.

        Does nothing where none is. Raises the errors of the store.
        """
        if self._is_certain:
            await self._commits.durable()
            await self._removed_shards.add(self._database.name, self._clock.now_ms())
            self.removed.set()

    async def _decide(self, others_have: Callable[[], Awaitable[Sequence[str]]] | None) -> None:
        """Make it certain that the shard is removed, with the next commit."""
        self._leaving.is_leaving = True
        try:
            # What was answered before is durable then.
            await self._commits.prove_ownership()
            left = list(await self.remaining())
            if others_have is not None:
                left += await others_have()
            self._check_drained(left)
            await self._leave()
        finally:
            self._leaving.is_leaving = self._is_certain

    def _check_may_stay(self) -> None:
        """Raises FailedPrecondition (SHARD_LEAVING) once the removal is certain."""
        if self._is_certain:
            raise FailedPrecondition(
                "SHARD_LEAVING",
                f"the removal of {self._name} has begun, and cannot be cancelled any more: "
                "repeat it (`slatemq shard remove`), or start its process again, which finishes it",
                subject=self._database.name,
            )

    def _check_drained(self, left: list[str]) -> None:
        """Raises FailedPrecondition (SHARD_NOT_DRAINED) where the shard may not be removed yet."""
        if not self.is_draining:
            left.insert(0, "it is not being drained")
        if left:
            raise FailedPrecondition(
                "SHARD_NOT_DRAINED",
                f"{self._name} cannot be removed yet: {', '.join(left)}",
                subject=self._database.name,
            )
