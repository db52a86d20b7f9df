"""What every owner of a shard does alike: opens the root, waits for its clock, reports its end."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

from libs.serving.process.exits import ExitCause, FatalError
from libs.storage.database.clocks import wait_until_past
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Database
from libs.storage.errors import Fenced, LostWalStore, OtherWalStore, StorageError
from libs.storage.layout.own_keys import CLOCK_KEY
from libs.storage.objects.probe import probe_store
from libs.storage.objects.shard_owners import Owner, ShardOwners

log = logging.getLogger(__name__)

WHY_S = 2.0
"""How long a commit has to say why its database is closed."""

MARKER_S: Final = 60.0
"""How often an owner looks whether the bucket of the WALs still has its marker: one GET."""


def opened_root(url: str, wal_url: str = "") -> Root:
    """Open the root of the settings. Raises FatalError for an invalid one."""
    try:
        return open_root(url, wal_url)
    except (ValueError, StorageError) as error:
        raise FatalError.usage(str(error)) from error


async def probe_stores(root: Root) -> None:
    """Test the root's store, and that of the WALs. Raises as `probe_store`."""
    await probe_store(root.objects)
    wal = await root.wal_store()
    if wal.record is not None:
        await probe_store(wal.objects)


async def open_owned(root: Root, name: str, kind: Kind, owner: Owner) -> Database:
    """Open a shard's database, such as `broker/0`, as its owner; see the setting `owner_name`.

    Raises Fenced where another process has replaced this one, OtherWalStore where the WALs were
    moved meanwhile, and the errors of `Root.database`.
    """
    owners = ShardOwners(root.objects, name)
    await owners.claim(owner)
    database = await root.database(name, kind)
    try:
        await owners.check(owner.name)
        await root.check_wal_store()
    except BaseException:
        await database.close()
        raise
    return database


async def wait_for_clock(database: Database, wall: Callable[[], float] = time.time) -> None:
    """Return once the wall clock is past the last commit: SlateDB refuses earlier writes."""
    tick_ms = await database.written_ms(CLOCK_KEY)
    if tick_ms is not None:
        await wait_until_past(tick_ms, _say_waiting, wall)


async def watch_wal_store(root: Root, database: Database, look_s: float = MARKER_S) -> NoReturn:
    """Raise LostWalStore or OtherWalStore once the bucket of the WALs is not this instance's.

    No commit counts from then on, and what did is put into tables when the database is closed. Of a
    folder each commit looks by itself; see `Database.lose_wal_store`.
    """
    wal = await root.wal_store()
    if wal.record is None or wal.address.folder is not None:
        await asyncio.Event().wait()  # No bucket of its own to look at: for as long as it serves.
    while True:
        await asyncio.sleep(look_s * random.uniform(0.75, 1.25))
        try:
            await wal.check_marker()
        except (LostWalStore, OtherWalStore) as error:
            database.lose_wal_store(error)
            raise
        except StorageError as error:
            log.warning("whether the store of the WALs is this instance's is not known: %s", error)


async def wait_lost(database: Database, works: Iterable[asyncio.Task[Any]]) -> ExitCause:
    """Ends when the shard is not ours any more, or a task that works on it ends.

    Raises what else the task raised: `libs.serving.server` knows what that means for the process.
    """
    works = list(works)
    closed = asyncio.create_task(database.wait_closed())
    try:
        await asyncio.wait([closed, *works], return_when=asyncio.FIRST_COMPLETED)
        reason = closed.result() if closed.done() else ""
        if reason != "fenced":
            if reason:  # a commit that fails for it says more
                await asyncio.wait(works, timeout=WHY_S, return_when=asyncio.FIRST_COMPLETED)
            for task in works:
                if task.done() and not task.cancelled():
                    task.result()
            why = f"the database is closed: {reason}" if reason else "a background task ended"
            return ExitCause.failed(why)
    except Fenced:
        pass  # a task may find out first
    finally:
        closed.cancel()
    return ExitCause.fenced("another process owns the shard now")


def _say_waiting(behind_ms: int) -> None:
    log.warning(
        "the wall clock is %d ms behind the last commit: waiting until it has caught up, since the "
        "store refuses writes from the past",
        behind_ms,
    )
