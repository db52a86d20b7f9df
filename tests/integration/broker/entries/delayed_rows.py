"""What tests of delayed messages share: watches, and the rows of the journals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

from libs.storage.layout.keys import RecordType, key_head
from libs.storage.layout.own_keys import parse_delayed_key
from services.broker.entries.delayed import DelayedWatches
from slatemq.v1 import entry_pb2
from tests.integration.broker.rig import Rig

MINUTE = 60_000
YEAR = 365 * 24 * 60 * MINUTE


Updates: TypeAlias = AsyncIterator[entry_pb2.WatchDelayedResponse]


def watches(rig: Rig, **settings: Any) -> DelayedWatches:
    assert rig.service.database is not None
    teller = rig.broker.reader
    return DelayedWatches(rig.owner, rig.service.database, teller, **settings)


class Watch:
    """What one observer has seen. Heartbeats are passed over."""

    def __init__(
        self, updates: AsyncIterator[entry_pb2.WatchDelayedResponse], position: str
    ) -> None:
        self._updates = updates
        self.position = position
        self.seen: list[entry_pb2.Entry] = []

    async def until(self, count: int) -> list[int]:
        """The IDs of all seen, as soon as they are this many."""
        async with asyncio.timeout(60):
            while len(self.seen) < count:
                self._take(await anext(self._updates))
        return [one.message_id for one in self.seen]

    async def heartbeat(self) -> list[int]:
        """The IDs of all seen up to the next update that brings none."""
        async with asyncio.timeout(60):
            while self._take(await anext(self._updates)):
                pass
        return [one.message_id for one in self.seen]

    def _take(self, update: entry_pb2.WatchDelayedResponse) -> int:
        self.seen += update.entries
        self.position = update.position
        return len(update.entries)


@asynccontextmanager
async def watching(
    rig: Rig,
    position: str = "",
    queue_id: str = "q",
    *,
    view: entry_pb2.EntryView.ValueType = entry_pb2.ENTRY_VIEW_UNSPECIFIED,
    **settings: Any,
) -> AsyncIterator[Watch]:
    settings.setdefault("heartbeat_s", 0.05)
    updates = watches(rig, **settings).watch(queue_id, position, view)
    async with aclosing(updates):
        yield Watch(updates, position)


async def delay(rig: Rig, ids: Sequence[int], by_ms: int = MINUTE, queue_id: str = "q") -> None:
    visible = [rig.clock.now_ms() + by_ms] * len(ids)
    await rig.assign(ids, queue_id, visible_at_ms=visible)


async def rows(rig: Rig) -> list[tuple[str, int | None]]:
    """Queue and order of every row of every journal."""
    assert rig.service.database is not None
    head = key_head(RecordType.DELAYED)
    found = []
    async for some in rig.service.database.scan(head, head + b"\xff", durable=True):
        found += [tuple(parse_delayed_key(key)) for key, _ in some]
    return found  # type: ignore[return-value]
