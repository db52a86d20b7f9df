"""Removes the rows of deleted and purged queues in the background, a little at a time.

Deleting or purging only writes the queue's state: from then on its rows are garbage, recognized by
their orders. A crash half-way loses nothing: the state says what is still to be swept. Only garbage
is read: neither live rows nor the many deleted rows before them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from libs.storage.database.slate import Database
from libs.storage.errors import StoreUnavailable
from libs.storage.layout.buckets import (
    MAX_PRIORITY,
    BucketKind,
    bucket_number,
    last_order,
    order_of,
)
from libs.storage.layout.ids import MAX_MESSAGE_ID
from libs.storage.layout.keys import (
    active_key,
    active_range,
    attempts_range,
    done_key,
    done_range,
    failed_key,
    failed_range,
)
from libs.storage.layout.own_keys import archived_range, delayed_range
from libs.storage.layout.primitives import KeyRange
from libs.storage.records.states import OrderRange
from services.broker.core.lists.finished_lists import FinishedList
from services.broker.core.queue import Queue
from services.broker.shard.owner import ShardOwner

log = logging.getLogger(__name__)

SWEEP_ROWS = 100
"""Rows read, and deleted in one commit at most: a row may be some megabytes."""

RETRY_S = 1.0
"""How long to wait when the store cannot be read."""

_EMPTY_RECORDS: tuple[Callable[[str, int], bytes], ...] = (active_key, done_key, failed_key)
"""The records that the creation of a queue writes under bucket 0."""


class Sweeper:
    """Sweeps what the states of queues name as garbage."""

    def __init__(self, owner: ShardOwner, database: Database) -> None:
        """Start with what a crash or restart has left; see `run`."""
        self._owner = owner
        self._database = database
        self._wake = asyncio.Event()
        deleted = [name for name, state in owner.shard.deleted.items() if state.garbage_epochs]
        self._attempts_left = set(deleted)
        self._to_sweep = OrderedDict.fromkeys((*deleted, *owner.shard.queues))

    def deleted(self, queue_id: str) -> None:
        self._attempts_left.add(queue_id)
        self.purged(queue_id)

    def purged(self, queue_id: str) -> None:
        self._to_sweep[queue_id] = None
        self._wake.set()

    def ready_for(self, queue_id: str) -> bool:
        """Whether a queue of this name may be created: its attempts records have no epoch."""
        shard = self._owner.shard
        is_left = queue_id in self._attempts_left or queue_id in shard.moves.departures
        return not is_left and shard.epoch_is_free(queue_id)

    def is_done_with(self, queue_id: str) -> bool:
        """Whether no row is left of former queues of this name; there must be none now."""
        shard = self._owner.shard
        state = shard.deleted.get(queue_id)
        is_left = queue_id in self._attempts_left or queue_id in shard.moves.departures
        return not is_left and (state is None or not state.garbage_epochs)

    async def run(self) -> None:
        """Sweeps until cancelled."""
        while True:
            self._wake.clear()
            while self._to_sweep:
                queue_id, _ = self._to_sweep.popitem(last=False)
                try:
                    await self._sweep(queue_id)
                except StoreUnavailable as error:
                    self._to_sweep[queue_id] = None
                    log.warning("deleted rows cannot be swept now: %s", error)
                    await asyncio.sleep(RETRY_S)
            await self._wake.wait()

    async def _sweep(self, queue_id: str) -> None:
        """Sweeps what is garbage now in queues of this name; later garbage is reported again."""
        shard = self._owner.shard
        named = shard.queues.get(queue_id) or shard.deleted.get(queue_id)
        for epoch in named.garbage_epochs if named is not None else ():
            await self._sweep_epoch(queue_id, epoch)
        queue = shard.queues.get(queue_id)
        if queue is not None:
            await self._sweep_purged(queue)

    async def _sweep_epoch(self, queue_id: str, epoch: int) -> None:
        # Rows that a commit has not written yet would be missed: here, and below.
        await self._owner.durable()
        removed = 0
        if queue_id in self._attempts_left:
            # No queue of this name can be created before they are gone: see `ready_for`.
            removed += await self._sweep_span(attempts_range(queue_id, 0, MAX_MESSAGE_ID))
            self._attempts_left.discard(queue_id)
        for span in _spans_of(queue_id, epoch):
            removed += await self._sweep_span(span)
        await self._owner.run(lambda _: self._epoch_swept(queue_id, epoch))
        await self._owner.durable()
        log.info("swept %d rows of the deleted queue %s", removed, queue_id)

    def _epoch_swept(self, queue_id: str, epoch: int) -> None:
        shard = self._owner.shard
        if queue_id not in shard.queues:  # a new one has written its own
            shard.write_rows((key_of(queue_id, 0), None) for key_of in _EMPTY_RECORDS)
        shard.swept(queue_id, epoch)

    async def _sweep_purged(self, queue: Queue) -> None:
        for epoch in queue.waiting.garbage_epochs:
            await self._owner.durable()
            removed = 0
            for span in _lane_spans(queue.queue_id, epoch):
                removed += await self._sweep_span(span)
            await self._note(queue, partial(queue.waiting.note_swept, epoch))
            log.info("swept %d rows of the purged queue %s", removed, queue.queue_id)
        await self._sweep_finished(queue, queue.done, done_range)
        await self._sweep_finished(queue, queue.failed, failed_range)
        await self._sweep_finished(queue, queue.archived, archived_range)

    async def _note(self, queue: Queue, swept: Callable[[], None]) -> None:
        await self._owner.run(lambda _: swept() if self._owner.owns(queue) else None)
        await self._owner.durable()

    async def _sweep_finished(
        self,
        queue: Queue,
        finished: FinishedList[Any],
        span_of: Callable[[str, int, int], KeyRange],
    ) -> None:
        while finished.garbage.last and self._owner.owns(queue):
            garbage = finished.garbage
            await self._owner.durable()
            removed = await self._sweep_span(span_of(queue.queue_id, *garbage))
            await self._note(queue, partial(finished.note_swept, garbage.last))
            log.info("swept %d rows of the purged queue %s", removed, queue.queue_id)

    async def _sweep_span(self, span: KeyRange) -> int:
        """Deletes all rows of a span; returns how many."""
        removed = 0
        while keys := await self._keys(span):
            self._owner.write_rows((key, None) for key in keys)
            await self._owner.durable()
            removed += len(keys)
            span = KeyRange(keys[-1] + b"\x00", span.end)
        return removed

    async def _keys(self, span: KeyRange) -> list[bytes]:
        found: list[bytes] = []
        async for rows in self._database.scan(span.start, span.end, limit=SWEEP_ROWS):
            found += (key for key, _ in rows)
        return found


def _orders_of(epoch: int) -> OrderRange:
    # Not 0: a live queue needs the empty records of its creation, which have order 0.
    return OrderRange(order_of(epoch, 1, 0), last_order(epoch))


def _lane_spans(queue_id: str, epoch: int) -> Iterator[KeyRange]:
    """The keys of an epoch's available messages and of its delayed journal."""
    first, last = _orders_of(epoch)
    for priority in range(MAX_PRIORITY + 1):
        for kind in (BucketKind.READY, BucketKind.TIMED):
            yield active_range(
                queue_id, bucket_number(priority, kind, first), bucket_number(priority, kind, last)
            )
    yield delayed_range(queue_id, first, last)


def _spans_of(queue_id: str, epoch: int) -> Iterator[KeyRange]:
    """The keys of everything that a queue had in an epoch."""
    first, last = _orders_of(epoch)
    kind = BucketKind.IN_FLIGHT
    yield from _lane_spans(queue_id, epoch)
    yield active_range(queue_id, bucket_number(0, kind, first), bucket_number(0, kind, last))
    yield done_range(queue_id, first, last)
    yield failed_range(queue_id, first, last)
    yield archived_range(queue_id, first, last)
