"""Removes the rows of deleted queues, behind everybody's back and a little at a time.

Deleting a queue only writes its state: its rows are garbage from then on, told apart by the epoch
in their orders. A crash half-way loses nothing: the state says what is still to be swept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from libs.storage.buckets import ORDER_BITS, last_order
from libs.storage.errors import StoreUnavailable
from libs.storage.ids import MAX_MESSAGE_ID
from libs.storage.keys import (
    BucketKey,
    active_range,
    attempts_range,
    done_range,
    failed_range,
    parse_active_key,
    parse_done_key,
    parse_failed_key,
)
from libs.storage.primitives import KeyRange
from libs.storage.slate import Database
from services.broker.loading import epoch_of
from services.broker.owner import ShardOwner

log = logging.getLogger(__name__)

SWEEP_ROWS = 100
"""Rows read, and deleted in one commit at most: a row may be some megabytes."""

RETRY_S = 1.0
"""How long to wait when the store cannot be read."""

_LAST_BUCKET = (1 << 64) - 1

_LISTS: tuple[tuple[Callable[[str, int, int], KeyRange], Callable[[bytes], BucketKey]], ...] = (
    (active_range, parse_active_key),
    (done_range, parse_done_key),
    (failed_range, parse_failed_key),
)


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

    def deleted(self, queue_id: str) -> None:
        """A queue was deleted."""
        self._attempts_left.add(queue_id)
        self._wake.set()

    def ready_for(self, queue_id: str) -> bool:
        """Whether a queue of this name may be created: its attempts records carry no epoch."""
        return queue_id not in self._attempts_left and self._owner.shard.epoch_is_free(queue_id)

    async def run(self) -> None:
        """Sweeps until cancelled."""
        while True:
            self._wake.clear()
            try:
                for queue_id, epoch in self._garbage():
                    await self._sweep(queue_id, epoch)
            except StoreUnavailable as error:
                log.warning("deleted queues cannot be swept now: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            await self._wake.wait()

    def _garbage(self) -> list[tuple[str, int]]:
        shard = self._owner.shard
        found = [(queue_id, state.garbage_epochs) for queue_id, state in shard.deleted.items()]
        found += [(queue_id, queue.garbage_epochs) for queue_id, queue in shard.queues.items()]
        return [(queue_id, epoch) for queue_id, epochs in found for epoch in epochs]

    async def _sweep(self, queue_id: str, epoch: int) -> None:
        # Not before the deletion itself is durable.
        await self._owner.durable()
        removed = 0
        if queue_id in self._attempts_left:
            removed += await self._sweep_attempts(queue_id)
            self._attempts_left.discard(queue_id)
        for span_of, parse in _LISTS:
            removed += await self._sweep_list(queue_id, epoch, span_of, parse)
        await self._owner.run(lambda _: self._owner.shard.swept(queue_id, epoch))
        await self._owner.durable()
        log.info("swept %d rows of the deleted queue %s", removed, queue_id)

    async def _sweep_attempts(self, queue_id: str) -> int:
        span = attempts_range(queue_id, 0, MAX_MESSAGE_ID)
        removed = 0
        while keys := await self._keys(span):
            # No queue of this name can be made before they are gone: see `ready_for`.
            self._owner.shard.delete_rows(keys)
            await self._owner.run(lambda _: None)
            await self._owner.durable()
            removed += len(keys)
            span = KeyRange(keys[-1] + b"\x00", span.end)
        return removed

    async def _sweep_list(
        self,
        queue_id: str,
        epoch: int,
        span_of: Callable[[str, int, int], KeyRange],
        parse: Callable[[bytes], BucketKey],
    ) -> int:
        removed = 0
        first = 0
        while keys := await self._keys(span_of(queue_id, first, _LAST_BUCKET)):
            garbage: dict[bytes, int] = {}
            for key in keys:
                bucket = parse(key).bucket
                assert bucket is not None, "the RFC's form of the key is never written here"
                first = bucket + 1
                if self._is_garbage(queue_id, bucket, epoch):
                    garbage[key] = bucket
                elif bucket:
                    # Not the rest of the living, one by one: on to what may lie behind them.
                    order = last_order(epoch_of(bucket))
                    first = (bucket & ~((1 << ORDER_BITS) - 1) | order) + 1
                    break
            await self._delete(queue_id, epoch, garbage)
            removed += len(garbage)
            if first > _LAST_BUCKET:
                break
        return removed

    def _is_garbage(self, queue_id: str, bucket: int, epoch: int) -> bool:
        if bucket == 0:  # the empty record of the queue's creation; a new queue has written its own
            return queue_id not in self._owner.shard.queues
        return epoch_of(bucket) == epoch

    async def _keys(self, span: KeyRange) -> list[bytes]:
        """The first keys of a span."""
        found: list[bytes] = []
        async for rows in self._database.scan(span.start, span.end, limit=SWEEP_ROWS):
            found += (key for key, _ in rows)
        return found

    async def _delete(self, queue_id: str, epoch: int, garbage: dict[bytes, int]) -> None:
        def delete(_: int) -> None:
            # The queue may have been made anew since they were read.
            left = [key for key, b in garbage.items() if self._is_garbage(queue_id, b, epoch)]
            self._owner.shard.delete_rows(left)

        if garbage:
            await self._owner.run(delete)
            await self._owner.durable()
