"""Removes the rows of the delayed journals whose messages can all be claimed.

A row is looked at when it is 1, 2, 4, 8 … minutes old, until it is removed: the rows of such an age
lie side by side, since their orders are times. So a row whose messages wait for a hundred years is
read some 26 times, holds nothing up, and no row outlives its last message by more than the time
that this one waited. Nothing is kept in memory for it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from libs.storage.database.slate import Database, Row
from libs.storage.errors import StoreUnavailable
from libs.storage.layout.buckets import last_order, order_of
from libs.storage.layout.own_keys import delayed_range, parse_delayed_key
from libs.storage.records.delayed_records import decode_delayed
from services.broker.core.queue import Queue
from services.broker.entries.delayed_watch import is_delayed
from services.broker.shard.owner import ShardOwner

log = logging.getLogger(__name__)

MINUTE_MS: Final = 60_000

LOOK_S: Final = 1.0
"""How often to look whether a minute is over."""

ROWS: Final = 100
"""Rows in one read."""

QUEUES: Final = 100
"""Queues looked at in one go: most of them have no rows."""

REMOVED: Final = 1000
"""Rows removed with one commit, of all queues together: a commit for each would cost too much."""


class DelayedCleaner:
    """Cleans the journals of all queues of a shard."""

    def __init__(self, owner: ShardOwner, database: Database, last_ms: int) -> None:
        """Go on after the time of the last commit before the start."""
        self._owner = owner
        self._database = database
        self._minute = last_ms // MINUTE_MS
        self._over: list[tuple[Queue, int, bytes]] = []

    async def run(self) -> None:
        """Cleans once a minute until cancelled."""
        while True:
            try:
                await self.clean()
            except StoreUnavailable as error:
                log.warning("the journals of delayed messages cannot be cleaned now: %s", error)
            await asyncio.sleep(LOOK_S)

    async def clean(self) -> None:
        """Looks at the rows whose age was reached since the last call."""
        minute = self._owner.clock.now_ms() // MINUTE_MS
        if minute <= self._minute:
            return
        # The greatest power of two of which a multiple has passed; rows of every lower one, too.
        level = (minute ^ self._minute).bit_length() - 1
        begin_ms = max((minute >> level << level) - (2 << level), 0) * MINUTE_MS
        for number, queue in enumerate(list(self._owner.shard.queues.values())):
            await self._clean_queue(queue, begin_ms, (minute - 1) * MINUTE_MS)
            if number % QUEUES == 0:
                await asyncio.sleep(0)
        await self._remove()
        self._minute = minute

    async def _clean_queue(self, queue: Queue, begin_ms: int, end_ms: int) -> None:
        """Looks at the rows of a queue that were written from one time up to another."""
        if not queue.waiting.delayed.last_order:
            await self._find_last(queue)
        epoch = queue.waiting.epoch
        first, last = order_of(epoch, begin_ms, 0), order_of(epoch, end_ms, 0) - 1
        while first <= min(last, queue.waiting.delayed.last_in(epoch)):
            rows = await self._rows(queue, first, last, descending=False)
            for key, value in rows:
                first = parse_delayed_key(key).bucket + 1
                if self._is_over(value):
                    self._over.append((queue, epoch, key))
                await asyncio.sleep(0)  # a row may have a thousand messages
            if len(self._over) >= REMOVED:
                await self._remove()
            if len(rows) < ROWS:
                return

    async def _find_last(self, queue: Queue) -> None:
        """After a start: where the journal ends, since most queues have none."""
        epoch = queue.waiting.epoch
        first, last = order_of(epoch, 0, 0), last_order(epoch)
        rows = await self._rows(queue, first, last, descending=True)
        if rows:
            queue.waiting.delayed.found(parse_delayed_key(rows[0][0]).bucket)
        else:
            queue.waiting.delayed.begin(epoch)

    async def _rows(self, queue: Queue, first: int, last: int, *, descending: bool) -> list[Row]:
        span = delayed_range(queue.queue_id, first, last)
        limit = 1 if descending else ROWS
        found: list[Row] = []
        async for rows in self._database.scan(*span, limit=limit, descending=descending):
            found += rows
        return found

    def _is_over(self, value: bytes) -> bool:
        now_ms = self._owner.clock.now_ms()
        return not any(is_delayed(delayed, now_ms) for delayed in decode_delayed(value))

    async def _remove(self) -> None:
        over, self._over = self._over, []

        def remove(_: int) -> None:
            # What was deleted or purged meanwhile is the sweeper's.
            self._owner.shard.delete_rows(
                [
                    key
                    for queue, epoch, key in over
                    if self._owner.owns(queue) and queue.waiting.epoch == epoch
                ]
            )

        if over:
            await self._owner.run(remove)
            await self._owner.durable()
