"""Finds entries: at the place that a handle names, soon behind it, or by a search of the queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple

from libs.storage.layout.buckets import order_in_time, split_order
from libs.storage.records.archived_records import ArchivedMessage
from libs.storage.records.queues import AvailableMessage, DoneMessage, FailedMessage
from services.broker.core.leases import Lease
from services.broker.core.queue import Queue
from services.broker.core.waiting.bucket import Place
from services.broker.entries.finished_pages import (
    FinishedReader,
    ListedMessage,
    ListPosition,
    ListReaders,
    TimeRange,
)
from services.broker.entries.handles import Handle
from services.broker.entries.waiting_pages import Waiting, WaitingReader
from services.broker.shard.owner import ShardOwner
from slatemq.errors import FailedPrecondition, NotFound

SMALL_QUEUE = 20_000
"""A queue of up to this many entries is searched in one step: some ten milliseconds."""

FOLLOWED_MAX = 5000
"""Done or failed messages examined behind the time that a handle names."""

SKEW_MS = 300_000
"""How far the clocks of ingests and brokers may be apart when times are compared."""

NEAR_MS = 1000
"""How far they usually are apart at most."""


Finished = DoneMessage | FailedMessage | ArchivedMessage
"""What a list has of a message."""


class EntryLocation(NamedTuple):
    """An entry where it is now: it waits, is in flight, or in one of the lists."""

    queue: Queue
    entry: Waiting | Lease | ListedMessage[Finished]


class SearchStep(NamedTuple):
    """A step of a search: what it found, and the rows that it read."""

    found: EntryLocation | None
    rows_read: int


class EntryFinder:
    """Finds entries of one shard's queues; callers wait for `durable` first."""

    def __init__(
        self,
        owner: ShardOwner,
        waiting: WaitingReader,
        lists: ListReaders,
    ) -> None:
        self._owner = owner
        self._waiting = waiting
        self._done: FinishedReader[Any] = lists.done
        self._failed: FinishedReader[Any] = lists.failed
        self._archived: FinishedReader[Any] = lists.archived

    async def find(self, queue: Queue, handle: Handle) -> EntryLocation:
        """The entry of a handle.

        Raises NotFound (ENTRY_UNKNOWN) when it is in no list of the queue, FailedPrecondition
        (HANDLE_STALE) when it is not where the handle says, nor soon behind it.
        """
        found = await self._at_place(queue, handle)
        if found is None:
            found = await self._behind(queue, handle.message_id, _since_ms(handle))
        if found is not None:
            return found
        counts = queue.waiting.counts(self._now_ms())
        total = counts.available + counts.delayed + queue.done.count + queue.failed.count
        total += queue.archived.count
        if handle.mark and total > SMALL_QUEUE:
            raise FailedPrecondition(
                "HANDLE_STALE",
                f"message {handle.message_id} has moved in queue {queue.queue_id!r} since: list "
                "or find it again",
                subject=str(handle.message_id),
            )
        async for step in self.search(queue, handle.message_id, 0):
            if step.found is not None:
                return step.found
            await asyncio.sleep(0)
        raise NotFound(
            "entry",
            f"{queue.queue_id}/{handle.message_id:x}",
            f"queue {queue.queue_id!r} has no message {handle.message_id} (any more)",
            reason="ENTRY_UNKNOWN",
        )

    async def _at_place(self, queue: Queue, handle: Handle) -> EntryLocation | None:
        message_id, order = handle.message_id, handle.number
        if handle.waiting is not None:
            return await self._waits(queue, handle.waiting, message_id)
        if handle.mark == "l":
            lease = self._owner.shard.leases.running(handle.number)
            if lease is not None and (lease.queue, lease.message_id) == (queue, message_id):
                return EntryLocation(queue, lease)
        readers = {"d": self._done, "f": self._failed, "x": self._archived}
        if handle.mark not in readers:
            return None
        hits = _hits(order, await readers[handle.mark].row(queue, order), message_id)
        return next((EntryLocation(queue, one) for one in hits), None)

    async def _waits(self, queue: Queue, place: Place, message_id: int) -> EntryLocation | None:
        def find(now_ms: int) -> AvailableMessage | None:
            item = queue.waiting.find(place, message_id)
            return None if item is None or queue.waiting.is_over(item, now_ms) else item

        item = await self._owner.run(find)
        return None if item is None else EntryLocation(queue, (place, item))

    async def _behind(
        self, queue: Queue, message_id: int, since_ms: int | None
    ) -> EntryLocation | None:
        """Where it can have moved since, at a cost that does not grow with the queue."""
        for lease in queue.leases.of_message(message_id):
            return EntryLocation(queue, lease)
        if since_ms is None:
            return None
        times = (since_ms, since_ms + NEAR_MS, since_ms + queue.settings.default_delay_ms)
        place = await self._waiting.locate(queue, message_id, times)
        if place is not None:
            waiting = await self._waits(queue, place, message_id)
            if waiting is not None:
                return waiting
        for reader in (self._failed, self._done):
            hit = await _followed(reader, queue, since_ms, message_id)
            if hit is not None:
                return EntryLocation(queue, hit)
        return None

    async def search(
        self, queue: Queue, message_id: int, since_ms: int
    ) -> AsyncIterator[SearchStep]:
        """Looks for all entries of a message that came to a queue at `since_ms` or later."""
        began_ms = self._now_ms()
        is_found = False
        async for step in self._lists(queue, message_id, since_ms):
            is_found = is_found or step.found is not None
            yield step
        # It may have gone from where the search had not been to where it had.
        await self._owner.durable()
        if not is_found and self._owner.owns(queue):
            found = await self._behind(queue, message_id, began_ms)
            if found is not None:
                yield SearchStep(found, 0)

    async def _lists(
        self, queue: Queue, message_id: int, since_ms: int
    ) -> AsyncIterator[SearchStep]:
        for lease in queue.leases.of_message(message_id):
            yield SearchStep(EntryLocation(queue, lease), 0)
        async for chunk in self._waiting.chunks(queue, since_ms):
            yield SearchStep(None, chunk.rows_read)
            now_ms = self._now_ms()
            for place, item in chunk.entries:
                if item.message_id == message_id and not queue.waiting.is_over(item, now_ms):
                    yield SearchStep(EntryLocation(queue, (place, item)), 0)
        for reader in (self._failed, self._archived, self._done):
            async for order, messages in reader.rows(queue, TimeRange(since_ms), None):
                yield SearchStep(None, 1)
                for hit in _hits(order, messages, message_id):
                    yield SearchStep(EntryLocation(queue, hit), 0)

    def _now_ms(self) -> int:
        return self._owner.clock.now_ms()


def _since_ms(handle: Handle) -> int | None:
    """About since when an entry has been where the handle's place says; None: it does not say."""
    if handle.mark == "p":
        return max(handle.number - NEAR_MS, 0)
    if handle.waiting is not None:
        return split_order(order_in_time(handle.waiting.kind, handle.waiting.order)).ms
    return split_order(handle.number).ms if handle.mark in ("i", "d", "f", "x") else None


async def _followed(
    reader: FinishedReader[Any], queue: Queue, since_ms: int, message_id: int
) -> ListedMessage[Finished] | None:
    scanned = 0
    async for order, messages in reader.rows(queue, TimeRange(since_ms), None):
        hit = next(_hits(order, messages, message_id), None)
        scanned += len(messages)
        if hit is not None or scanned >= FOLLOWED_MAX:
            return hit
    return None


def _hits(
    order: int, messages: Sequence[Finished], message_id: int
) -> Iterator[ListedMessage[Finished]]:
    for place, message in enumerate(messages):
        if message.message_id == message_id:
            yield ListedMessage(ListPosition(order, place), message)
