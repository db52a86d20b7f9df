"""Snapshots of all shards, for a backup: from their owners, or of an instance that is stopped.

The brokers come first, then the ingests. So whatever a broker's snapshot names, by a message or by
a position in a log, the ingests' have; what was published or pushed in between is more than the
brokers know, as if the routers had not come to it yet.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

from libs.serving.process.shards import open_owned, wait_for_clock
from libs.storage.database.roots import Root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Database
from libs.storage.objects.shard_owners import Owner
from services.janitor.snapshots import (
    channels_of,
    databases_of,
    refuse_unknown_shards,
    snapshots_of_all,
)
from slatemq.errors import FailedPrecondition, Unavailable

ORDER: Final = ("broker", "ingest")

KINDS: Final = {"broker": Kind.BROKER, "ingest": Kind.INGEST}


def kind_of(database: str) -> Kind:
    """Of a database's name, such as `ingest/0`."""
    return KINDS[database.partition("/")[0]]


OWNED_LIFETIME_MS: Final = 86_400_000
"""Of a snapshot that its taker does not renew; it is released at the end."""


class ShardSnapshot(NamedTuple):
    database: str
    snapshot_id: str
    taken_at_ms: int


@dataclass(frozen=True)
class ShardSnapshots:
    """Snapshots that are kept alive; `lost` resolves to what happened once one of them is gone."""

    all: tuple[ShardSnapshot, ...]
    lost: asyncio.Future[str]

    def check(self) -> None:
        """Raise Unavailable once one is gone."""
        if self.lost.done():
            raise Unavailable(self.lost.result(), reason="SNAPSHOT_LOST")


@asynccontextmanager
async def opened_restored(root: Root, name: str) -> AsyncIterator[Database]:
    """A database that begins without its WAL; at the end all of its rows are in tables."""
    database = await root.database(name, kind_of(name), is_restored=True)
    try:
        await wait_for_clock(database)
        yield database
        await database.flush_memtable()
    finally:
        await database.close()


@asynccontextmanager
async def snapshots_of_owners(root: Root) -> AsyncIterator[ShardSnapshots]:
    """Snapshots taken by the processes that own the shards, while they serve.

    Raises Unavailable when a shard is down, or is not in the topology.
    """
    async with (
        channels_of(root) as (directory, channels),
        snapshots_of_all(directory, channels, services=ORDER) as taken,
    ):
        found = tuple(
            ShardSnapshot(one.name.database, one.name.snapshot_id, one.taken_at_ms)
            for one in taken.all
        )
        await refuse_unknown_shards(root.objects, [one.database for one in found])
        yield ShardSnapshots(found, taken.lost)


@asynccontextmanager
async def snapshots_of_stopped(root: Root, now_ms: int) -> AsyncIterator[ShardSnapshots]:
    """Snapshots of an instance whose processes are stopped; owns its shards meanwhile.

    A process that runs on is fenced: it answers nothing that the snapshots lack. Raises
    FailedPrecondition below an empty root, Fenced, and the errors of `Root.database`: DamagedStore
    where a shard has lost its database, which a backup must not leave out.
    """
    owner = Owner(f"backup-{secrets.token_hex(8)}")
    names = await databases_of(root.objects)
    if not names:
        raise FailedPrecondition("NO_INSTANCE", f"there is no database below {root.url}")
    async with AsyncExitStack() as stack:
        owned: list[Database] = []
        for name in names:
            database = await open_owned(root, name, kind_of(name), owner)
            stack.push_async_callback(database.close)
            owned.append(database)
        # Each owner is gone now: no commit follows that another shard's snapshot would lack.
        found = []
        for database in owned:
            await wait_for_clock(database)
            snapshots = root.snapshots(database)
            snapshot_id = await snapshots.take(OWNED_LIFETIME_MS)
            stack.push_async_callback(snapshots.release, snapshot_id)
            found.append(ShardSnapshot(database.name, snapshot_id, now_ms))
        yield ShardSnapshots(tuple(found), asyncio.get_running_loop().create_future())
