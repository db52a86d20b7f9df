"""Finds entries: at the place that a handle names, soon behind it, or by a search of the queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

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
    M,
    TimeRange,
)
from services.broker.entries.handles import Handle
from services.broker.entries.waiting_pages import WaitingReader
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


@dataclass(frozen=True, slots=True)
class EntryLocation:
    """An entry where it is now; one of the five is set."""

    queue: Queue
    waiting: tuple[Place, AvailableMessage] | None = None
    lease: Lease | None = None
    done: ListedMessage[DoneMessage] | None = None
    failed: ListedMessage[FailedMessage] | None = None
    archived: ListedMessage[ArchivedMessage] | None = None


@dataclass(frozen=True, slots=True)
class SearchStep:
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
        self._done = lists.done
        self._failed = lists.failed
        self._archived = lists.archived

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
        if handle.has_place and total > SMALL_QUEUE:
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
        message_id = handle.message_id
        if handle.lease is not None:
            lease = self._owner.shard.leases.running(handle.lease)
            if lease is not None and (lease.queue, lease.message_id) == (queue, message_id):
                return EntryLocation(queue, lease=lease)
        if handle.waiting is not None:
            waiting = await self._waits(queue, handle.waiting, message_id)
            if waiting is not None:
                return waiting
        if handle.done is not None:
            done = await _in_row(self._done, queue, handle.done, message_id)
            if done is not None:
                return EntryLocation(queue, done=done)
        if handle.failed is not None:
            failed = await _in_row(self._failed, queue, handle.failed, message_id)
            if failed is not None:
                return EntryLocation(queue, failed=failed)
        if handle.archived is not None:
            archived = await _in_row(self._archived, queue, handle.archived, message_id)
            if archived is not None:
                return EntryLocation(queue, archived=archived)
        return None

    async def _waits(self, queue: Queue, place: Place, message_id: int) -> EntryLocation | None:
        def find(now_ms: int) -> AvailableMessage | None:
            item = queue.waiting.find(place, message_id)
            return None if item is None or queue.waiting.is_over(item, now_ms) else item

        item = await self._owner.run(find)
        return None if item is None else EntryLocation(queue, waiting=(place, item))

    async def _behind(
        self, queue: Queue, message_id: int, since_ms: int | None
    ) -> EntryLocation | None:
        """Where it can have moved since, at a cost that does not grow with the queue."""
        for lease in queue.leases.of_message(message_id):
            return EntryLocation(queue, lease=lease)
        if since_ms is None:
            return None
        times = (since_ms, since_ms + NEAR_MS, since_ms + queue.settings.default_delay_ms)
        place = await self._waiting.locate(queue, message_id, times)
        if place is not None:
            waiting = await self._waits(queue, place, message_id)
            if waiting is not None:
                return waiting
        failed = await _followed(self._failed, queue, since_ms, message_id)
        if failed is not None:
            return EntryLocation(queue, failed=failed)
        done = await _followed(self._done, queue, since_ms, message_id)
        return EntryLocation(queue, done=done) if done is not None else None

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
            yield SearchStep(EntryLocation(queue, lease=lease), 0)
        async for chunk in self._waiting.chunks(queue, since_ms):
            yield SearchStep(None, chunk.rows_read)
            now_ms = self._now_ms()
            for place, item in chunk.entries:
                if item.message_id == message_id and not queue.waiting.is_over(item, now_ms):
                    yield SearchStep(EntryLocation(queue, waiting=(place, item)), 0)
        span = TimeRange(since_ms)
        async for order, failed in self._failed.rows(queue, span, None):
            yield SearchStep(None, 1)
            for dead_letter in _hits(order, failed, message_id):
                yield SearchStep(EntryLocation(queue, failed=dead_letter), 0)
        async for order, archived in self._archived.rows(queue, span, None):
            yield SearchStep(None, 1)
            for each in _hits(order, archived, message_id):
                yield SearchStep(EntryLocation(queue, archived=each), 0)
        async for order, done in self._done.rows(queue, span, None):
            yield SearchStep(None, 1)
            for one in _hits(order, done, message_id):
                yield SearchStep(EntryLocation(queue, done=one), 0)

    def _now_ms(self) -> int:
        return self._owner.clock.now_ms()


def _since_ms(handle: Handle) -> int | None:
    """About since when an entry has been where the handle's place says; None: it does not say."""
    if handle.received_ms is not None:
        return max(handle.received_ms - NEAR_MS, 0)
    if handle.waiting is not None:
        return split_order(order_in_time(handle.waiting.kind, handle.waiting.order)).ms
    for order in (handle.in_flight, handle.done, handle.failed, handle.archived):
        if order is not None:
            return split_order(order).ms
    return None


async def _in_row(
    reader: FinishedReader[M], queue: Queue, order: int, message_id: int
) -> ListedMessage[M] | None:
    return next(_hits(order, await reader.row(queue, order), message_id), None)


async def _followed(
    reader: FinishedReader[M], queue: Queue, since_ms: int, message_id: int
) -> ListedMessage[M] | None:
    scanned = 0
    async for order, messages in reader.rows(queue, TimeRange(since_ms), None):
        hit = next(_hits(order, messages, message_id), None)
        scanned += len(messages)
        if hit is not None or scanned >= FOLLOWED_MAX:
            return hit
    return None


def _hits(order: int, messages: list[M], message_id: int) -> Iterator[ListedMessage[M]]:
    for place, message in enumerate(messages):
        if message.message_id == message_id:  # type: ignore[attr-defined]
            yield ListedMessage(ListPosition(order, place), message)
