"""Entries and redrives from brokers that break off: found everywhere, watched without a gap."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import slatemq
from slatemq import EntryPage, EntryState, Redrive, RedriveState, SearchProgress
from slatemq.errors import InvalidArgument, NotFound, SlateMQError, Unavailable
from slatemq.v1 import entry_pb2, entry_pb2_grpc, queue_pb2
from tests.integration.client.peers import Broker, Instance, refuse

DOWN = Unavailable("draining", retry_after_ms=1)


def entry(message_id: int, queue_id: str = "q") -> entry_pb2.Entry:
    return entry_pb2.Entry(
        handle=f"{queue_id}/{message_id:x}/",
        queue_id=queue_id,
        message_id=message_id,
        state=queue_pb2.ENTRY_STATE_DELAYED,
    )


@dataclass
class Entries(
    entry_pb2_grpc.EntryServiceServicer,
    entry_pb2_grpc.DelayedServiceServicer,
    entry_pb2_grpc.DeadLetterServiceServicer,
):
    """Some entries of a broker; answers get lost `lose` times, streams break after each answer.

    The queue moves during the first `moving` cancellations, and `cancelled` ones are gone then.
    """

    queue_id: str = "q"
    count: int = 5
    lose: int = 0
    moving: int = 0
    breaks: int = 0
    positions: list[str] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    redrives: dict[str, entry_pb2.Redrive] = field(default_factory=dict)
    calls: list[Any] = field(default_factory=list)

    async def _answered(self, request: Any, context: Any) -> None:
        self.calls.append(request)
        if self.lose:
            self.lose -= 1
            await refuse(context, DOWN)

    async def CancelRedrive(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def GetEntry(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def SettleDeadLetters(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def RescheduleEntry(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def ResumeRedrive(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def ListEntries(self, request: Any, context: Any) -> Any:  # noqa: N802
        first = int(request.page_token or "0")
        part = range(first, min(first + 2, self.count))
        token = str(part.stop) if part.stop < self.count else ""
        await self._answered(request, context)
        entries = [entry(n + 1) for n in part]
        return entry_pb2.ListEntriesResponse(entries=entries, next_page_token=token)

    async def FindMessage(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[entry_pb2.FindMessageResponse]:
        found = [entry(request.message_id, f"{self.queue_id}-{n}") for n in range(self.count)]
        for n, one in enumerate(found):
            yield entry_pb2.FindMessageResponse(
                entries=[one], queues_searched_count=n + 1, queues_count=self.count
            )
            if self.breaks:
                self.breaks -= 1
                await refuse(context, DOWN)

    async def WatchDelayed(  # noqa: N802
        self, request: Any, context: Any
    ) -> AsyncIterator[entry_pb2.WatchDelayedResponse]:
        self.positions.append(request.position)
        first = int(request.position or "0")
        yield entry_pb2.WatchDelayedResponse(position=str(first))  # a heartbeat
        for n in range(first, self.count, 2):
            entries = [entry(n + 1), entry(n + 2)]
            yield entry_pb2.WatchDelayedResponse(entries=entries, position=str(n + 2))
            if self.breaks:
                self.breaks -= 1
                await refuse(context, DOWN)
        await asyncio.Event().wait()

    async def CancelEntry(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.moving:
            self.moving -= 1
            moving = Unavailable("it is moving", reason="QUEUE_MOVING", retry_after_ms=1)
            await refuse(context, moving)
        if request.handle in self.cancelled:
            error = NotFound("entry", request.handle, reason="ENTRY_UNKNOWN")
            await refuse(context, error)
        self.cancelled.add(request.handle)
        await self._answered(request, context)
        return entry_pb2.CancelEntryResponse()

    async def ForgetMessage(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError  # for brokers

    async def EditMessage(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._answered(request, context)
        return entry_pb2.EditMessageResponse(etag="new")

    async def StartRedrive(self, request: Any, context: Any) -> Any:  # noqa: N802
        redrive = entry_pb2.Redrive(
            redrive_id="r1",
            queue_id=request.queue_id,
            target_queue_id=request.target_queue_id or request.queue_id,
            rate=request.rate,
            state=entry_pb2.Redrive.STATE_RUNNING,
            total_count=3,
        )
        self.redrives.setdefault(request.request_id, redrive)
        await self._answered(request, context)
        return entry_pb2.StartRedriveResponse(redrive=self.redrives[request.request_id])

    async def GetRedrive(self, request: Any, context: Any) -> Any:  # noqa: N802
        for redrive in self.redrives.values():
            if redrive.redrive_id == request.redrive_id:
                redrive.redriven_count += 1
                if redrive.redriven_count == redrive.total_count:
                    redrive.state = entry_pb2.Redrive.STATE_DONE
                return entry_pb2.GetRedriveResponse(redrive=redrive)
        return await refuse(context, NotFound("redrive", request.redrive_id))

    async def ListRedrives(self, request: Any, context: Any) -> Any:  # noqa: N802
        return entry_pb2.ListRedrivesResponse(redrives=list(self.redrives.values()))


async def serve(instance: Instance, *brokers: Entries) -> None:
    for shard, entries in enumerate(brokers):
        # Every queue is on the last one.
        kind: Any = Broker  # which does not serve everything
        broker = kind(exists=shard == len(brokers) - 1, queue_shard=len(brokers) - 1)
        await instance.serve(broker=broker, entries=entries, broker_shard=shard)


@pytest.fixture
async def client(instance: Instance) -> AsyncIterator[slatemq.Client]:
    """Asks where everybody is at its first call, when the test's brokers are there."""
    made = slatemq.connect(instance.endpoint)
    async with asyncio.timeout(60):
        yield made
        await made.close()


async def test_a_listing_goes_through_all_its_pages(
    instance: Instance, client: slatemq.Client
) -> None:
    entries = Entries(lose=2)
    await serve(instance, Entries(), entries)
    items = [one async for one in client.list_entries("q", "in-flight", newest_first=True)]
    assert [one.message_id for one in items] == [1, 2, 3, 4, 5]
    assert {call.state for call in entries.calls} == {queue_pb2.ENTRY_STATE_IN_FLIGHT}
    assert all(call.newest_first for call in entries.calls)

    page = await client.entry_page("q", EntryState.DELAYED, page_size=2, page_token="2")
    assert [one.message_id for one in page.entries] == [3, 4]
    assert page.next_page_token == "4"


class Unpaged(Entries):
    """A broker that is down behind the first page of anything."""

    async def ListEntries(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.page_token:
            await refuse(context, DOWN)
        return await super().ListEntries(request, context)

    async def ListRedrives(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.page_token:
            await refuse(context, DOWN)
        first = await super().ListRedrives(request, context)
        return entry_pb2.ListRedrivesResponse(redrives=first.redrives, next_page_token="2")


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (Entries(lose=1 << 30), [[1, 2], [], [1, 2], [3]]),
        (Unpaged(count=4), [[1, 2], [1, 2], [], [1, 2], [3]]),
    ],
    ids=["down", "down behind a page"],
)
async def test_pages_go_on_behind_a_partition_that_does_not_answer_and_name_it(
    instance: Instance, second: Entries, found: list[list[int]]
) -> None:
    kind: Any = Broker
    for shard, entries in enumerate((Entries(count=2), second, Entries(count=3))):
        broker = kind(partition_shards=[0, 1, 2])
        await instance.serve(broker=broker, entries=entries, broker_shard=shard)
    pages: list[EntryPage] = []
    token = ""
    async with slatemq.connect(instance.endpoint, call_timeout=2) as client:
        while token or not pages:
            pages.append(await client.entry_page("q", "delayed", page_token=token))
            token = pages[-1].next_page_token

    assert [[one.message_id for one in page.entries] for page in pages] == found
    silent = [page for page in pages if page.problems]
    assert [list(page.problems) for page in silent] == [[1]]
    assert silent[0].problems[1].message == "draining"
    assert not silent[0].entries


async def test_a_page_of_a_queue_without_partitions_whose_broker_is_down_is_refused(
    instance: Instance,
) -> None:
    await serve(instance, Entries(lose=1 << 30), Entries(lose=1 << 30))
    async with slatemq.connect(instance.endpoint, call_timeout=1) as client:
        with pytest.raises(Unavailable, match="draining"):
            await client.entry_page("q", "delayed")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"state": "lost"}, "state"),
        ({"state": None}, "state"),
        ({"state": "done", "view": "everything"}, "view"),
        ({"state": "done", "finished_from": "today"}, "finished_from"),
    ],
)
async def test_bad_wishes_are_named(
    client: slatemq.Client, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await client.entry_page("q", **options)
    assert refused.value.field == field


@pytest.mark.parametrize("handle", ["", "q", "q/", "/1"])
async def test_what_is_no_handle_is_refused(client: slatemq.Client, handle: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await client.get_entry(handle)
    assert refused.value.field == "handle"


async def test_a_message_is_found_at_all_brokers_once_though_searches_break(
    instance: Instance, client: slatemq.Client
) -> None:
    await serve(instance, Entries("a"), Entries("b", breaks=2))
    progress: list[SearchProgress] = []
    items = [one.handle async for one in client.find_message(7, on_progress=progress.append)]
    assert sorted(items) == sorted(f"{name}-{n}/7/" for name in "ab" for n in range(5))
    assert progress[-1] == SearchProgress(10, 10, 0)


async def test_a_broker_that_stays_down_does_not_hide_what_others_found(
    instance: Instance,
) -> None:
    await serve(instance, Entries("a"), Entries("b", breaks=1 << 30))
    async with slatemq.connect(instance.endpoint, call_timeout=2) as client:
        items: list[str] = []

        async def find() -> None:
            async for one in client.find_message(7):
                items.append(one.queue_id)  # noqa: PERF401 - what came before the error counts

        with pytest.raises(Unavailable):
            await find()
    assert {f"a-{n}" for n in range(5)} < set(items)


async def test_a_search_ends_with_what_its_callback_raises(
    instance: Instance, client: slatemq.Client
) -> None:
    await serve(instance, Entries("a"), Entries("b"))

    def fail(progress: SearchProgress) -> None:
        raise ZeroDivisionError

    async def find() -> None:
        async with asyncio.timeout(30):
            async for _ in client.find_message(7, on_progress=fail):
                pass

    with pytest.raises(ZeroDivisionError):
        await find()


async def test_a_queue_whose_place_cannot_be_asked_may_have_moved() -> None:
    # Not entered, which would ask the address
    client = slatemq.connect("127.0.0.1:1", call_timeout=0.2)
    locations = client._locations
    try:
        assert await locations.may_have_moved("q", 0, NotFound("queue", "q"))
        assert not await locations.may_have_moved("q", 0, NotFound("message", "7"))
        assert not await locations.may_have_moved("q", None, NotFound("queue", "q"))
    finally:
        await client.close()


async def test_a_watch_goes_on_where_its_stream_broke(
    instance: Instance, client: slatemq.Client
) -> None:
    entries = Entries(count=10, breaks=3)
    await serve(instance, entries)
    async with client.watch_delayed("q") as watch:
        result, positions = [], []
        for _ in range(10):
            result.append((await anext(watch)).message_id)
            positions.append(watch.position)
    # Each once, in order, and the position never runs ahead of what was taken
    assert result == list(range(1, 11))
    assert positions == ["0", "2", "2", "4", "4", "6", "6", "8", "8", "10"]
    assert entries.positions == ["", "2", "4", "6"]


async def test_closing_a_watch_ends_its_waiters(instance: Instance, client: slatemq.Client) -> None:
    await serve(instance, Entries(count=0))
    watch = client.watch_delayed("q")
    waiting = asyncio.create_task(anext(watch, None))
    while watch.position != "0":
        await asyncio.sleep(0.01)
    await watch.close()
    assert await waiting is None


async def test_a_cancellation_whose_answer_got_lost_is_none_the_less_one(
    instance: Instance, client: slatemq.Client
) -> None:
    await serve(instance, Entries(lose=1))
    await client.cancel_entry("q/1/")
    with pytest.raises(NotFound):
        await client.cancel_entry("q/1/")


async def test_an_entry_that_went_while_its_queue_moved_counts_as_no_cancellation(
    instance: Instance, client: slatemq.Client
) -> None:
    # Given an entry that a consumer gets before the queue has moved
    await serve(instance, Entries(moving=2, cancelled={"q/1/"}))
    with pytest.raises(NotFound):
        await client.cancel_entry("q/1/")


async def test_an_edit_says_what_stays(instance: Instance, client: slatemq.Client) -> None:
    entries = Entries()
    await serve(instance, entries)
    assert await client.edit_message("q/1/", payload="text") == "new"
    await client.edit_message("q/1/", headers={})
    text, headers = entries.calls
    assert text.HasField("payload")
    assert not text.replace_headers
    assert not headers.HasField("payload")
    assert headers.replace_headers
    with pytest.raises(InvalidArgument) as refused:
        await client.edit_message("q/1/", headers={"a": 1})  # type: ignore[dict-item]
    assert refused.value.field == "headers['a']"
    # A repeat is answered as the first try was, with an etag, too.
    entries.lose = 1
    assert await client.edit_message("q/1/", payload=b"", etag="old") == "new"


async def test_redrives_are_found_by_their_id_and_waited_for(
    instance: Instance, client: slatemq.Client
) -> None:
    entries = Entries(lose=2)
    await serve(instance, Entries(), entries)
    begun = await client.start_redrive("q", into="other", rate=5, message_ids=[1, 2])
    assert (begun.broker_shard, begun.target_queue_id, begun.rate) == (1, "other", 5)
    assert len(entries.redrives) == 1
    assert (await client.get_redrive("r1")).broker_shard == 1
    assert [one.redrive_id async for one in client.list_redrives()] == ["r1"]
    with pytest.raises(NotFound):
        await client.get_redrive("r2")

    seen: list[Redrive] = []
    ended = await client.wait_redrive(begun, on_progress=seen.append, every=0.01)
    assert ended.state is RedriveState.DONE
    assert [one.redriven_count for one in seen] == [2, 3]


def redrive(redrive_id: str, queue_id: str, target_queue_id: str = "") -> entry_pb2.Redrive:
    return entry_pb2.Redrive(
        redrive_id=redrive_id,
        queue_id=queue_id,
        target_queue_id=target_queue_id or queue_id,
        request_id="today",
        state=entry_pb2.Redrive.STATE_RUNNING,
    )


async def test_redrives_of_several_queues_with_one_request_id_are_listed_apart(
    instance: Instance, client: slatemq.Client
) -> None:
    mine = [redrive("0-1", "q"), redrive("0-2", "r"), redrive("0-3", "q", "other")]
    other = redrive("1-1", "q")  # of another partition
    await serve(
        instance,
        Entries(redrives={one.redrive_id: one for one in mine}),
        Entries(redrives={"1-1": other}),
    )
    listed = [one.redrive_id async for one in client.list_redrives()]
    assert listed == ["0-1+1-1", "0-2", "0-3"]


async def test_a_broker_that_is_down_behind_its_first_page_of_redrives_hides_no_other(
    instance: Instance,
) -> None:
    first = Unpaged(redrives={"0-1": redrive("0-1", "q")})
    await serve(instance, first, Entries(redrives={"1-1": redrive("1-1", "r")}))
    found: list[str] = []
    async with slatemq.connect(instance.endpoint, call_timeout=2) as client:

        async def read() -> None:
            async for one in client.list_redrives():
                found.append(one.redrive_id)  # noqa: PERF401 - what came before the error counts

        with pytest.raises(Unavailable) as refused:
            await read()
    assert found == ["0-1", "1-1"]
    assert (refused.value.reason, refused.value.metadata) == ("INCOMPLETE", {"broker_shards": "0"})


async def test_bad_redrives_are_refused_before_they_are_sent(client: slatemq.Client) -> None:
    for options in ({"rate": 1 << 40}, {"message_ids": ["x"]}, {"filter": 7}):
        with pytest.raises(SlateMQError) as refused:
            await client.start_redrive("q", **options)
        assert isinstance(refused.value, InvalidArgument)
