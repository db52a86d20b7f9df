"""Events of a broker's changes: which there are, in which order, and none is lost by a kill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from libs.events.slatemq.headers import EVENTS_HEADER
from libs.storage.layout.own_keys import EVENT_COUNTER_KEY, events_range
from slatemq.events.envelope import format_timestamp
from slatemq.v1 import consumer_pb2, entry_pb2, events_pb2, events_pb2_grpc, queue_pb2
from tests.event_backend import EventServer
from tests.integration.broker.entry_calls import (
    DELAYED,
    FAILED,
    MINUTE,
    cancel,
    entries,
    fail,
    listed,
    redriven,
    reschedule,
)
from tests.integration.broker.moves.movers import route
from tests.integration.broker.queue_calls import delete, update
from tests.integration.broker.rig import Disk, Ingest, Rig, memory_root, running
from tests.manual_clock import ManualClock


@pytest.fixture
async def server() -> EventServer:
    return EventServer()


@pytest.fixture
def events_on(server: EventServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of a broker that publishes to the server."""
    return {"queue": server.use(monkeypatch)}


async def pause(rig: Rig, queue_id: str = "q") -> None:
    await rig.queues.PauseQueue(queue_pb2.PauseQueueRequest(queue_id=queue_id))


async def resume(rig: Rig, queue_id: str = "q") -> None:
    await rig.queues.ResumeQueue(queue_pb2.ResumeQueueRequest(queue_id=queue_id))


async def purge(rig: Rig, *states: queue_pb2.EntryState.ValueType) -> int:
    request = queue_pb2.PurgeQueueRequest(queue_id="q", states=states)
    return (await rig.queues.PurgeQueue(request)).purged_count


async def status(rig: Rig) -> events_pb2.GetEventsStatusResponse:
    stub: Any = events_pb2_grpc.EventsServiceStub(rig.channel)
    answer: events_pb2.GetEventsStatusResponse = await stub.GetEventsStatus(
        events_pb2.GetEventsStatusRequest()
    )
    return answer


async def rows(rig: Rig) -> int:
    assert rig.service.database is not None
    return sum([len(some) async for some in rig.service.database.scan(*events_range(0))])


async def until_deleted(rig: Rig) -> None:
    async with asyncio.timeout(60):
        while await rows(rig):
            await asyncio.sleep(0.02)


async def test_each_change_of_a_queue_has_its_event_in_order(
    server: EventServer, events_on: dict[str, Any]
) -> None:
    async with running(settings=events_on) as rig:
        created = await rig.create(max_attempts=1)
        updated = await update(rig, ["max_attempts"], max_attempts=2)
        await pause(rig)
        await pause(rig)  # which changes nothing
        await resume(rig)
        await rig.assign([1, 2, 3])
        assert await purge(rig, queue_pb2.ENTRY_STATE_AVAILABLE, FAILED) == 3
        await delete(rig)
        await server.has(6)
        await until_deleted(rig)
        at = await status(rig)

    first = server.events[0]
    assert server.received("queue", "max_attempts", "revision") == [
        ("queue.created", "q", 1, created.revision),
        ("queue.updated", "q", 2, updated.revision),
        ("queue.paused", "q", None, None),
        ("queue.resumed", "q", None, None),
        ("queue.purged", "q", None, None),
        ("queue.deleted", "q", None, None),
    ]
    assert first.source == "broker-0"
    assert first.timestamp == format_timestamp(created.created_at_ms)
    assert first.data["filter"] == created.filter
    states = ["available", "delayed", "failed"]
    assert server.events[4].data == {"queue": "q", "states": states, "messages": 3}
    assert (at.enabled, at.answering, at.cursor, at.lag_count) == (True, True, 6, 0)


@pytest.mark.parametrize(
    ("given", "emptied"),
    [
        ([], ["available", "delayed"]),
        ([queue_pb2.ENTRY_STATE_AVAILABLE], ["available", "delayed"]),
        ([DELAYED], ["available", "delayed"]),
        ([queue_pb2.ENTRY_STATE_AVAILABLE, DELAYED], ["available", "delayed"]),
        ([FAILED, DELAYED], ["available", "delayed", "failed"]),
    ],
)
async def test_the_event_of_a_purge_names_all_states_that_it_empties(
    server: EventServer,
    events_on: dict[str, Any],
    given: list[queue_pb2.EntryState.ValueType],
    emptied: list[str],
) -> None:
    async with running(settings=events_on) as rig:
        await rig.create()
        late = rig.clock.now_ms() + MINUTE
        await rig.assign([1, 2, 3], visible_at_ms=[0, late, late])
        assert await purge(rig, *given) == 3
        await server.has(2)

    assert server.received("states", "messages")[1:] == [("queue.purged", emptied, 3)]


async def test_a_purge_that_removes_nothing_has_no_event(
    server: EventServer, events_on: dict[str, Any]
) -> None:
    async with running(settings=events_on) as rig:
        await rig.create()
        assert await purge(rig) == 0
        assert await purge(rig, queue_pb2.ENTRY_STATE_DONE) == 0
        await delete(rig)
        await server.has(2)

    assert server.received() == [("queue.created",), ("queue.deleted",)]


async def test_each_change_of_a_message_has_its_event(
    server: EventServer, events_on: dict[str, Any]
) -> None:
    clock, ingest = ManualClock(), Ingest()
    async with running(clock=clock, ingest=ingest, settings=events_on) as rig:
        await rig.create(max_attempts=1, lease_ms=1000)
        await rig.create("other")
        late = clock.now_ms() + MINUTE
        await rig.assign([1, 2, 3], visible_at_ms=[late] * 3)
        await route(rig, 3)
        handles = {one.message_id: one.handle for one in await listed(rig, DELAYED)}
        await cancel(rig, handles[1])
        await reschedule(rig, handles[2], late + MINUTE)
        edit = entry_pb2.EditMessageRequest(handle=handles[3], payload=b"new")
        await entries(rig).EditMessage(edit)
        await fail(rig, [11], "broken")
        await rig.assign([12, 13])
        claimed = await rig.claim(max_messages=2)
        command = consumer_pb2.FailCommand(lease_token=claimed[0].lease_token, reason="bad")
        await rig.consumers.Execute(
            consumer_pb2.ExecuteRequest(commands=[consumer_pb2.Command(fail=command)])
        )
        await rig.pass_time(2000)
        await redriven(rig, target_queue_id="other", message_ids=[11], request_id="move")
        dead_letters = {one.message_id: one.handle for one in await listed(rig, FAILED)}
        settlement = entry_pb2.DeadLetterSettlement(
            handle=dead_letters[13], redrive=entry_pb2.RedriveDeadLetter()
        )
        await entries(rig).SettleDeadLetters(
            entry_pb2.SettleDeadLettersRequest(
                settlements=[settlement], request_id="settle", consumer_id="me"
            )
        )
        await server.has(9)

    names = ("message_id", "queue", "visible_at", "attempts", "reason", "target")
    assert server.received(*names)[2:] == [
        ("message.cancelled", 1, "q", None, None, None, None),
        ("message.rescheduled", 2, "q", format_timestamp(late + MINUTE), None, None, None),
        ("message.dead_lettered", 11, "q", None, 1, "nack: broken", None),
        ("message.dead_lettered", 12, "q", None, 1, "fail: bad", None),
        ("message.dead_lettered", 13, "q", None, 1, "lease expired", None),
        ("message.redriven", 11, "q", None, None, None, "other"),
        ("message.redriven", 13, "q", None, None, None, "q"),
    ]
    assert [event.request_id for event in server.events[-2:]] == ["move", "settle"]
    # The edit is committed by the ingest, which is told of the queue.
    assert [(one.message_id, one.queue_id) for one in ingest.edits] == [(3, "q")]


async def test_a_message_is_rescheduled_to_a_time_that_has_no_date(
    server: EventServer, events_on: dict[str, Any]
) -> None:
    clock = ManualClock()
    async with running(clock=clock, settings=events_on) as rig:
        await rig.create()
        await rig.assign([1], visible_at_ms=[clock.now_ms() + MINUTE])
        (entry,) = await listed(rig, DELAYED)
        await reschedule(rig, entry.handle, 1 << 62)
        (entry,) = await listed(rig, DELAYED)
        assert entry.visible_at_ms == 1 << 62
        await server.has(2)

    assert server.events[-1].data["visible_at"] == "9999-12-31T23:59:59.999Z"


async def test_an_event_is_published_when_its_change_is_durable_and_not_before(
    server: EventServer, events_on: dict[str, Any]
) -> None:
    disk = Disk()
    async with running(disk=disk, settings=events_on) as rig:
        await rig.create("first")
        await server.has(1)
        disk.free.clear()
        creating = asyncio.create_task(rig.create("second"))
        while "second" not in rig.owner.shard.queues:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        assert len(server.events) == 1
        disk.free.set()
        await creating
        await server.has(2)


async def test_a_broker_replaced_before_it_sent_leaves_its_events_to_the_next(
    server: EventServer, events_on: dict[str, Any]
) -> None:
    root, clock = memory_root(Disk()), ManualClock()
    server.up = False
    async with running(root, clock, settings=events_on) as first:
        for name in "abc":
            await first.create(name)
        await fail_one(first)
        at = await status(first)
        assert not await is_connected(first)
        async with running(root, clock, settings=events_on) as second:  # as after a SIGKILL
            await second.create("d")
            server.up = True
            await server.has(6)
            assert await is_connected(second)

    assert (at.answering, at.lag_count) == (False, 5)
    assert at.last_error == "the backend is down"
    assert server.received("queue") == [
        *(("queue.created", name) for name in ("a", "b", "c", "q")),
        ("message.dead_lettered", "q"),
        ("queue.created", "d"),
    ]


async def is_connected(rig: Rig) -> bool:
    """What `GET /health` says of the backend."""
    health = rig.service.http_parts.queue_health
    assert health is not None
    return (await health()).connected


async def fail_one(rig: Rig) -> None:
    await rig.create(max_attempts=1)
    await fail(rig, [1])


async def test_a_broker_replaced_after_it_sent_publishes_again_with_the_same_ids(
    server: EventServer, events_on: dict[str, Any]
) -> None:
    root, clock = memory_root(Disk()), ManualClock()
    server.gate.clear()
    async with running(root, clock, settings=events_on) as first:
        await first.create("a")
        await server.has(1)
        await first.create("b")
        async with running(root, clock, settings=events_on):
            server.gate.set()
            await server.has(2)
    async with running(root, clock, settings=events_on) as third:
        await third.create("c")
        await server.has(3)

    ids = [event.id for event in server.events]
    assert len(ids) > len(set(ids)), "the first came again"
    assert server.received("queue") == [("queue.created", name) for name in "abc"]


async def test_dead_letters_have_events_though_their_queue_goes_in_the_same_commit(
    server: EventServer, events_on: dict[str, Any]
) -> None:
    disk = Disk()
    async with running(disk=disk, settings=events_on) as rig:
        await rig.create(max_attempts=1)
        await rig.assign([1, 2, 3])
        claimed = await rig.claim(max_messages=3)
        queue = rig.owner.shard.queues["q"]
        calls: list[asyncio.Task[Any]] = []

        async def begin(call: Coroutine[Any, Any, Any], until: Callable[[], bool]) -> None:
            calls.append(asyncio.create_task(call))
            await server.until(until)

        disk.free.clear()
        await begin(rig.create("other"), lambda: "other" in rig.owner.shard.queues)
        nacks = [one.lease_token for one in claimed]
        await begin(rig.nack(*nacks[:2]), lambda: queue.failed.count == 2)
        await begin(purge(rig, FAILED), lambda: not queue.failed.count)
        await begin(rig.nack(nacks[2]), lambda: queue.failed.count == 1)
        await begin(delete(rig), lambda: "q" not in rig.owner.shard.queues)
        disk.free.set()
        await asyncio.gather(*calls)
        await server.has(7)

    assert server.received("queue", "message_id")[2:] == [
        ("message.dead_lettered", "q", 1),
        ("message.dead_lettered", "q", 2),
        ("queue.purged", "q", None),
        ("message.dead_lettered", "q", 3),
        ("queue.deleted", "q", None),
    ]


async def test_ten_thousand_dead_letters_of_one_commit_come_in_order_and_their_rows_go(
    server: EventServer, events_on: dict[str, Any]
) -> None:
    async with running(settings=events_on) as rig:
        await rig.create(max_attempts=1)
        await fail(rig, range(1, 10_001))
        await server.has(10_001)
        await until_deleted(rig)

    assert [number for _, number in server.received("message_id")[1:]] == list(range(1, 10_001))


async def test_direct_mode_stores_nothing_of_events_and_says_so() -> None:
    async with running() as rig:
        await fail_one(rig)
        at = await status(rig)
        assert rig.service.database is not None
        assert await rig.service.database.get(EVENT_COUNTER_KEY) is None
        assert await rows(rig) == 0

        assert rig.service.http_parts.queue_health is None

    assert not at.enabled


async def test_fire_and_forget_gives_up_what_a_broker_left(
    server: EventServer, events_on: dict[str, Any]
) -> None:
    root, clock = memory_root(Disk()), ManualClock()
    dropped = {"queue": msgspec.structs.replace(events_on["queue"], consistency="fire-and-forget")}
    server.up = False
    async with running(root, clock, settings=events_on) as rig:
        await rig.create("a")
    server.up = True
    async with running(root, clock, settings=dropped) as rig:
        await rig.create("b")
        await server.has(1)
        await until_deleted(rig)

    assert server.received("queue") == [("queue.created", "b")]


async def test_queues_of_the_backend_slatemq_have_no_events(
    server: EventServer, events_on: dict[str, Any]
) -> None:
    settings = {"queue": msgspec.structs.replace(events_on["queue"], backend="slatemq")}
    async with running(settings=settings) as rig:
        await rig.create(max_attempts=1, filter=f'headers["{EVENTS_HEADER}"] == "slatemq"')
        await fail(rig, [1])
        await delete(rig)
        await rig.create("after")
        await server.has(1)

    assert server.received("queue") == [("queue.created", "after")]
