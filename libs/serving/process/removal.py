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
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from opentelemetry.metrics import Meter, Observation

from libs.serving.peers.topology import TopologyDirectory
from libs.serving.process.exits import ExitCause, FatalError
from libs.storage.database.clocks import Clock
from libs.storage.database.commits import GroupCommit
from libs.storage.database.roots import Root
from libs.storage.database.slate import Database
from libs.storage.layout.own_keys import DRAINING_KEY, LEAVING_KEY, events_range
from libs.storage.layout.primitives import RowChange
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.objects.topology_entries import entry_path_of
from libs.storage.records.states import encode_draining, encode_leaving
from slatemq.errors import FailedPrecondition, Unavailable

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


class DrainableShard(Protocol):
    """What is drained: `is_leaving` is set while it must store nothing more of others."""

    is_draining: bool
    is_leaving: bool


def measure_draining(meter: Meter, drain: ShardDrain) -> None:
    """Registers whether the shard drains: its process may end for ever, and its standby before."""
    meter.create_observable_gauge(
        "slatemq.shard.draining",
        callbacks=[lambda _: [Observation(int(drain.is_draining))]],
        description="1 while the shard takes nothing new, since it is to be removed, else 0",
    )


class ShardCounts(NamedTuple):
    """How much a broker shard has to do."""

    queues_count: int
    messages_count: int
    load: float


class ShardDrain(ABC):
    """The drain of a shard that this process has, and its removal.

    Attributes:
        name: The shard's database, such as `broker/0`: its service, and its number.
        removed: Set once the shard is removed: its process ends.
    """

    def __init__(
        self,
        database: Database,
        clock: Clock,
        commits: GroupCommit,
        shard: DrainableShard,
        removed_shards: RemovedShards,
    ) -> None:
        self.name = database.name
        self.service, _, number = self.name.partition("/")
        self.number = int(number)
        self.removed = asyncio.Event()
        self._title = f"{self.service} shard {number}"
        self._database = database
        self._clock = clock
        self._commits = commits
        self._shard = shard
        self._removed_shards = removed_shards
        self._is_certain = shard.is_leaving
        self._deciding = asyncio.Lock()

    @property
    def is_draining(self) -> bool:
        """Whether it takes nothing new."""
        return self._shard.is_draining

    @abstractmethod
    async def _contents(self) -> list[str]:
        """What has to go before the shard can be removed, events aside."""

    @abstractmethod
    async def _write(self, change: Callable[[int], Sequence[RowChange]]) -> None:
        """Make a change at a time in ms; the next commit writes the rows that it returns."""

    async def _others_have(self) -> Sequence[str]:
        """What others have that must come to the shard before it can be removed."""
        return ()

    def counts(self) -> ShardCounts | None:
        """How much it has to do; None = not counted."""
        return None

    async def durable(self) -> None:
        """Wait until what the shard is now is durable."""
        await self._commits.durable()

    async def remaining(self) -> list[str]:
        """What has to go before the shard can be removed, for people."""
        await self.durable()
        left = await self._contents()
        events = events_range()
        if [rows async for rows in self._database.scan(events.start, events.end, limit=1)]:
            left.append("events that are not published yet")
        return left

    async def shown(self) -> Sequence[str]:
        """What is shown of `remaining` while the shard is not being removed."""
        return await self.remaining()

    async def begin(self) -> None:
        """Take nothing new from now on, durably. Raises as `cancel`."""
        await self._set(draining=True)

    async def cancel(self) -> None:
        """Take what is new again, durably.

        Raises FailedPrecondition (SHARD_LEAVING), Unavailable while the shard may be removed, and
        the errors of the store.
        """
        await self._set(draining=False)

    async def _set(self, *, draining: bool) -> None:
        def change(now_ms: int) -> Sequence[RowChange]:
            self._check_may_stay()
            if draining == self.is_draining:
                return ()
            self._shard.is_draining = draining
            return [(DRAINING_KEY, encode_draining(now_ms) if draining else None)]

        await self._write(change)
        await self.durable()

    async def remove(self) -> None:
        """Remove the shard.

        Raises FailedPrecondition (SHARD_NOT_DRAINED), Unavailable, the errors of the store. After
        StoreUnavailable the shard takes nothing more, and the call is to be repeated.
        """
        async with self._deciding:
            if not self._is_certain:
                await self._decide()
        await self.finish()

    async def finish(self) -> None:
        """Finish a removal that is certain, be it since a former process.

        Does nothing where none is. Raises the errors of the store.
        """
        if self._is_certain:
            await self.durable()
            await self._removed_shards.add(self.name, self._clock.now_ms())
            self.removed.set()

    async def _decide(self) -> None:
        """Make it certain that the shard is removed, with the next commit."""

        def leave(now_ms: int) -> Sequence[RowChange]:
            self._is_certain = True
            return [(LEAVING_KEY, encode_leaving(now_ms))]

        self._shard.is_leaving = True
        try:
            # What was answered before is durable then.
            await self._commits.prove_ownership()
            self._check_drained([*await self.remaining(), *await self._others_have()])
            await self._write(leave)
        finally:
            self._shard.is_leaving = self._is_certain

    def _check_may_stay(self) -> None:
        """Raises FailedPrecondition (SHARD_LEAVING) for a certain removal, else Unavailable."""
        if self._is_certain:
            raise FailedPrecondition(
                "SHARD_LEAVING",
                f"the removal of {self._title} has begun, and cannot be cancelled any more: "
                "repeat it (`slatemq shard remove`), or start its process again, which finishes it",
                subject=self.name,
            )
        if self._shard.is_leaving:
            raise Unavailable(f"{self._title} is being removed", reason="SHARD_LEAVING")

    def _check_drained(self, left: list[str]) -> None:
        """Raises FailedPrecondition (SHARD_NOT_DRAINED) where the shard may not be removed yet."""
        reasons = []
        if not self.is_draining:
            reasons.append("it is not being drained (`slatemq shard drain`)")
        if left:
            reasons.append(f"it has {', '.join(left)}")
        if reasons:
            raise FailedPrecondition(
                "SHARD_NOT_DRAINED",
                f"{self._title} cannot be removed yet: {', and '.join(reasons)}",
                subject=self.name,
            )
