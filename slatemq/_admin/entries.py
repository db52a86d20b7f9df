"""Listing, finding and changing entries, messages in their queues; reading stored messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeVar

import grpc.aio

from slatemq._admin.entry_models import (
    Entry,
    EntryPage,
    EntryState,
    EntryView,
    SearchProgress,
    StateName,
    StoredMessage,
    ViewName,
    entry_of,
    keys_of,
    state_wire,
    stored_message,
    view_wire,
)
from slatemq._admin.merging import merged
from slatemq._admin.queue_calls import QueueCalls
from slatemq._admin.watching import DelayedWatch
from slatemq._cancelling import end_all
from slatemq._checks import check_on_progress, check_text, check_whole, iterable
from slatemq._consume.handles import (
    partition_of_handle,
    queue_of_handle,
    shard_of_handle,
)
from slatemq._requests import message_of
from slatemq._rpc.peers import ATTEMPT_S, QUEUE_MOVING, REFUSED, CallOptions, Method
from slatemq._rpc.queue_locations import (
    ANSWER_S,
    Calls,
    bounded,
    partitions_missing,
    without_partitions,
)
from slatemq._rpc.stored_runs import messages_of
from slatemq.errors import (
    DataLoss,
    DeadlineExceeded,
    NotFound,
    SlateMQError,
    Unavailable,
)
from slatemq.models import Payload, Time, optional_ms, payload_bytes
from slatemq.v1 import entry_pb2
from slatemq.v1.entry_pb2_grpc import DelayedServiceStub, EntryServiceStub
from slatemq.v1.ingest_pb2 import BatchGetMessagesRequest
from slatemq.v1.ingest_pb2_grpc import IngestServiceStub

Q = TypeVar("Q")
R = TypeVar("R")

SHARD_BITS: Final = 48
"""The lower bits of a message ID: its number within the ingest shard that the upper ones name."""

REQUEST_IDS_MAX: Final = 1_000

DAMAGED_IDS: Final = "message_ids"
"""The metadata of the error that names damaged messages, separated by commas."""

PAUSE_S: Final = 0.05
"""The pause after a response without payloads: the ingest has waited for them already."""


PAGE_SIZE = 1000
"""Entries that `list_entries` asks for at once: the most that the server returns."""

SEARCH_S = 3600.0
"""The limit of a search, by a handle without a place or for a message in all queues."""


class EntryCalls(Calls):
    """Listing, finding and changing entries, reading messages; a part of the client."""

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

        The last three options are for done and failed entries: the time when they finished. Entries
        that change their state meanwhile may be missing or come twice. Of a partitioned queue,
        finished ones are in one order of time, others partition by partition. Raises NotFound,
        InvalidArgument; Unavailable (INCOMPLETE) at the end when the brokers of some partitions did
        not answer: `metadata["broker_shards"]` names them; FailedPrecondition (PARTITIONS_MISSING)
        at the end when some do not exist.
        """
        check_text("queue_id", queue_id)
        bounds = finished_from, finished_until
        request = _request(queue_id, state, view, PAGE_SIZE, bounds, newest_first)
        shards = await self._locations.located(queue_id, fresh=True)
        problems: dict[int, SlateMQError] = {}
        parts = [self._entries_of(request, shards, one, problems) for one in range(len(shards))]
        if state_wire(state) in _FINISHED:
            sign = -1 if newest_first else 1
            entries = merged(parts, lambda entry: sign * entry.finished_at_ms)
        else:
            entries = _in_turn(parts)
        async for entry in entries:
            yield entry
        if problems:
            raise without_partitions(queue_id, shards, problems)

    async def _entries_of(
        self,
        wanted: entry_pb2.ListEntriesRequest,
        shards: Sequence[int],
        partition: int,
        problems: dict[int, SlateMQError],
    ) -> AsyncIterator[Entry]:
        """The entries of one partition; of several, `problems` has those that have no answer."""
        request = entry_pb2.ListEntriesRequest()
        request.CopyFrom(wanted)
        # The last one that may answer gets the patience of a call.
        is_last = len(problems) == len(shards) - 1
        options = {} if is_last else bounded(min(ANSWER_S, self._peers.call_s))
        while True:
            try:
                page = await self._locations.ask(
                    request.queue_id, _list_entries, request, partition, **options
                )
            except (Unavailable, DeadlineExceeded, NotFound) as error:
                if len(shards) == 1:
                    raise
                problems[partition] = error
                return
            keys = keys_of(request.view, self._encryption)
            for entry in page.entries:
                yield entry_of(entry, keys)
            request.page_token, options = page.next_page_token, {}
            if not page.next_page_token:
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
        """One page of `list_entries`, at most 1,000 entries; any page may be short.

        Of a partitioned queue the pages of each partition follow those of the one before. Where its
        broker does not answer, or does not have it, the page is empty, `problems` names the broker,
        and the next page is of the next partition.
        """
        bounds = finished_from, finished_until
        request = _request(queue_id, state, view, page_size, bounds, newest_first)
        check_text("page_token", page_token)
        partition, request.page_token = _split(page_token)
        is_first = not request.page_token
        shards = await self._locations.located(queue_id, fresh=is_first)
        is_partition = partition < len(shards) > 1
        options = bounded(min(ANSWER_S, self._peers.call_s)) if is_partition and is_first else {}
        problems: dict[int, SlateMQError] = {}
        try:
            page = await self._locations.ask(queue_id, _list_entries, request, partition, **options)
        except (Unavailable, DeadlineExceeded, NotFound) as error:
            if not is_partition:
                raise
            is_missing = isinstance(error, NotFound)
            problem = partitions_missing(queue_id, [partition]) if is_missing else error
            problems[shards[partition]] = problem
            page = entry_pb2.ListEntriesResponse()
        next_token = page.next_page_token
        if next_token and len(shards) > 1:
            next_token = f"{partition}{PAGE_OF}{next_token}"
        elif not next_token and partition + 1 < len(shards):
            next_token = f"{partition + 1}{PAGE_OF}"
        keys = keys_of(request.view, self._encryption)
        entries = [entry_of(each, keys) for each in page.entries]
        return EntryPage(entries, next_token, problems)

    async def get_entry(self, handle: str, *, view: EntryView | ViewName = EntryView.FULL) -> Entry:
        """One entry as it is now. A handle without a place makes this search the queue.

        Raises NotFound (ENTRY_UNKNOWN, QUEUE_NOT_FOUND), FailedPrecondition (HANDLE_STALE: it
        moved; list or find it again).
        """
        request = message_of(entry_pb2.GetEntryRequest, handle=handle, view=view_wire(view))
        response = await self._ask_entry(
            handle, lambda channel: EntryServiceStub(channel).GetEntry, request
        )
        return entry_of(response.entry, keys_of(request.view, self._encryption))

    async def find_message(
        self,
        message_id: int,
        queue_ids: Iterable[str] = (),
        *,
        on_progress: Callable[[SearchProgress], None] | None = None,
    ) -> AsyncIterator[Entry]:
        """The entries of a message in all queues (or these), as they are found, with attempts.

        Every broker reads every list from the message's receipt on: some seconds per million
        entries. Calls `on_progress` about once a second. Raises InvalidArgument; NotFound for
        a queue that does not exist; Unavailable, after what the others have, when a broker does not
        answer, or a queue is moving to another one.
        """
        if on_progress is not None:
            check_on_progress(on_progress)
        request = message_of(
            entry_pb2.FindMessageRequest, message_id=message_id, queue_ids=queue_ids
        )
        shards = await self._shards_to_search(request.queue_ids)
        found: asyncio.Queue[Entry | BaseException | None] = asyncio.Queue()
        progress: dict[int, SearchProgress] = {}

        def note(shard: int, response: entry_pb2.FindMessageResponse) -> None:
            progress[shard] = SearchProgress(
                response.queues_searched_count, response.queues_count, response.rows_read_count
            )
            if on_progress is not None:
                on_progress(SearchProgress(*map(sum, zip(*progress.values(), strict=True))))

        def end(search: asyncio.Task[None]) -> None:
            found.put_nowait(None if search.cancelled() else search.exception())

        work = [asyncio.create_task(self._search(one, request, found, note)) for one in shards]
        for search in work:
            search.add_done_callback(end)
        problem: BaseException | None = None
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
            await end_all(work)
        if problem is not None:
            raise problem

    async def _shards_to_search(self, queue_ids: Iterable[str]) -> Sequence[int]:
        """All shards of these queues, also of brokers that are down; without queues all there are.

        Raises NotFound: a broker does not know whether another one has a queue.
        """
        queues = QueueCalls(self._locations)
        shards: set[int] = set()
        for queue_id in queue_ids:
            with suppress(Unavailable, DeadlineExceeded):  # The search of its broker raises it.
                await queues.get_queue(queue_id)
            shards.update(await self._locations.located(queue_id, fresh=True))
        return sorted(shards) or await self._peers.broker_shards()

    async def _search(
        self,
        shard: int,
        request: entry_pb2.FindMessageRequest,
        found: asyncio.Queue[Entry | BaseException | None],
        note: Callable[[int, entry_pb2.FindMessageResponse], None],
    ) -> None:
        """Searches one broker. Raises its errors, and those of `note`."""
        known: set[str] = set()

        async def attempt(timeout: float) -> None:
            stub = EntryServiceStub(await self._peers.broker(shard))
            async for response in stub.FindMessage(request, timeout=timeout):
                for wire in response.entries:
                    if wire.handle not in known:  # A search that broke begins again.
                        known.add(wire.handle)
                        found.put_nowait(entry_of(wire, None))  # It has no payload.
                note(shard, response)

        def check(failure: SlateMQError) -> None:
            # What has left by the next try is on another broker, whose search may be over.
            if failure.reason == QUEUE_MOVING:
                raise failure

        await self._peers.call(attempt, attempt_s=SEARCH_S, wait_s=SEARCH_S, on_failure=check)

    async def cancel_entry(self, handle: str) -> None:
        """Removes an available or delayed entry from its queue: it will not be delivered.

        Where a try has no answer, and the next one does not find the entry, it counts as removed.
        Raises as `get_entry`, and FailedPrecondition (WRONG_STATE).
        """
        failures: list[SlateMQError] = []
        request = message_of(entry_pb2.CancelEntryRequest, handle=handle)
        try:
            await self._ask_entry(
                handle,
                lambda channel: EntryServiceStub(channel).CancelEntry,
                request,
                on_failure=failures.append,
            )
        except NotFound as error:
            # A try that failed may have cancelled it: its response got lost.
            is_open = any(one.reason not in REFUSED for one in failures)
            if not is_open or error.reason != "ENTRY_UNKNOWN":
                raise

    async def reschedule_entry(self, handle: str, visible_at: Time | None = None) -> Entry:
        """Sets the time from which an available or delayed entry may be claimed; None: now.

        Returns it with its new handle. Raises as `cancel_entry`.
        """
        request = message_of(
            entry_pb2.RescheduleEntryRequest,
            handle=handle,
            visible_at_ms=optional_ms(visible_at, "visible_at") or 0,
        )
        response = await self._ask_entry(
            handle, lambda channel: EntryServiceStub(channel).RescheduleEntry, request
        )
        return entry_of(response.entry, None)  # It has no payload.

    async def edit_message(
        self,
        handle: str,
        *,
        payload: Payload | None = None,
        headers: Mapping[str, str] | None = None,
        etag: str = "",
    ) -> str:
        """Replaces the payload, all headers or both of a delayed message; returns the new etag.

        All queues deliver the changed message; it is not routed again. With the `etag` of an entry
        that was read before, no other change is overwritten. Raises as `cancel_entry`, Aborted
        (etag), InvalidArgument (also a payload without headers, by a client without `encryption`,
        for an encrypted message). With `encryption`, a message that gets a payload alone is read
        first, and is Aborted where another change comes between.
        """
        content = None if payload is None else payload_bytes(payload)
        if self._encryption is not None and content is not None:
            if headers is None:
                before = await self.get_entry(handle)
                etag = etag or before.etag
                headers = before.message.headers if before.message is not None else {}
            content, headers = self._encryption.seal(content, headers)
        request = message_of(
            entry_pb2.EditMessageRequest,
            handle=handle,
            payload=content,
            replace_headers=headers is not None,
            headers={} if headers is None else headers,
            etag=etag,
        )
        response = await self._ask_entry(
            handle, lambda channel: DelayedServiceStub(channel).EditMessage, request
        )
        return response.etag

    def watch_delayed(
        self, queue_id: str, *, position: str = "", view: EntryView | ViewName = EntryView.FULL
    ) -> DelayedWatch:
        """The messages that are delayed in a queue, each before it can be claimed, without end.

        As in::

            async with client.watch_delayed("reminders", position=kept) as watch:
                async for entry in watch:
                    look_at(entry.message.payload)
                    kept = watch.position

        A broken stream is opened again where it stopped. A later watch from a stored `position`
        misses no message; some may come again.
        """
        check_text("queue_id", queue_id)
        check_text("position", position)
        return DelayedWatch(self._locations, queue_id, position, view_wire(view), self._encryption)

    async def read_messages(self, message_ids: Iterable[int]) -> dict[int, StoredMessage]:
        """The messages with these IDs, headers and payload; without those that were removed.

        Returns a message past its retention while it is stored. Keeps all payloads in memory at
        once. Raises DeadlineExceeded when a payload cannot be read in time; DataLoss where stored
        messages are damaged: `metadata["message_ids"]` names them all, separated by commas; read
        the others without them.
        """
        by_shard: dict[int, list[int]] = {}
        given = iterable("message_ids", "whole numbers", message_ids)
        for place, message_id in enumerate(dict.fromkeys(given)):
            check_whole(f"message_ids[{place}]", message_id, 1)
            by_shard.setdefault(message_id >> SHARD_BITS, []).append(message_id)
        found: dict[int, StoredMessage] = {}
        damaged: list[int] = []
        for shard, ids in by_shard.items():
            for begin in range(0, len(ids), REQUEST_IDS_MAX):
                await self._read_messages(
                    shard, ids[begin : begin + REQUEST_IDS_MAX], found, damaged
                )
        if damaged:
            others = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            raise DataLoss(
                f"message {damaged[0]}{others}: the stored bytes are damaged",
                metadata={DAMAGED_IDS: ",".join(map(str, damaged))},
            )
        return found

    async def _read_messages(
        self, shard: int, ids: Sequence[int], found: dict[int, StoredMessage], damaged: list[int]
    ) -> None:
        """Asks until each is found or missing: one response has up to 32 MiB of payloads."""
        left = list(ids)
        until = time.monotonic() + self._peers.call_s
        while left:
            answer = await self._peers.ask_ingest(
                shard,
                lambda channel: IngestServiceStub(channel).BatchGetMessages,
                BatchGetMessagesRequest(message_ids=left),
            )
            settled = set(answer.missing_ids)
            for message in messages_of(answer.runs):
                found[message.message_id] = stored_message(message, self._encryption)
                settled.add(message.message_id)
            damaged += answer.damaged_ids
            if settled:
                until = time.monotonic() + self._peers.call_s
            elif time.monotonic() > until:
                raise DeadlineExceeded(f"the payload of message {left[0]} takes too long to read")
            else:
                await asyncio.sleep(PAUSE_S)
            left = [message_id for message_id in left if message_id not in settled]

    async def _ask_entry(
        self,
        handle: str,
        method: Method[Q, R],
        request: Q,
        on_failure: Callable[[SlateMQError], None] | None = None,
    ) -> R:
        """Calls a method of the broker that has the entry of this handle.

        A handle that does not name its partition is shown to all of them.
        """
        queue_id = queue_of_handle(handle)
        has_place = handle.count("/") > 1
        wait_s = 0.0 if has_place else SEARCH_S
        options: CallOptions = {
            "attempt_s": ATTEMPT_S + wait_s,
            "wait_s": wait_s,
            "on_failure": on_failure,
        }
        partition = await self._partition_of(handle)
        if partition is not None:
            return await self._locations.ask(queue_id, method, request, partition, **options)

        attempt = self._locations.asking(queue_id, method, request)
        outcomes = await self._locations.outcomes(queue_id, attempt, **options)
        errors = [one for one in outcomes if isinstance(one, SlateMQError)]
        for one in outcomes:
            if not isinstance(one, SlateMQError):
                return one
        # One that does not answer may have it: the others do not.
        raise next((one for one in errors if not isinstance(one, NotFound)), errors[0])

    async def _partition_of(self, handle: str) -> int | None:
        """The partition that a handle, or the lease in it, names; None where it names none."""
        partition, shard = partition_of_handle(handle), shard_of_handle(handle)
        if partition is None and shard is not None:
            shards = await self._locations.shards_of(queue_of_handle(handle))
            partition = shards.index(shard) if shard in shards else None
        return partition


PAGE_OF: Final = "/"
"""Between the index of a partition and the token of its page."""

_FINISHED: Final = frozenset(map(state_wire, ("done", "failed", "archived")))


def _split(page_token: str) -> tuple[int, str]:
    """The partition of a page, and the token that its broker knows."""
    index, _, token = page_token.rpartition(PAGE_OF)
    return int(index) if index.isdecimal() else 0, token


def _request(
    queue_id: str,
    state: EntryState | StateName,
    view: EntryView | ViewName,
    page_size: int,
    bounds: tuple[Time | None, Time | None],
    newest_first: bool,
) -> entry_pb2.ListEntriesRequest:
    """`bounds`: of the time when entries finished."""
    return message_of(
        entry_pb2.ListEntriesRequest,
        queue_id=queue_id,
        state=state_wire(state),
        page_size=page_size,
        view=view_wire(view),
        finished_from_ms=optional_ms(bounds[0], "finished_from") or 0,
        finished_until_ms=optional_ms(bounds[1], "finished_until") or 0,
        newest_first=newest_first,
    )


def _list_entries(
    channel: grpc.aio.Channel,
) -> grpc.aio.UnaryUnaryMultiCallable[entry_pb2.ListEntriesRequest, entry_pb2.ListEntriesResponse]:
    return EntryServiceStub(channel).ListEntries


async def _in_turn(parts: Iterable[AsyncIterator[Entry]]) -> AsyncIterator[Entry]:
    for part in parts:
        async for entry in part:
            yield entry
