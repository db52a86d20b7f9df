"""Removes the rows of deleted and purged queues, behind everybody's back and a little at a time.

Deleting or purging only writes the queue's state: its rows are garbage from then on, told apart by
their orders. A crash half-way loses nothing: the state says what is still to be swept. Only what is
garbage is read: never the living, nor the many deleted rows before them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
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
"""What the creation of a queue has written under bucket 0."""


class Sweeper:
    """Sweeps what the states of queues call garbage."""

    def __init__(self, owner: ShardOwner, database: Database) -> None:
        """Begin with what a crash or restart has left; see `run`."""
        self._owner = owner
        self._database = database
        self._wake = asyncio.Event()
        self._attempts_left = {
            queue_id for queue_id, state in owner.shard.deleted.items() if state.garbage_epochs
        }
        self._to_sweep = {*self._attempts_left, *owner.shard.queues}

    def deleted(self, queue_id: str) -> None:
        """A queue was deleted."""
        self._attempts_left.add(queue_id)
        self.purged(queue_id)

    def purged(self, queue_id: str) -> None:
        """A queue was purged."""
        self._to_sweep.add(queue_id)
        self._wake.set()

    def ready_for(self, queue_id: str) -> bool:
        """Whether a queue of this name may be created: its attempts records carry no epoch."""
        return queue_id not in self._attempts_left and self._owner.shard.epoch_is_free(queue_id)

    async def run(self) -> None:
        """Sweeps until cancelled."""
        while True:
            self._wake.clear()
            while self._to_sweep:
                queue_id = self._to_sweep.pop()
                try:
                    await self._sweep(queue_id)
                except StoreUnavailable as error:
                    self._to_sweep.add(queue_id)
                    log.warning("deleted rows cannot be swept now: %s", error)
                    await asyncio.sleep(RETRY_S)
            await self._wake.wait()

    async def _sweep(self, queue_id: str) -> None:
        """Sweeps what is garbage now of the queues of this name; what becomes so is told again."""
        shard = self._owner.shard
        named = shard.queues.get(queue_id) or shard.deleted.get(queue_id)
        for epoch in named.garbage_epochs if named is not None else ():
            await self._sweep_epoch(queue_id, epoch)
        queue = shard.queues.get(queue_id)
        if queue is not None:
            await self._sweep_purged(queue)

    async def _sweep_epoch(self, queue_id: str, epoch: int) -> None:
        # What a commit has still to write would be missed: here, and below.
        await self._owner.durable()
        removed = 0
        if queue_id in self._attempts_left:
            removed += await self._sweep_attempts(queue_id)
            self._attempts_left.discard(queue_id)
        for span in _spans_of(queue_id, epoch):
            removed += await self._sweep_span(span)
        await self._owner.run(lambda _: self._epoch_swept(queue_id, epoch))
        await self._owner.durable()
        log.info("swept %d rows of the deleted queue %s", removed, queue_id)

    def _epoch_swept(self, queue_id: str, epoch: int) -> None:
        shard = self._owner.shard
        if queue_id not in shard.queues:  # one made anew has written its own
            shard.delete_rows([key_of(queue_id, 0) for key_of in _EMPTY_RECORDS])
        shard.swept(queue_id, epoch)

    async def _sweep_purged(self, queue: Queue) -> None:
        for epoch in queue.waiting.garbage_epochs:
            await self._owner.durable()
            removed = 0
            for span in _lane_spans(queue.queue_id, epoch):
                removed += await self._sweep_span(span)
            await self._owner.run(partial(self._lanes_swept, queue, epoch))
            await self._owner.durable()
            log.info("swept %d rows of the purged queue %s", removed, queue.queue_id)
        await self._sweep_finished(queue, queue.done, done_range)
        await self._sweep_finished(queue, queue.failed, failed_range)
        await self._sweep_finished(queue, queue.archived, archived_range)

    def _lanes_swept(self, queue: Queue, epoch: int, _: int) -> None:
        if self._owner.owns(queue):
            queue.waiting.note_swept(epoch)

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
            await self._owner.run(partial(self._finished_swept, queue, finished, garbage.last))
            await self._owner.durable()
            log.info("swept %d rows of the purged queue %s", removed, queue.queue_id)

    def _finished_swept(
        self, queue: Queue, finished: FinishedList[Any], last_order: int, _: int
    ) -> None:
        if self._owner.owns(queue):
            finished.note_swept(last_order)

    async def _sweep_attempts(self, queue_id: str) -> int:
        # No queue of this name can be made before they are gone: see `ready_for`.
        return await self._sweep_span(attempts_range(queue_id, 0, MAX_MESSAGE_ID))

    async def _sweep_span(self, span: KeyRange) -> int:
        """Deletes all rows of a span that are garbage for good; gives how many."""
        removed = 0
        while keys := await self._keys(span):
            await self._owner.run(partial(self._delete, keys))
            await self._owner.durable()
            removed += len(keys)
            span = KeyRange(keys[-1] + b"\x00", span.end)
        return removed

    def _delete(self, keys: Sequence[bytes], _: int) -> None:
        self._owner.shard.delete_rows(keys)

    async def _keys(self, span: KeyRange) -> list[bytes]:
        """The first keys of a span."""
        found: list[bytes] = []
        async for rows in self._database.scan(span.start, span.end, limit=SWEEP_ROWS):
            found += (key for key, _ in rows)
        return found


def _orders_of(epoch: int) -> OrderRange:
    # Not 0: the empty records of a queue's creation have that, which the living need.
    return OrderRange(order_of(epoch, 1, 0), last_order(epoch))


def _lane_spans(queue_id: str, epoch: int) -> Iterator[KeyRange]:
    """Where the available messages of an epoch lie, and the journal of the delayed ones."""
    first, last = _orders_of(epoch)
    for priority in range(MAX_PRIORITY + 1):
        for kind in (BucketKind.READY, BucketKind.TIMED):
            yield active_range(
                queue_id, bucket_number(priority, kind, first), bucket_number(priority, kind, last)
            )
    yield delayed_range(queue_id, first, last)


def _spans_of(queue_id: str, epoch: int) -> Iterator[KeyRange]:
    """Where all that a queue had in an epoch lies."""
    first, last = _orders_of(epoch)
    kind = BucketKind.IN_FLIGHT
    yield from _lane_spans(queue_id, epoch)
    yield active_range(queue_id, bucket_number(0, kind, first), bucket_number(0, kind, last))
    yield done_range(queue_id, first, last)
    yield failed_range(queue_id, first, last)
    yield archived_range(queue_id, first, last)
