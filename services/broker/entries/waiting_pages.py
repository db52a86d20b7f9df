"""Reads what waits in a queue without touching it: for lists, and to find a message by its ID.

The database is read in pieces from a known order on, and put together with what memory knows
better: what is not durable yet, what was taken or removed since. Call it when what you want to see
is durable. What changes while it runs may be missed or come twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from libs.storage.layout.buckets import (
    MAX_ORDER_MS,
    BucketKind,
    lane_order,
    last_lane_order,
    last_order,
    order_in_time,
    order_of,
)
from libs.storage.records.queues import AvailableMessage
from services.broker.core.queue import Queue
from services.broker.core.waiting.bucket import Place
from services.broker.core.waiting.lane import Lane
from services.broker.core.waiting.scan import StoredBucket
from services.broker.shard.loading import Store, read_buckets

SCANNED_MAX = 20_000
"""Messages looked at for one page at most: what is past its retention fills no page."""

PIECE_BUCKETS = 500
"""Buckets listed in one step."""

LOCATED_MAX = 4000
"""Messages looked at from each time on, in each lane, to find one."""

LOCATED_TOTAL = 100_000
"""Messages looked at in all lanes together to find one."""

Waiting = tuple[Place, AvailableMessage]
"""A message and where it is."""


class QueuePosition(NamedTuple):
    """Behind which entry to go on: the bucket, in the order of delivery, and the message."""

    priority: int
    order: int
    kind: BucketKind
    message_id: int


class Page(NamedTuple):
    """Entries in the order of delivery, and where the next ones are; None: there are no more."""

    entries: list[Waiting]
    next: QueuePosition | None


class BucketRun(NamedTuple):
    """Some buckets of a lane: all up to the order `through`."""

    buckets: list[StoredBucket]
    through: int
    rows_read: int


class EntryBatch(NamedTuple):
    """Some entries of a queue."""

    entries: list[Waiting]
    rows_read: int


class WaitingReader:
    def __init__(self, database: Store) -> None:
        self._database = database

    async def page(
        self, queue: Queue, *, delayed: bool, after: QueuePosition | None, limit: int, now_ms: int
    ) -> Page:
        """Some entries that can be claimed at `now_ms`, or (`delayed`) only later.

        A page may be short of `limit` though there are more.
        """
        entries: list[Waiting] = []
        scanned = 0
        async for place, items in self._in_order(queue, delayed, after, now_ms):
            for item in _behind(place, items, after):
                scanned += 1
                if not 0 < item.retention_deadline_ms <= now_ms:
                    entries.append((place, item))
                if len(entries) >= limit or scanned >= SCANNED_MAX:
                    at = QueuePosition(place.priority, place.order, place.kind, item.message_id)
                    return Page(entries, at)
        return Page(entries, None)

    async def _in_order(
        self, queue: Queue, delayed: bool, after: QueuePosition | None, now_ms: int
    ) -> AsyncIterator[tuple[Place, list[AvailableMessage]]]:
        """Buckets from that of `after` on, in the order of delivery."""
        due = queue.waiting.due_until(now_ms)
        last, last_timed = _last(queue, BucketKind.READY), _last(queue, BucketKind.TIMED)
        for priority in sorted({lane.priority for lane in queue.waiting.lanes()}):
            if after is not None and priority < after.priority:
                continue
            ready, begin = _begins(queue, after if after and after.priority == priority else None)
            timed = (max(begin, due + 1), last_timed) if delayed else (begin, due)
            runs = [self._run(queue, Place(priority, BucketKind.TIMED, timed[0]), timed[1])]
            if not delayed:
                runs.insert(0, self._run(queue, Place(priority, BucketKind.READY, ready), last))
            async for found in _merged(runs):
                yield found

    async def _run(
        self, queue: Queue, begin: Place, last: int
    ) -> AsyncIterator[tuple[Place, list[AvailableMessage]]]:
        first = begin.order
        while first <= last:
            piece = await self._piece(queue, begin.priority, begin.kind, first)
            if piece is None:
                return
            for order, items in piece.buckets:
                if order > last:
                    return
                yield begin._replace(order=order), items
            first = piece.through + 1

    async def _piece(
        self, queue: Queue, priority: int, kind: BucketKind, first: int
    ) -> BucketRun | None:
        """Buckets from an order on; None when there is nothing more."""
        last = _last(queue, kind)
        while True:
            lane = queue.waiting.lane(priority, kind)
            if lane is None or not _first(queue, kind) <= first <= last:
                return None
            if first <= lane.known_until:
                return _from_memory(lane, first, last)
            lane.begin_read(first, last)
            try:
                rows, through = await read_buckets(
                    self._database, queue.queue_id, lane, (first, last), in_parts=True
                )
            finally:
                lane.end_read(first, last)
            if queue.waiting.lane(priority, kind) is lane:
                return BucketRun(lane.merged(rows, first, through), through, len(rows))

    async def chunks(self, queue: Queue, first_ms: int) -> AsyncIterator[EntryBatch]:
        """All entries of a queue that came or fall due at `first_ms` or later, lane by lane.

        Ends early when the queue is purged meanwhile.
        """
        epoch = queue.waiting.epoch
        begin = order_of(epoch, min(first_ms, MAX_ORDER_MS), 0)
        for lane in queue.waiting.lanes():
            first = lane_order(lane.kind, begin)
            while first <= _last(queue, lane.kind) and queue.waiting.epoch == epoch:
                piece = await self._piece(queue, lane.priority, lane.kind, first)
                if piece is None:
                    break
                yield EntryBatch(list(_entries(lane, piece)), piece.rows_read)
                first = piece.through + 1

    async def locate(self, queue: Queue, message_id: int, times_ms: Sequence[int]) -> Place | None:
        """Where a message waits, if it is in memory or soon behind one of these times.

        What this costs does not grow with the queue's depth.
        """
        for lane in queue.waiting.lanes():
            for bucket in lane.in_memory():
                if bucket.index_of(message_id) is not None:
                    return Place(lane.priority, lane.kind, bucket.order)
        scanned = 0
        for time_ms in sorted(set(times_ms)):
            first = order_of(queue.waiting.epoch, min(max(time_ms, 0), MAX_ORDER_MS), 0)
            for lane in queue.waiting.lanes():
                if scanned >= LOCATED_TOTAL:
                    return None
                place, looked_at = await self._locate(queue, lane, message_id, first)
                scanned += looked_at
                if place is not None:
                    return place
        return None

    async def _locate(
        self, queue: Queue, lane: Lane, message_id: int, first: int
    ) -> tuple[Place | None, int]:
        scanned = 0
        begin = Place(lane.priority, lane.kind, lane_order(lane.kind, first))
        async for place, items in self._run(queue, begin, _last(queue, lane.kind)):
            if any(item.message_id == message_id for item in items):
                return place, scanned
            scanned += len(items)
            if scanned >= LOCATED_MAX:
                break
        return None, scanned


def _first(queue: Queue, kind: BucketKind) -> int:
    """The lowest lane order of the queue's epoch."""
    return lane_order(kind, order_of(queue.waiting.epoch, 0, 0))


def _last(queue: Queue, kind: BucketKind) -> int:
    """The highest lane order of the queue's epoch."""
    return last_lane_order(kind, last_order(queue.waiting.epoch))


def _begins(queue: Queue, after: QueuePosition | None) -> tuple[int, int]:
    """Where to go on in the ready and in the timed lane of a priority; None: at the beginning.

    Of one order, ready messages come first. A position from before a purge is behind nothing.
    """
    ready, timed = _first(queue, BucketKind.READY), _first(queue, BucketKind.TIMED)
    if after is None:
        return ready, timed
    order = order_in_time(after.kind, after.order)
    if after.kind is BucketKind.TIMED:
        return max(ready, order + 1), max(timed, after.order)
    return max(ready, order), max(timed, lane_order(BucketKind.TIMED, order))


def _from_memory(lane: Lane, first: int, last: int) -> BucketRun:
    known = min(lane.known_until, last)
    buckets = lane.cached_between(first, known)
    part = [(bucket.order, bucket.items[bucket.start :]) for bucket in buckets[:PIECE_BUCKETS]]
    return BucketRun(part, part[-1][0] if len(buckets) > PIECE_BUCKETS else known, 0)


def _entries(lane: Lane, piece: BucketRun) -> list[Waiting]:
    return [
        (Place(lane.priority, lane.kind, order), item)
        for order, items in piece.buckets
        for item in items
    ]


def _behind(
    place: Place, items: list[AvailableMessage], after: QueuePosition | None
) -> list[AvailableMessage]:
    """What of a bucket is not listed yet: all of it, where the last one listed is gone."""
    if after is None or after[:3] != (place.priority, place.order, place.kind):
        return items
    for index, item in enumerate(items):
        if item.message_id == after.message_id:
            return items[index + 1 :]
    return items


async def _merged(
    runs: Sequence[AsyncIterator[tuple[Place, list[AvailableMessage]]]],
) -> AsyncIterator[tuple[Place, list[AvailableMessage]]]:
    """Buckets of some lanes by order; of the same order, in the order of the lanes."""
    heads = [await anext(run, None) for run in runs]
    while found := [head for head in heads if head is not None]:
        best = min(found, key=lambda head: order_in_time(head[0].kind, head[0].order))
        yield best
        index = heads.index(best)
        heads[index] = await anext(runs[index], None)
