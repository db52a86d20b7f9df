"""Entries for EntryService: from what lists hold, with attempts and messages by view."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from libs.access.current import caller_name
from libs.serving.requests.budget import AnswerBudget
from libs.storage.layout.buckets import BucketKind, lane_order
from libs.storage.layout.ids import shard_of
from libs.storage.records.delayed_records import DelayedMessage
from libs.storage.records.queues import (
    AvailableMessage,
    DoneMessage,
    FailedAttempt,
    FailedMessage,
)
from services.broker.core.leases import Lease
from services.broker.core.lists.attempts import attempts_at
from services.broker.core.queue import Queue
from services.broker.core.waiting.bucket import Place
from services.broker.delivery.message_cache import Ingests
from services.broker.entries.finder import EntryLocation, Finished
from services.broker.entries.finished_pages import ListedMessage
from services.broker.entries.handles import listed_handle, waiting_handle
from services.broker.shard.loading import Store, read_attempts
from services.broker.shard.owner import ShardOwner
from slatemq.errors import InvalidArgument
from slatemq.v1 import entry_pb2, queue_pb2
from slatemq.v1.message_pb2 import Message

MESSAGES_BYTES_MAX: Final = 32 << 20
"""The most bytes of messages in one response, unless one message has more."""

ATTEMPTS_BYTES_MAX: Final = 16 << 20
"""The most bytes of failed attempts in one response."""

ATTEMPTS_AT_ONCE: Final = 50
"""Entries to which attempts are added in one go: some milliseconds of the event loop."""

WITH_ATTEMPTS: Final = frozenset(
    {entry_pb2.ENTRY_VIEW_ATTEMPTS, entry_pb2.ENTRY_VIEW_HEADERS, entry_pb2.ENTRY_VIEW_FULL}
)
WITH_MESSAGE: Final = frozenset({entry_pb2.ENTRY_VIEW_HEADERS, entry_pb2.ENTRY_VIEW_FULL})

View: TypeAlias = entry_pb2.EntryView.ValueType
Entries: TypeAlias = Sequence[entry_pb2.Entry]


def checked_view(view: View) -> View:
    """A view that there is; raises InvalidArgument."""
    if view not in entry_pb2.EntryView.values():
        raise InvalidArgument("view", f"{view} is not a view")
    return view


def waiting_entry(
    queue: Queue, place: Place, item: AvailableMessage, now_ms: int
) -> entry_pb2.Entry:
    """An available entry, or one that is delayed at `now_ms`."""
    delayed = item.visible_at_ms > now_ms
    return entry_pb2.Entry(
        handle=waiting_handle(queue, item.message_id, place),
        queue_id=queue.queue_id,
        message_id=item.message_id,
        state=queue_pb2.ENTRY_STATE_DELAYED if delayed else queue_pb2.ENTRY_STATE_AVAILABLE,
        priority=item.priority,
        attempts_count=item.attempts,
        visible_at_ms=item.visible_at_ms,
        retention_deadline_ms=item.retention_deadline_ms,
    )


def delayed_entry(queue: Queue, delayed_message: DelayedMessage) -> entry_pb2.Entry:
    """An entry that the journal of delayed messages has."""
    order = lane_order(
        BucketKind.TIMED, delayed_message.bucket_order, delayed_message.bucket_number
    )
    place = Place(delayed_message.priority, BucketKind.TIMED, order)
    return entry_pb2.Entry(
        handle=waiting_handle(queue, delayed_message.message_id, place),
        queue_id=queue.queue_id,
        message_id=delayed_message.message_id,
        state=queue_pb2.ENTRY_STATE_DELAYED,
        priority=delayed_message.priority,
        visible_at_ms=delayed_message.visible_at_ms,
        retention_deadline_ms=delayed_message.retention_deadline_ms,
    )


def in_flight_entry(lease: Lease) -> entry_pb2.Entry:
    return entry_pb2.Entry(
        handle=listed_handle(lease.queue, lease.message_id, "i", lease.bucket.order),
        queue_id=lease.queue.queue_id,
        message_id=lease.message_id,
        state=queue_pb2.ENTRY_STATE_IN_FLIGHT,
        priority=lease.priority,
        attempts_count=lease.attempts,
        retention_deadline_ms=lease.retention_deadline_ms,
        consumer_id=lease.consumer,
        claimed_at_ms=lease.claimed_at_ms,
        lease_deadline_ms=lease.deadline_ms,
    )


def listed_entry(queue: Queue, listed: ListedMessage[Finished]) -> entry_pb2.Entry:
    message, order = listed.message, listed.spot.order
    entry = entry_pb2.Entry(
        queue_id=queue.queue_id, message_id=message.message_id, attempts_count=message.attempts
    )
    if isinstance(message, DoneMessage):
        mark, entry.state = "d", queue_pb2.ENTRY_STATE_DONE
        entry.consumer_id, entry.claimed_at_ms = message.consumer, message.first_claimed_at_ms
        entry.finished_at_ms, entry.transferred_to = message.done_at_ms, message.transferred_to
    else:
        entry.priority, entry.finished_at_ms = message.priority, message.failed_at_ms
        entry.retention_deadline_ms = message.retention_deadline_ms
        if isinstance(message, FailedMessage):
            mark, entry.state = "f", queue_pb2.ENTRY_STATE_FAILED
            entry.reason = message.reason
        else:
            mark, entry.state = "x", queue_pb2.ENTRY_STATE_ARCHIVED
            entry.archived.run, entry.archived.bucket_order = message.run, order
            entry.archived.archived_at_ms = message.archived_at_ms
    entry.handle = listed_handle(queue, message.message_id, mark, order)
    return entry


def found_entry(found: EntryLocation, now_ms: int) -> entry_pb2.Entry:
    queue, entry = found.queue, found.entry
    if isinstance(entry, Lease):
        return in_flight_entry(entry)
    if isinstance(entry, ListedMessage):
        return listed_entry(queue, entry)
    return waiting_entry(queue, *entry, now_ms)


@dataclass(eq=False)
class EntryReader:
    """Adds to entries what lies elsewhere: attempts, and messages from the ingests."""

    _owner: ShardOwner
    _database: Store
    _ingests: Ingests
    _budget: AnswerBudget

    async def read(self, entries: Entries, view: View, context: Any) -> int:
        """Adds what the view wants; returns how many of the first entries fit into an answer.

        Both count for the budget until the call ends. Raises Unavailable while messages are wanted
        and an ingest is down, ResourceExhausted where answers that are not read have the budget.
        """
        count = len(entries)
        if all(entry.state == queue_pb2.ENTRY_STATE_ARCHIVED for entry in entries):
            return count  # the archive has both
        principal = caller_name()

        def release_after_call(held_bytes: int) -> None:
            if held_bytes:
                context.add_done_callback(lambda _: self.release(held_bytes, principal))

        if view in WITH_ATTEMPTS:
            count, held_bytes = await self.add_attempts(entries, principal)
            release_after_call(held_bytes)
        if view in WITH_MESSAGE:
            count, held_bytes = await self.add_messages(entries[:count], view, principal)
            release_after_call(held_bytes)
        return count

    async def add_attempts(self, entries: Entries, principal: str) -> tuple[int, int]:
        """Adds failed attempts; returns how many of the first entries fit, and what to `release`.

        Raises ResourceExhausted as `read`.
        """
        async with self._budget.fetching(ATTEMPTS_BYTES_MAX, "entries", principal) as bytes_max:
            count, size_bytes = await self._add_attempts(entries, bytes_max)
        self._budget.hold(size_bytes, principal)
        return count, size_bytes

    async def add_messages(self, entries: Entries, view: View, principal: str) -> tuple[int, int]:
        """Adds messages; returns how many of the first entries fit, and what to `release` later.

        Raises as `read`.
        """
        with_payload = view == entry_pb2.ENTRY_VIEW_FULL
        async with self._budget.fetching(MESSAGES_BYTES_MAX, "entries", principal) as bytes_max:
            count = await self._add_messages(entries, bytes_max, with_payload=with_payload)
        size_bytes = sum(entry.message.ByteSize() for entry in entries[:count])
        self._budget.hold(size_bytes, principal)
        return count, size_bytes

    def release(self, held_bytes: int, principal: str) -> None:
        """Messages of this many bytes were sent."""
        self._budget.release_for(principal, held_bytes)

    async def _add_attempts(self, entries: Entries, bytes_max: int) -> tuple[int, int]:
        size_bytes = 0
        for first in range(0, len(entries), ATTEMPTS_AT_ONCE):
            part = entries[first : first + ATTEMPTS_AT_ONCE]
            await self._add_attempts_at_once(part)
            await asyncio.sleep(0)
            for count, entry in enumerate(part, first):
                entry_bytes = sum(one.ByteSize() for one in entry.attempts)
                if count and size_bytes + entry_bytes > bytes_max:
                    return count, size_bytes
                size_bytes += entry_bytes
        return len(entries), size_bytes

    async def _add_attempts_at_once(self, entries: Entries) -> None:
        queues, attempts = self._owner.shard.queues, self._owner.shard.attempts
        keyed = [
            (attempts_at(queues[entry.queue_id], entry.message_id), entry)
            for entry in entries
            if entry.queue_id in queues  # or it was deleted just now
        ]
        keys = [key for key, _ in keyed]
        attempts.begin_read(keys)
        try:
            cold = [key for key in keys if key not in attempts]
            stored = await read_attempts(self._database, cold)
            for key, entry in keyed:
                known = attempts.get(key)  # newer than what is stored
                value = stored[key] if known is None else known
                entry.attempts.extend(_attempt(one, entry.queue_id) for one in value)
        finally:
            attempts.end_read(keys)

    async def _add_messages(self, entries: Entries, bytes_max: int, *, with_payload: bool) -> int:
        by_shard: dict[int, list[int]] = {}
        for entry in entries:
            by_shard.setdefault(shard_of(entry.message_id), []).append(entry.message_id)
        stored: dict[int, tuple[Message, str]] = {}
        gone: set[int] = set()
        left = bytes_max
        for shard, ids in by_shard.items():
            wanted = list(dict.fromkeys(ids))
            while wanted and left > 0:
                read = await self._ingests.read(shard, wanted, left, etags=True)
                for message, etag in zip(read.messages, read.etags, strict=True):
                    stored[message.message_id] = (message, etag)
                    if not with_payload:
                        message.ClearField("payload")
                    left -= message.ByteSize()
                gone.update(read.missing_ids)
                if not read.messages and not read.missing_ids:
                    break
                wanted = [one for one in wanted if one not in stored and one not in gone]
        left = bytes_max
        for count, entry in enumerate(entries):
            if entry.message_id in stored:
                message, entry.etag = stored[entry.message_id]
                left -= message.ByteSize()
                if count and left < 0:
                    return count
                entry.message.CopyFrom(message)
            elif entry.message_id not in gone:
                return count
        return len(entries)


def _attempt(attempt: FailedAttempt, queue_id: str) -> entry_pb2.Attempt:
    return entry_pb2.Attempt(
        consumer_id=attempt.consumer,
        claimed_at_ms=attempt.claimed_at_ms,
        outcome=attempt.outcome,
        queue_id=attempt.queue or queue_id,
    )
