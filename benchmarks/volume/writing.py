"""Writes both databases of a generated instance."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.volume.log import write_ingest
from benchmarks.volume.packs import Packs
from benchmarks.volume.plan import Layout, Volume
from benchmarks.volume.queues import write_broker
from libs.storage.roots import Root, open_root
from libs.storage.settings import Kind


@dataclass(frozen=True, slots=True)
class Wrote:
    """What one database took."""

    rows: int
    seconds: float


async def write(root_url: str, volume: Volume, layout: Layout | None = None) -> dict[str, Wrote]:
    """Writes a whole instance below a root where there is none. Raises ValueError if there is.

    `layout` has the time to write it for, if that is not now.
    """
    volume.check()
    layout = layout or Layout(volume)
    states = layout.states()
    # Without a sync each: nothing is answered that a power failure could take back.
    root = open_root(root_url, sync=False)
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
        async for _ in database.scan(b"", b"\xff", limit=1):
            raise ValueError(f"{root.url} has messages already")
        packs = Packs(database)
        await fill(layout, states, packs)
    finally:
        await database.close()
    return Wrote(packs.rows, time.monotonic() - began)
