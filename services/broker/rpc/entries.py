"""EntryService and DelayedService: entries listed, found, changed, watched and edited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from libs.access.current import current_caller, may, require_edit
from libs.serving.requests.guard import encoded
from libs.serving.requests.headers import encoded_headers
from libs.storage.layout.ids import MAX_MESSAGE_ID, shard_of
from libs.storage.records.archived_records import ArchivedMessage
from libs.storage.records.queues import DoneMessage, FailedMessage
from services.broker.core.leases import Lease
from services.broker.core.moves import moving
from services.broker.core.queue import Queue
from services.broker.core.waiting.bucket import Place
from services.broker.delivery.message_cache import Ingests
from services.broker.entries.conversion import EntryReader, checked_view, found_entry
from services.broker.entries.delayed import DelayedWatches
from services.broker.entries.editor import WRONG_STATE, Find, MessageEditor, replacement
from services.broker.entries.finder import SKEW_MS, EntryFinder, EntryLocation, Finished, SearchStep
from services.broker.entries.finished_pages import ListedMessage
from services.broker.entries.handles import Handle, parse_handle
from services.broker.entries.lister import EntryLister
from services.broker.requests.limits import inspectable, not_negative, within_count
from services.broker.requests.queues import checked_id
from services.broker.shard.owner import ShardOwner, check_partition
from slatemq.errors import (
    FailedPrecondition,
    InvalidArgument,
    SlateMQError,
    Unavailable,
)
from slatemq.v1 import entry_pb2, entry_pb2_grpc

QUEUES_MAX = 10_000
"""Named in one search."""

PROGRESS_S = 1.0
"""How often a search reports its progress."""


@dataclass(eq=False)
class EntryServicer(entry_pb2_grpc.EntryServiceServicer):
    _shard: int
    _owner: ShardOwner
    _lister: EntryLister
    _finder: EntryFinder
    _reader: EntryReader
    _ingests: Ingests

    async def ListEntries(
        self, request: entry_pb2.ListEntriesRequest, context: Any
    ) -> entry_pb2.ListEntriesResponse:
        return await self._lister.page(request, context)

    async def GetEntry(
        self, request: entry_pb2.GetEntryRequest, context: Any
    ) -> entry_pb2.GetEntryResponse:
        view = checked_view(request.view)
        found = await self._find(parse_handle(request.handle, self._shard))
        return entry_pb2.GetEntryResponse(entry=await self._entry_of(found, view, context))

    async def _entry_of(
        self, found: EntryLocation, view: entry_pb2.EntryView.ValueType, context: Any
    ) -> entry_pb2.Entry:
        entry = found_entry(found, self._owner.clock.now_ms())
        if not await self._reader.read([entry], view, context):
            raise Unavailable("the message cannot be read now", reason="INGEST_DOWN")
        # What came while this was read is returned once a crash cannot take it back.
        await self._owner.durable()
        return entry

    async def _find(self, handle: Handle) -> EntryLocation:
        queue = await self._owner.find(handle.queue_id)
        check_partition(queue, handle.partition)
        await self._owner.durable()
        try:
            return await self._finder.find(queue, handle)
        except SlateMQError as error:
            # What went while this was looked for may not be gone on disk yet.
            await self._owner.confirm(error)
            raise

    # --- One entry changes --------------------------------------------------

    async def CancelEntry(
        self, request: entry_pb2.CancelEntryRequest, context: Any
    ) -> entry_pb2.CancelEntryResponse:
        handle = parse_handle(request.handle, self._shard)
        queue, place = await self._waiting(handle)

        def cancel(now_ms: int) -> None:
            self._check_owned(queue)
            if queue.waiting.cancel(place, handle.message_id) is None:
                raise _moved(handle)
            self._owner.shard.events.cancelled(queue, handle.message_id, now_ms)

        await self._owner.run(cancel)
        await self._owner.durable()
        return entry_pb2.CancelEntryResponse()

    async def RescheduleEntry(
        self, request: entry_pb2.RescheduleEntryRequest, context: Any
    ) -> entry_pb2.RescheduleEntryResponse:
        handle = parse_handle(request.handle, self._shard)
        not_negative("visible_at_ms", request.visible_at_ms)
        queue, place = await self._waiting(handle)

        def reschedule(now_ms: int) -> EntryLocation:
            self._check_owned(queue)
            waiting, message_id = queue.waiting, handle.message_id
            moved = waiting.reschedule(place, message_id, request.visible_at_ms, now_ms)
            item = waiting.find(moved, message_id) if moved is not None else None
            if moved is None or item is None:
                raise _moved(handle)
            self._owner.shard.events.rescheduled(
                queue, handle.message_id, item.visible_at_ms, now_ms
            )
            return EntryLocation(queue, (moved, item))

        found = await self._owner.run(reschedule)
        entry = found_entry(found, self._owner.clock.now_ms())
        await self._owner.durable()
        return entry_pb2.RescheduleEntryResponse(entry=entry)

    async def _waiting(self, handle: Handle) -> tuple[Queue, Place]:
        """Where the entry of a handle waits; raises FailedPrecondition where it does not."""
        found = await self._find(handle)
        if isinstance(found.entry, Lease | ListedMessage):
            await self._owner.durable()
            raise _wrong_state(found.entry, handle)
        return found.queue, found.entry[0]

    async def find_waiting(self, handle: str) -> tuple[Handle, Find]:
        """What a handle says, and a command that finds its entry where it waits."""
        parsed = parse_handle(handle, self._shard)
        queue, place = await self._waiting(parsed)

        def find(_: int) -> int:
            self._check_owned(queue)
            item = queue.waiting.find(place, parsed.message_id)
            if item is None:
                raise _moved(parsed)
            return item.visible_at_ms

        return parsed, find

    def _check_owned(self, queue: Queue) -> None:
        if not self._owner.owns(queue):
            raise self._owner.shard.absence(queue.queue_id)

    # --- One message in all queues ------------------------------------------

    async def FindMessage(
        self, request: entry_pb2.FindMessageRequest, context: Any
    ) -> AsyncIterator[entry_pb2.FindMessageResponse]:
        if not 0 < request.message_id <= MAX_MESSAGE_ID:
            raise InvalidArgument("message_id", "is not a message ID", reason="OUT_OF_RANGE")
        within_count("queue_ids", len(request.queue_ids), QUEUES_MAX)
        named = [
            checked_id(queue_id, f"queue_ids[{place}]")
            for place, queue_id in enumerate(request.queue_ids)
        ]
        with self._owner.shard.moves.noting_left() as left:
            async for answer in self._find_in_all(named, left, request.message_id, context):
                yield answer

    async def _find_in_all(
        self, named: Sequence[str], left: Collection[str], message_id: int, context: Any
    ) -> AsyncIterator[entry_pb2.FindMessageResponse]:
        """The answers of a search of these queues, or of all; `left` gets those that leave."""
        # Those of other shards are searched there.
        shard = self._owner.shard
        departing = shard.moves.departing(self._owner.clock.now_ms())
        every = dict.fromkeys((*shard.queues, *departing))
        ids = list(dict.fromkeys(named)) or await inspectable(every)
        await self._owner.durable()
        since_ms = await self._received_ms(message_id)
        answer = entry_pb2.FindMessageResponse(queues_count=len(ids))
        reported_at = time.monotonic()
        async for step in self._searched(ids, left, message_id, since_ms, answer):
            answer.rows_read_count += step.rows_read
            # The policy may have changed since the start.
            if step.found is not None and may("inspect", step.found.queue.queue_id):
                answer.entries.append(
                    await self._entry_of(step.found, entry_pb2.ENTRY_VIEW_ATTEMPTS, context)
                )
            if answer.entries or time.monotonic() - reported_at >= PROGRESS_S:
                await self._owner.durable()
                yield answer
                del answer.entries[:]
                reported_at = time.monotonic()
            await asyncio.sleep(0)
        # That it is not in a queue holds when a crash cannot bring it back.
        await self._owner.durable()
        yield answer

    async def _searched(
        self,
        ids: Sequence[str],
        left: Collection[str],
        message_id: int,
        since_ms: int,
        progress: entry_pb2.FindMessageResponse,
    ) -> AsyncIterator[SearchStep]:
        """The steps through all queues, and one after each; counts these in `progress`.

        Raises Unavailable at the end where one was moving, or had moved since the search began (it
        is in `left`), and may have been passed over.
        """
        shard, passed_over = self._owner.shard, ""
        for queue_id in ids:
            queue = shard.queues.get(queue_id)
            if queue is not None:
                async for step in self._finder.search(queue, message_id, since_ms):
                    yield step
            departing = shard.moves.departing(self._owner.clock.now_ms())
            if queue_id in departing or queue_id in left or shard.moves.has(queue_id):
                passed_over = queue_id
            progress.queues_searched_count += 1
            yield SearchStep(None, 0)
        if passed_over:
            raise moving(passed_over)

    async def _received_ms(self, message_id: int) -> int:
        """From when on the message can be in a queue; 0 where its ingest does not know."""
        try:
            messages = (await self._ingests.read(shard_of(message_id), [message_id])).messages
        except Unavailable:
            return 0
        received_ms = messages[0].received_at_ms if messages else 0
        return max(received_ms - SKEW_MS, 0)


def _moved(handle: Handle) -> FailedPrecondition:
    return FailedPrecondition(
        WRONG_STATE,
        f"message {handle.message_id} does not wait any more: it was claimed, or is gone",
        subject=str(handle.message_id),
    )


_STATES = {DoneMessage: "done", FailedMessage: "failed", ArchivedMessage: "archived"}


def _wrong_state(entry: Lease | ListedMessage[Finished], handle: Handle) -> FailedPrecondition:
    state = "in flight" if isinstance(entry, Lease) else _STATES[type(entry.message)]
    return FailedPrecondition(
        WRONG_STATE,
        f"message {handle.message_id} is {state}, not available or delayed",
        subject=str(handle.message_id),
    )


@dataclass(eq=False)
class DelayedServicer(entry_pb2_grpc.DelayedServiceServicer):
    _editor: MessageEditor
    _watches: DelayedWatches
    _entries: EntryServicer

    async def EditMessage(
        self, request: entry_pb2.EditMessageRequest, context: Any
    ) -> entry_pb2.EditMessageResponse:
        wanted = replacement(request)
        headers = None
        if request.replace_headers:
            # Consumers take them for those of a publisher.
            headers = dict(request.headers)
            encoded_headers("headers", 0, headers)
        require_edit(headers, len(request.payload))
        handle, find = await self._entries.find_waiting(request.handle)
        wanted.message_id, wanted.queue_id = handle.message_id, handle.queue_id
        etag = await self._editor.edit(wanted, find, current_caller.get())
        return entry_pb2.EditMessageResponse(etag=etag)

    async def ForgetMessage(
        self, request: entry_pb2.ForgetMessageRequest, context: Any
    ) -> entry_pb2.ForgetMessageResponse:
        if not 1 <= request.message_id <= MAX_MESSAGE_ID:
            raise InvalidArgument("message_id", "must be a message ID")
        await self._editor.forget(request.message_id)
        return entry_pb2.ForgetMessageResponse()

    async def WatchDelayed(
        self, request: entry_pb2.WatchDelayedRequest, context: Any
    ) -> AsyncIterator[entry_pb2.WatchDelayedResponse]:
        queue_id, view = checked_id(request.queue_id, "queue_id"), checked_view(request.view)
        async with aclosing(self._watches.watch(queue_id, request.position, view)) as answers:
            async for answer in answers:
                # As bytes alone: until they are read, they are in memory.
                encoding = answer.SerializeToString()
                del answer
                yield encoded(entry_pb2.WatchDelayedResponse, encoding)
                del encoding
