"""Writes both databases of a generated instance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from slatedb.uniffi import AdminBuilder

from benchmarks.volume.log import write_ingest
from benchmarks.volume.packs import Packs
from benchmarks.volume.plan import Layout, Volume
from benchmarks.volume.queues import write_broker
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.layout.own_keys import CLOCK_KEY
from tests.made_instances import make_instance

COMPACTED_FROM = 100_000
"""Rows that make more than a table."""

QUIET_S = 3
"""What compacts looks once a second or more often: after so long there is nothing to do."""


@dataclass(frozen=True, slots=True)
class Wrote:
    """What one database took."""

    rows: int
    seconds: float


async def write(
    root_url: str, volume: Volume, layout: Layout | None = None, **settings: int
) -> dict[str, Wrote]:
    """Writes a whole instance below a root where there is none. Raises ValueError if there is.

    `layout` has the time to write it for, if that is not now; `settings` are those of the instance
    that are not at their defaults.
    """
    volume.check()
    layout = layout or Layout(volume)
    states = layout.states()
    # Without a sync each: nothing is answered that a power failure could take back.
    root = open_root(root_url, sync=False)
    await make_instance(root, **settings)
    wrote = {}
    for kind, fill in ((Kind.INGEST, write_ingest), (Kind.BROKER, write_broker)):
        wrote[str(kind)] = await _write(root, kind, layout, states, fill)
    return wrote


async def _write(
    root: Root,
    kind: Kind,
    layout: Layout,
    states: Any,
    fill: Callable[[Layout, Any, Packs], Awaitable[None]],
) -> Wrote:
    began = time.monotonic()
    database = await root.database(f"{kind}/0", kind)
    try:
        if await database.get(CLOCK_KEY) is not None:
            raise ValueError(f"{root.url} has messages already")
        packs = Packs(database)
        await fill(layout, states, packs)
        if packs.rows >= COMPACTED_FROM:
            await _compacted(root, database.name)
    finally:
        await database.close()
    return Wrote(packs.rows, time.monotonic() - began)


async def _compacted(root: Root, name: str) -> None:
    """Returns when the tables have been compacted, as those of a backlog of hours have been."""
    admin = AdminBuilder(root._path(name), root._store).build()
    before, quiet = (-1, -1), 0
    while quiet < QUIET_S:
        manifest = await admin.read_manifest(None)
        tables = (len(manifest.l0), len(manifest.compacted))
        quiet = quiet + 1 if tables == before else 0
        before = tables
        await asyncio.sleep(1)
