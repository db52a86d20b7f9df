"""Finds entries: at the place that a handle names, soon behind it, or by a search of the queue."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from libs.storage.buckets import split_order
from libs.storage.queues import AvailableMessage, DoneMessage, FailedMessage
from services.broker.entry_handles import Handle
from services.broker.finished_pages import FinishedReader, Listed, M, Span, Spot
from services.broker.leases import Lease
from services.broker.owner import ShardOwner
from services.broker.queue_machine import Queue
from services.broker.waiting_buckets import Place
from services.broker.waiting_pages import WaitingReader
from slatemq.errors import FailedPrecondition, NotFound

SMALL_QUEUE = 20_000
"""A queue of so many entries is searched whole at once: some ten milliseconds."""

FOLLOWED_MAX = 2000
"""Done or failed messages looked at behind the time that a handle tells."""

SKEW_MS = 300_000
"""How far the clocks of ingests and brokers may be apart when times are compared."""


@dataclass(frozen=True, slots=True)
class Found:
    """An entry where it is now; one of the four is set."""

    queue: Queue
    waiting: tuple[Place, AvailableMessage] | None = None
    lease: Lease | None = None
    done: Listed[DoneMessage] | None = None
    failed: Listed[FailedMessage] | None = None


@dataclass(frozen=True, slots=True)
class Searched:
    """A step of a search: what it found, and the rows that it read."""

    found: Found | None
    rows_read: int


class EntryFinder:
    """Finds entries of one shard's queues; whoever asks has waited until all is durable."""

    def __init__(
        self,
        owner: ShardOwner,
        waiting: WaitingReader,
        done: FinishedReader[DoneMessage],
        failed: FinishedReader[FailedMessage],
    ) -> None:
        """Find with these readers."""
        self._owner = owner
        self._waiting = waiting
        self._done = done
        self._failed = failed

    async def find(self, queue: Queue, handle: Handle) -> Found:
        """The entry of a handle.

        Raises NotFound (ENTRY_UNKNOWN) when it is in no list of the queue, FailedPrecondition
        (HANDLE_STALE) when it is not where the handle says, nor soon behind it.
        """
        found = await self._at_place(queue, handle) or await self._behind(queue, handle)
        if found is not None:
            return found
        counts = queue.counts(self._owner.clock.now_ms())
        total = counts.available + counts.delayed + queue.done_count + queue.failed_count
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
        raise NotFound(
            "entry",
            f"{queue.queue_id}/{handle.message_id:x}",
            f"queue {queue.queue_id!r} has no message {handle.message_id} (any more)",
            reason="ENTRY_UNKNOWN",
        )

    async def _at_place(self, queue: Queue, handle: Handle) -> Found | None:
        message_id = handle.message_id
        if handle.lease is not None:
            lease = self._owner.shard.running(handle.lease)
            if lease is not None and (lease.queue, lease.message_id) == (queue, message_id):
                return Found(queue, lease=lease)
        if handle.waiting is not None:
            place = handle.waiting
            item = await self._owner.run(lambda _: queue.find(place, message_id))
            if item is not None:
                return Found(queue, waiting=(place, item))
        if handle.done is not None:
            done = await _in_row(self._done, queue, handle.done, message_id)
            if done is not None:
                return Found(queue, done=done)
        if handle.failed is not None:
            failed = await _in_row(self._failed, queue, handle.failed, message_id)
            if failed is not None:
                return Found(queue, failed=failed)
        return None

    async def _behind(self, queue: Queue, handle: Handle) -> Found | None:
        """Where it can have moved, at a cost that does not grow with the queue."""
        message_id = handle.message_id
        lease = queue.find_in_flight(message_id)
        if lease is not None:
            return Found(queue, lease=lease)
        since_ms = _told_ms(handle)
        if since_ms is None:
            return None
        times = (since_ms, since_ms + queue.settings.default_delay_ms)
        place = await self._waiting.locate(queue, message_id, times)
        if place is not None:
            item = await self._owner.run(lambda _: queue.find(place, message_id))
            if item is not None:
                return Found(queue, waiting=(place, item))
        failed = await _followed(self._failed, queue, since_ms, message_id)
        if failed is not None:
            return Found(queue, failed=failed)
        done = await _followed(self._done, queue, since_ms, message_id)
        return Found(queue, done=done) if done is not None else None

    async def search(self, queue: Queue, message_id: int, since_ms: int) -> AsyncIterator[Searched]:
        """Looks for all entries of a message that came to a queue at `since_ms` or later."""
        lease = queue.find_in_flight(message_id)
        if lease is not None:
            yield Searched(Found(queue, lease=lease), 0)
        async for chunk in self._waiting.chunks(queue, since_ms):
            hits = [entry for entry in chunk.entries if entry[1].message_id == message_id]
            yield Searched(Found(queue, waiting=hits[0]) if hits else None, chunk.rows_read)
        span = Span(since_ms)
        async for order, failed in self._failed.rows(queue, span, None):
            hit = _hit(order, failed, message_id)
            yield Searched(Found(queue, failed=hit) if hit else None, 1)
        async for order, done in self._done.rows(queue, span, None):
            one = _hit(order, done, message_id)
            yield Searched(Found(queue, done=one) if one else None, 1)


def _told_ms(handle: Handle) -> int | None:
    """The time that a handle's place tells; for a published one, some minutes before."""
    if handle.received_ms is not None:
        return handle.received_ms
    if handle.waiting is not None:
        return split_order(handle.waiting.order).ms
    for order in (handle.in_flight, handle.done, handle.failed):
        if order is not None:
            return split_order(order).ms
    return None


async def _in_row(
    reader: FinishedReader[M], queue: Queue, order: int, message_id: int
) -> Listed[M] | None:
    return _hit(order, await reader.row(queue, order), message_id)


async def _followed(
    reader: FinishedReader[M], queue: Queue, since_ms: int, message_id: int
) -> Listed[M] | None:
    scanned = 0
    async for order, messages in reader.rows(queue, Span(max(since_ms - SKEW_MS, 0)), None):
        hit = _hit(order, messages, message_id)
        scanned += len(messages)
        if hit is not None or scanned >= FOLLOWED_MAX:
            return hit
    return None


def _hit(order: int, messages: list[M], message_id: int) -> Listed[M] | None:
    for place, message in enumerate(messages):
        if message.message_id == message_id:  # type: ignore[attr-defined]
            return Listed(Spot(order, place), message)
    return None
