"""Reads the done, failed and archived lists of queues: durable rows, in order of time or backwards.

A list begins at its oldest order: what lies before is garbage, and is never scanned.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

from libs.storage.database.queue_ranges import LATE_MS
from libs.storage.database.slate import Database
from libs.storage.layout.buckets import (
    MAX_ORDER_MS,
    MAX_ORDER_N,
    last_order,
    order_of,
    split_bucket,
)
from libs.storage.layout.keys import (
    BucketKey,
    done_range,
    failed_range,
    parse_done_key,
    parse_failed_key,
)
from libs.storage.layout.own_keys import archived_range, parse_archived_key
from libs.storage.layout.primitives import KeyRange
from libs.storage.records.archived_records import ArchivedMessage, decode_archived
from libs.storage.records.queues import (
    DoneMessage,
    FailedMessage,
    decode_done,
    decode_done_heads,
    decode_failed,
)
from services.broker.core.lists.finished_lists import FinishedList
from services.broker.core.queue import Queue

SCANNED_MAX = 20_000
"""Messages looked at for one page at most: those outside of the time asked for fill no page."""

FIRST_READ_ROWS = 8
"""Rows read first: more each time, since it is not known how many messages they have."""

READ_ROWS = 200
"""The most rows in one read: of one message each they take a millisecond."""

DECODED_MAX = 1000
"""Messages decoded before others have their turn: two milliseconds."""

M = TypeVar("M")


class ListPosition(NamedTuple):
    """Behind which message of a list to go on: its row, and its place in it."""

    order: int
    place: int


class TimeRange(NamedTuple):
    """When the messages wanted were finished: from_ms ≤ time < until_ms (0 = without end)."""

    from_ms: int = 0
    until_ms: int = 0

    def holds(self, time_ms: int) -> bool:
        return self.from_ms <= time_ms and (not self.until_ms or time_ms < self.until_ms)


class ListedMessage(NamedTuple, Generic[M]):
    spot: ListPosition
    message: M


class FinishedPage(NamedTuple, Generic[M]):
    """Some messages of a list, and behind which the next ones are; None: there are no more."""

    messages: list[ListedMessage[M]]
    next: ListPosition | None


@dataclass(eq=False)
class FinishedReader(Generic[M]):
    name: str
    """Of the list in `Queue`."""
    _database: Database
    _range_of: Callable[[str, int, int], KeyRange]
    _parse_key: Callable[[bytes], BucketKey]
    _decode: Callable[[bytes], list[M]]
    _time_of: Callable[[M], int]

    def _oldest(self, queue: Queue) -> int:
        finished: FinishedList[Any] = getattr(queue, self.name)
        return finished.oldest_order

    async def page(
        self,
        queue: Queue,
        span: TimeRange,
        after: ListPosition | None,
        limit: int,
        *,
        newest_first: bool,
    ) -> FinishedPage[M]:
        """Some messages that were finished within the span. A page may be short of `limit`."""
        found: list[ListedMessage[M]] = []
        scanned = 0
        async for order, messages in self.rows(queue, span, after, newest_first=newest_first):
            for one in _behind(order, messages, after, newest_first):
                scanned += 1
                if span.holds(self._time_of(one.message)):
                    found.append(one)
                if len(found) >= limit or scanned >= SCANNED_MAX:
                    return FinishedPage(found, one.spot)
        return FinishedPage(found, None)

    async def rows(
        self,
        queue: Queue,
        span: TimeRange,
        after: ListPosition | None,
        *,
        newest_first: bool = False,
    ) -> AsyncIterator[tuple[int, list[M]]]:
        """Rows that may have messages within the span, from that of `after` on: (order, messages).

        A row is written after what is in it was finished, so its order is no earlier, and not
        much later.
        """
        oldest = self._oldest(queue)
        if not oldest:
            return
        first = max(oldest, order_of(queue.epoch, min(span.from_ms, MAX_ORDER_MS), 0))
        last = last_order(queue.epoch)
        if span.until_ms:
            last = order_of(queue.epoch, min(span.until_ms + LATE_MS, MAX_ORDER_MS), MAX_ORDER_N)
        if after is not None and newest_first:
            last = min(last, after.order)
        elif after is not None:
            first = max(first, after.order)
        limit, decoded = FIRST_READ_ROWS, 0
        while first <= last:
            keys = self._range_of(queue.queue_id, first, last)
            count = 0
            async for rows in self._database.scan(
                keys.start, keys.end, limit=limit, durable=True, descending=newest_first
            ):
                for key, value in rows:
                    count += 1
                    order = split_bucket(self._parse_key(key).bucket).order
                    first, last = (first, order - 1) if newest_first else (order + 1, last)
                    messages = self._decode(value)
                    yield order, messages
                    decoded += len(messages)
                    if decoded >= DECODED_MAX:
                        decoded = 0
                        await asyncio.sleep(0)
            if count < limit:
                return
            limit = min(2 * limit, READ_ROWS)

    async def row(self, queue: Queue, order: int) -> list[M]:
        """The messages of one row; none when it is gone."""
        if not 0 < self._oldest(queue) <= order <= last_order(queue.epoch):
            return []
        keys = self._range_of(queue.queue_id, order, order)
        async for rows in self._database.scan(keys.start, keys.end, limit=1, durable=True):
            for _, value in rows:
                return self._decode(value)
        return []


class ListReaders(NamedTuple):
    """Readers of the lists of queues.

    Attributes:
        done_heads: The fields of the RFC alone, in a tenth of the time: see `decode_done_heads`.
        archived: In the order in which messages were archived.
    """

    done: FinishedReader[DoneMessage]
    done_heads: FinishedReader[tuple[int, int, int]]
    failed: FinishedReader[FailedMessage]
    archived: FinishedReader[ArchivedMessage]


def list_readers(database: Database) -> ListReaders:
    """Reads all lists of the queues in this database."""
    done = ("done", database, done_range, parse_done_key)
    return ListReaders(
        FinishedReader(*done, decode_done, attrgetter("done_at_ms")),
        FinishedReader(*done, decode_done_heads, itemgetter(1)),
        FinishedReader(
            "failed",
            database,
            failed_range,
            parse_failed_key,
            decode_failed,
            attrgetter("failed_at_ms"),
        ),
        FinishedReader(
            "archived",
            database,
            archived_range,
            parse_archived_key,
            decode_archived,
            attrgetter("archived_at_ms"),
        ),
    )


def _behind(
    order: int, messages: Sequence[M], after: ListPosition | None, newest_first: bool
) -> list[ListedMessage[M]]:
    """The messages of a row that are not listed yet, in the order wanted."""
    listed = [
        ListedMessage(ListPosition(order, place), message) for place, message in enumerate(messages)
    ]
    if newest_first:
        listed.reverse()
    if after is None or after.order != order:
        return listed
    if newest_first:
        return [one for one in listed if one.spot.place < after.place]
    return [one for one in listed if one.spot.place > after.place]
