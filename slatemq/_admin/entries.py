"""Looking at messages in their queues and repairing them: a part of the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

import grpc.aio

from slatemq._admin.admin import Admin
from slatemq._admin.entry_models import (
    Entry,
    EntryPage,
    EntryState,
    EntryView,
    SearchProgress,
    StateName,
    ViewName,
    entry_of,
    state_wire,
    view_wire,
)
from slatemq._admin.watching import DelayedWatch
from slatemq._checks import check_text, message_of
from slatemq._consume.handles import queue_of_handle
from slatemq._rpc.peers import ATTEMPT_S, Peers
from slatemq._rpc.queue_locations import QueueLocations
from slatemq.errors import NotFound, SlateMQError
from slatemq.models import Payload, Time, payload_bytes, time_ms
from slatemq.v1 import entry_pb2
from slatemq.v1.entry_pb2_grpc import DelayedServiceStub, EntryServiceStub

PAGE_SIZE = 1000
"""Entries asked for at once by `list_entries`: the most that the server gives."""

SEARCH_S = 3600.0
"""How long a search may take: by a handle without a place, or for a message in all queues."""


class EntryCalls:
    """Listing, finding, cancelling, rescheduling and editing; a part of the client."""

    _peers: Peers
    _locations: QueueLocations
    _admin: Admin

    async def list_entries(
        self,
        queue_id: str,
        state: EntryState | StateName,
        *,
        view: EntryView | ViewName = EntryView.BASIC,
        finished_from: Time | None = None,
        finished_until: Time | None = None,
        newest_first: bool = False,
    ) -> AsyncIterator[Entry]:
        """The entries of a queue in one state: waiting ones in their order, finished ones by time.

        The last three are for done and failed entries: when they were finished. Entries that change
        their state meanwhile may be missed or come twice. Raises NotFound, InvalidArgument.
        """
        token = ""
        while True:
            page = await self.entry_page(
                queue_id,
                state,
                page_size=PAGE_SIZE,
                page_token=token,
                view=view,
                finished_from=finished_from,
                finished_until=finished_until,
                newest_first=newest_first,
            )
            for entry in page.entries:
                yield entry
            token = page.next_page_token
            if not token:
                return

    async def entry_page(
        self,
        queue_id: str,
        state: EntryState | StateName,
        *,
        page_size: int = 100,
        page_token: str = "",
        view: EntryView | ViewName = EntryView.BASIC,
        finished_from: Time | None = None,
        finished_until: Time | None = None,
        newest_first: bool = False,
    ) -> EntryPage:
        """One page of `list_entries`, at most 1,000 entries; it may be short before the last."""
        request = message_of(
            entry_pb2.ListEntriesRequest,
            queue_id=queue_id,
            state=state_wire(state),
            page_size=page_size,
            page_token=page_token,
            view=view_wire(view),
            finished_from_ms=_time_ms("finished_from", finished_from),
            finished_until_ms=_time_ms("finished_until", finished_until),
            newest_first=newest_first,
        )
        result = await self._ask(queue_id, "ListEntries", request)
        return EntryPage([entry_of(each) for each in result.entries], result.next_page_token)

    async def get_entry(self, handle: str, *, view: EntryView | ViewName = EntryView.FULL) -> Entry:
        """One entry as it is now. By a handle without a place this searches its queue.

        Raises NotFound (ENTRY_UNKNOWN, QUEUE_NOT_FOUND), FailedPrecondition (HANDLE_STALE: it
        moved; list or find it again).
        """
        request = message_of(entry_pb2.GetEntryRequest, handle=handle, view=view_wire(view))
        return entry_of((await self._by_handle(handle, "GetEntry", request)).entry)

    async def find_message(
        self,
        message_id: int,
        queue_ids: Iterable[str] = (),
        *,
        on_progress: Callable[[SearchProgress], None] | None = None,
    ) -> AsyncIterator[Entry]:
        """The entries of a message in all queues (or these), as they are found, with attempts.

        Every broker reads every list from the message's receipt on: some seconds per million
        entries. `on_progress` is called about once a second. Raises InvalidArgument; NotFound for
        a queue that does not exist; Unavailable, after what the other brokers found, when one
        stays away.
        """
        request = message_of(
            entry_pb2.FindMessageRequest, message_id=message_id, queue_ids=queue_ids
        )
        # A broker does not know the queues of others: it cannot tell that there is none.
        named = [await self._admin.get_queue(queue_id) for queue_id in request.queue_ids]
        shards = sorted({queue.broker_shard for queue in named})
        shards = shards or await self._peers.broker_shards()
        found: asyncio.Queue[Entry | SlateMQError | None] = asyncio.Queue()
        progress: dict[int, SearchProgress] = {}

        def note(shard: int, response: entry_pb2.FindMessageResponse) -> None:
            progress[shard] = SearchProgress(
                response.queues_searched_count, response.queues_count, response.rows_read_count
            )
            if on_progress is not None:
                on_progress(SearchProgress(*map(sum, zip(*progress.values(), strict=True))))

        work = [asyncio.create_task(self._search(one, request, found, note)) for one in shards]
        problem: SlateMQError | None = None
        ended = 0
        try:
            while ended < len(work):
                value = await found.get()
                if isinstance(value, Entry):
                    yield value
                else:
                    ended += 1
                    problem = value or problem
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        if problem is not None:
            raise problem

    async def _search(
        self,
        shard: int,
        request: entry_pb2.FindMessageRequest,
        found: asyncio.Queue[Entry | SlateMQError | None],
        note: Callable[[int, entry_pb2.FindMessageResponse], None],
    ) -> None:
        """Searches one broker; puts None, or why that failed, when it is through."""
        known: set[str] = set()

        async def attempt(timeout: float) -> None:
            stub: Any = EntryServiceStub(await self._peers.broker(shard))
            async for response in stub.FindMessage(request, timeout=timeout):
                for wire in response.entries:
                    if wire.handle not in known:  # A search that broke begins anew.
                        known.add(wire.handle)
                        found.put_nowait(entry_of(wire))
                note(shard, response)

        problem: SlateMQError | None = None
        try:
            await self._peers.call(attempt, attempt_s=SEARCH_S, wait_s=SEARCH_S)
        except SlateMQError as error:
            problem = error
        found.put_nowait(problem)

    async def cancel_entry(self, handle: str) -> None:
        """Takes an available or delayed entry out of its queue: it will not be delivered.

        Raises as `get_entry`, and FailedPrecondition (WRONG_STATE).
        """
        tries = 0

        def tried() -> None:
            nonlocal tries
            tries += 1

        request = message_of(entry_pb2.CancelEntryRequest, handle=handle)
        try:
            await self._by_handle(handle, "CancelEntry", request, before=tried)
        except NotFound as error:
            # The first try may have done it, and its answer got lost.
            if tries < 2 or error.reason != "ENTRY_UNKNOWN":
                raise

    async def reschedule_entry(self, handle: str, visible_at: Time | None = None) -> Entry:
        """Sets from when on an available or delayed entry may be claimed; None: at once.

        Returns it with its new handle. Raises as `cancel_entry`.
        """
        request = message_of(
            entry_pb2.RescheduleEntryRequest,
            handle=handle,
            visible_at_ms=_time_ms("visible_at", visible_at),
        )
        return entry_of((await self._by_handle(handle, "RescheduleEntry", request)).entry)

    async def edit_message(
        self,
        handle: str,
        *,
        payload: Payload | None = None,
        headers: Mapping[str, str] | None = None,
        etag: str = "",
    ) -> str:
        """Replaces the payload, the headers (all of them) or both, while delayed; the new etag.

        Whoever gets the message from any queue gets it changed then; it is not routed anew. With
        the `etag` of an entry that was read before, nobody else's change is overwritten. Raises
        as `cancel_entry`, Aborted (etag), InvalidArgument.
        """
        request = message_of(
            entry_pb2.EditMessageRequest,
            handle=handle,
            payload=None if payload is None else payload_bytes(payload),
            replace_headers=headers is not None,
            headers=headers,
            etag=etag,
        )
        return str(
            (await self._by_handle(handle, "EditMessage", request, stub_of=DelayedServiceStub)).etag
        )

    def watch_delayed(
        self, queue_id: str, *, position: str = "", view: EntryView | ViewName = EntryView.FULL
    ) -> DelayedWatch:
        """The messages that are delayed in a queue, each before it can be claimed, without end.

        As in::

            async with client.watch_delayed("reminders", position=kept) as watch:
                async for entry in watch:
                    look_at(entry.message.payload)
                    kept = watch.position

        Broken connections are opened again where it stopped. Kept for a later watch, `position`
        goes on there: from it no message is missed, some may come again.
        """
        check_text("queue_id", queue_id)
        check_text("position", position)
        return DelayedWatch(self._locations, queue_id, position, view_wire(view))

    async def _by_handle(
        self,
        handle: str,
        method: str,
        request: Any,
        *,
        stub_of: Callable[[grpc.aio.Channel], Any] = EntryServiceStub,
        before: Callable[[], None] | None = None,
    ) -> Any:
        has_place = handle.count("/") > 1
        return await self._ask(
            queue_of_handle(handle),
            method,
            request,
            stub_of=stub_of,
            wait_s=0.0 if has_place else SEARCH_S,
            before=before,
        )

    async def _ask(
        self,
        queue_id: str,
        method: str,
        request: Any,
        *,
        stub_of: Callable[[grpc.aio.Channel], Any] = EntryServiceStub,
        repeat_unknown: bool = True,
        wait_s: float = 0.0,
        before: Callable[[], None] | None = None,
    ) -> Any:
        """One call to the broker that has the queue; `before` is told of each try."""

        async def attempt(shard: int, timeout: float) -> Any:
            channel = await self._peers.broker(shard)
            if before is not None:
                before()
            call = getattr(stub_of(channel), method)
            return await call(request, timeout=timeout)

        return await self._locations.call(
            queue_id,
            attempt,
            attempt_s=ATTEMPT_S + wait_s,
            wait_s=wait_s,
            repeat_unknown=repeat_unknown,
        )


def _time_ms(field: str, time: Time | None) -> int:
    return 0 if time is None else time_ms(time, field)
