"""One process's hold of its shard: it is proven, announced, and the announcement kept true.

A process that stood still may have been replaced without knowing it. What it would answer then from
its memory is held back until a commit shows that the shard is still its own.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Protocol

from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.serving.process.healthprobe import NO_TLS, probe
from libs.serving.process.store_watch import A_READ
from libs.storage.errors import Fenced, StorageError, StoreUnavailable

log = logging.getLogger(__name__)

CHECK_S: Final = 15.0
"""How often an owner looks at its own entry of the topology: one read. A process that was
replaced while it started may have overwritten it, which hides the shard for at most this long."""

STANDSTILL_S: Final = 1.0
"""A process whose event loop has not run for so long may have been replaced meanwhile. One that
runs learns of it from SlateDB within about the same time on a disk, elsewhere by its own entry of
the topology, and ends."""

LOOK_S: Final = 0.25
"""How often the loop notes that it runs."""

_BOOT_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _seconds() -> float:
    """A clock that runs while the machine sleeps, where there is one."""
    return time.clock_gettime(_BOOT_CLOCK)


class Commits(Protocol):
    """The part of `libs.storage.database.commits.GroupCommit` that is used here."""

    async def prove_ownership(self) -> None:
        """Wait for a commit that begins after this call."""

    def overdue_ms(self) -> int:
        """Age of the oldest commit in flight."""

    def reading_ms(self) -> int:
        """Age of the oldest read of the database."""


class Announcement:
    """A process's entry in the topology: written at its start, and put right while it runs.

    Of the processes that own nothing, routers and janitors, nothing shows which of several with one
    number is the right one, and any of them that lives will do. So an entry is put right only where
    no process serves at its address: a process that was replaced while it started may have written
    it, and ended.
    """

    def __init__(
        self,
        directory: TopologyDirectory,
        peer: Peer,
        check_s: float = CHECK_S,
        tls: Mapping[str, str] = NO_TLS,
    ) -> None:
        """Check the entry of `peer`, this process, every `check_s`.

        `tls` has the files with which others are probed, as of `healthprobe.probe`.
        """
        self._directory = directory
        self._tls = tls
        self._peer = peer
        self._check_s = check_s
        self._asked_at: float | None = None
        self._is_announced = False

    async def announce(self) -> None:
        """Write the entry. Raises StorageError."""
        self._is_announced = False
        await self._directory.announce(self._peer)
        self._is_announced = True

    async def change(self, peer: Peer) -> None:
        """Announce the same process with other attributes. Raises StorageError."""
        self._peer = peer
        await self.announce()

    async def keep(self) -> None:
        """Restore the entry whenever it is not this process's, until cancelled or fenced."""
        while True:
            await asyncio.sleep(self._check_s * random.uniform(0.75, 1.25))
            try:
                await self.check()
            except Fenced:
                return  # The entry is the new owner's, and so is the shard.
            except StorageError as error:
                log.warning("the own entry of the topology cannot be read: %s", error)

    async def check(self) -> None:
        """Announce the process again if the entry is wrong. Raises StorageError."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        found = await self._directory.entry(self._peer)
        self._asked_at = None
        if found == self._peer and self._is_announced:
            return
        if not await self._may_replace(found):
            return
        await Announcement.announce(self)
        there = "no address" if found is None else f"the address {found.address}"
        log.warning("the topology had %s for this process: announced again", there)

    async def withdraw(self) -> None:
        """Remove the entry, once `keep` has ended."""
        await self._directory.withdraw(self._peer)

    async def _may_replace(self, found: Peer | None) -> bool:
        """Whether to write the entry: this one is another's, or was not announced whole."""
        if found is None or found == self._peer:
            return True
        return bool(await asyncio.to_thread(probe, found.peer_address or found.address, self._tls))


class Ownership(Announcement):
    """The entry of a process that owns a shard, and must prove it.

    Attributes:
        serves_without_store: Whether the process does its callers' work now while the store does
            not answer.
    """

    def __init__(
        self, commits: Commits, directory: TopologyDirectory, peer: Peer, check_s: float = CHECK_S
    ) -> None:
        """Prove by these commits. See Announcement."""
        super().__init__(directory, peer, check_s)
        self.serves_without_store: Callable[[], bool] = lambda: False
        self._commits = commits

    async def prove(self) -> None:
        await self._commits.prove_ownership()

    async def prove_serving(self) -> None:
        """Prove ownership, or that there is work which needs none: without a store, that is all."""
        try:
            await self.prove()
        except StoreUnavailable:
            if not self.serves_without_store():
                raise

    async def withdraw(self) -> None:
        """Nothing: shards stay when their process ends, and so do their entries."""

    async def announce(self) -> None:
        """Prove ownership, then write the entry. Raises Fenced."""
        await self.prove()
        await super().announce()

    def waits_ms(self) -> Mapping[str, int]:
        """How long the oldest of each has waited for the store; 0 when none waits."""
        asked = 0 if self._asked_at is None else int((time.monotonic() - self._asked_at) * 1000)
        return {
            "a commit": self._commits.overdue_ms(),
            "a read of the topology": asked,
            A_READ: self._commits.reading_ms(),
        }

    async def _may_replace(self, found: Peer | None) -> bool:
        """Always, once ownership is proven. Raises Fenced."""
        await self.prove()
        return True


class Standstill:
    """Holds responses back after a standstill, until ownership is proven."""

    def __init__(
        self,
        prove: Callable[[], Coroutine[Any, Any, None]],
        clock: Callable[[], float] = _seconds,
    ) -> None:
        """`prove` raises Fenced; `clock` is in seconds."""
        self._prove = prove
        self._clock = clock
        self._ran_at = clock()
        self._stood_still = False
        self._proving: asyncio.Future[None] | None = None

    def proof(self) -> asyncio.Future[None] | None:
        """The proof to await before responding; None unless the process stood still."""
        self._look()
        return None if self._proving is None else asyncio.shield(self._proving)

    async def watch(self) -> None:
        """Note that the loop runs, until cancelled."""
        while True:
            self._look()
            await asyncio.sleep(LOOK_S)

    def _look(self) -> None:
        before, self._ran_at = self._ran_at, self._clock()
        if self._ran_at - before > STANDSTILL_S:
            self._stood_still = True
        if self._stood_still and self._proving is None:
            self._proving = asyncio.ensure_future(self._prove_in_turn())
            # Callers raise its error, if there are any.
            self._proving.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _prove_in_turn(self) -> None:
        """Prove ownership, and again after a standstill meanwhile: the proof may be of before."""
        while self._stood_still:
            self._stood_still = False
            await self._prove()
            self._look()
        self._proving = None  # Else it stays: what is not proven now never will be.
