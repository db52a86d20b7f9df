"""ListEntries: pages of the entries of a queue that are in one state."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from libs.serving.requests.guard import encoded
from libs.serving.requests.paging import bad_page_token, checked_page_size
from libs.storage.layout.buckets import BucketKind, order_in_time
from services.broker.core.leases import Lease
from services.broker.core.queue import Queue
from services.broker.entries.conversion import (
    EntryReader,
    checked_view,
    in_flight_entry,
    listed_entry,
    waiting_entry,
)
from services.broker.entries.finished_pages import (
    FinishedReader,
    ListPosition,
    ListReaders,
    TimeRange,
)
from services.broker.entries.waiting_pages import QueuePosition, WaitingReader
from services.broker.requests.limits import not_negative
from services.broker.requests.queues import checked_id
from services.broker.shard.owner import ShardOwner
from slatemq.errors import InvalidArgument, Unavailable
from slatemq.v1 import entry_pb2, queue_pb2

TOKEN_CHARS_MAX = 1000

State: TypeAlias = queue_pb2.EntryState.ValueType
Numbers: TypeAlias = tuple[int, ...]
"""The entry after which to continue; the state says in which list."""


class EntryList(NamedTuple):
    """Entries, each with its position; `next`: the position after which the next page begins."""

    entries: Sequence[tuple[entry_pb2.Entry, Numbers]]
    next: Numbers | None


@dataclass(eq=False)
class EntryLister:
    _owner: ShardOwner
    _waiting: WaitingReader
    _lists: ListReaders
    _reader: EntryReader

    async def page(
        self, request: entry_pb2.ListEntriesRequest, context: Any
    ) -> entry_pb2.ListEntriesResponse:
        """See the proto; encoded, so that nothing else of it is kept until it is read."""
        queue_id, view = checked_id(request.queue_id, "queue_id"), checked_view(request.view)
        limit = _checked(request)
        after = _parsed(request)
        queue = await self._owner.find(queue_id)
        await self._owner.durable()
        result = await self._list(queue, request, after, limit)
        count = await self._reader.read([entry for entry, _ in result.entries], view, context)
        following = result.next
        if count < len(result.entries):
            if not count:
                raise Unavailable("no message can be read now", reason="INGEST_DOWN")
            following = result.entries[count - 1][1]
        # What came while this was read is returned once a crash cannot take it back.
        await self._owner.durable()
        answer = entry_pb2.ListEntriesResponse(entries=[one for one, _ in result.entries[:count]])
        if following is not None:
            answer.next_page_token = _token(request, following)
        return encoded(entry_pb2.ListEntriesResponse, answer.SerializeToString())

    async def _list(
        self, queue: Queue, request: entry_pb2.ListEntriesRequest, after: Numbers | None, limit: int
    ) -> EntryList:
        kept_s = queue.settings.done_retention_s, queue.settings.failed_retention_s
        finished: dict[State, tuple[FinishedReader[Any], int]] = {
            queue_pb2.ENTRY_STATE_DONE: (self._lists.done, kept_s[0]),
            queue_pb2.ENTRY_STATE_FAILED: (self._lists.failed, kept_s[1]),
            queue_pb2.ENTRY_STATE_ARCHIVED: (self._lists.archived, 0),
        }
        if request.state in finished:
            return await self._finished_page(queue, request, after, limit, *finished[request.state])
        if request.state == queue_pb2.ENTRY_STATE_IN_FLIGHT:
            return _in_flight(queue, after, limit)
        return await self._waiting_page(queue, request.state, after, limit)

    async def _waiting_page(
        self, queue: Queue, state: State, after: Numbers | None, limit: int
    ) -> EntryList:
        position = None
        if after is not None:
            priority, order, kind, message_id = after
            position = QueuePosition(priority, order, BucketKind(kind), message_id)
        now_ms = self._owner.clock.now_ms()
        delayed = state == queue_pb2.ENTRY_STATE_DELAYED
        page = await self._waiting.page(
            queue, delayed=delayed, after=position, limit=limit, now_ms=now_ms
        )
        entries = []
        for place, item in page.entries:
            entry = waiting_entry(queue, place, item, now_ms)
            behind = (place.priority, place.order, int(place.kind), item.message_id)
            entries.append((entry, behind))
        return EntryList(entries, None if page.next is None else tuple(map(int, page.next)))

    async def _finished_page(
        self,
        queue: Queue,
        request: entry_pb2.ListEntriesRequest,
        after: Numbers | None,
        limit: int,
        reader: FinishedReader[Any],
        retention_s: int,
    ) -> EntryList:
        # The time asked for, less what the queue does not keep any more.
        kept_ms = self._owner.clock.now_ms() - retention_s * 1000 if retention_s else 0
        span = TimeRange(max(request.finished_from_ms, kept_ms), request.finished_until_ms)
        spot = ListPosition(*after) if after is not None else None
        page = await reader.page(queue, span, spot, limit, newest_first=request.newest_first)
        entries = [(listed_entry(queue, one), tuple(one.spot)) for one in page.messages]
        return EntryList(entries, None if page.next is None else tuple(page.next))


def _in_flight(queue: Queue, after: Numbers | None, limit: int) -> EntryList:
    order, token = after or (0, 0)
    leases: list[Lease] = []
    for bucket in queue.leases.buckets_from(order):
        part = list(bucket.leases.values())
        if bucket.order == order and token in bucket.leases:
            # Where the last one listed has ended, on from the beginning of its bucket.
            part = part[[one.token for one in part].index(token) + 1 :]
        leases += part
        if len(leases) > limit:
            break
    entries = [
        (in_flight_entry(lease), (lease.bucket.order, lease.token)) for lease in leases[:limit]
    ]
    return EntryList(entries, entries[-1][1] if len(leases) > limit else None)


def _checked(request: entry_pb2.ListEntriesRequest) -> int:
    """How many entries a page may have; InvalidArgument for what cannot be listed."""
    if request.state not in queue_pb2.EntryState.values() or not request.state:
        raise InvalidArgument("state", "must be one of the states of an entry")
    finished = request.state in _FINISHED
    for name in ("finished_from_ms", "finished_until_ms", "newest_first"):
        value = getattr(request, name)
        if value and not finished:
            raise InvalidArgument(name, "is for done, failed and archived entries only")
        not_negative(name, value)
    return checked_page_size(request.page_size)


_FINISHED = (
    queue_pb2.ENTRY_STATE_DONE,
    queue_pb2.ENTRY_STATE_FAILED,
    queue_pb2.ENTRY_STATE_ARCHIVED,
)

_WAITING = (queue_pb2.ENTRY_STATE_AVAILABLE, queue_pb2.ENTRY_STATE_DELAYED)


def _token(request: entry_pb2.ListEntriesRequest, after: Numbers) -> str:
    items = [request.queue_id, request.state, request.newest_first, *after]
    return base64.urlsafe_b64encode(json.dumps(items).encode()).decode()


def _parsed(request: entry_pb2.ListEntriesRequest) -> Numbers | None:
    if not request.page_token:
        return None
    if len(request.page_token) > TOKEN_CHARS_MAX:
        raise bad_page_token()
    try:
        fields = json.loads(base64.b64decode(request.page_token, altchars=b"-_", validate=True))
        queue_id, state, newest_first, *numbers = fields
    except (binascii.Error, ValueError, TypeError, RecursionError) as error:
        raise bad_page_token() from error
    asked = [request.queue_id, request.state, request.newest_first]
    waiting = request.state in _WAITING
    known = [queue_id, state, newest_first] == asked and {int} >= set(map(type, numbers))
    if not known or len(numbers) != (4 if waiting else 2) or min(numbers) < 0:
        raise bad_page_token()
    if waiting and (numbers[0] > 255 or numbers[2] not in (BucketKind.READY, BucketKind.TIMED)):
        raise bad_page_token()
    order = order_in_time(numbers[2], numbers[1]) if waiting else numbers[1]
    if max(numbers[0], order, *numbers[2:]) >= 1 << 64:
        raise bad_page_token()
    return tuple(numbers)
