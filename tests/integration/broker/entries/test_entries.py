"""Entries of a real broker by their handles: what is shown of them, and where they went."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from libs.access.callers import Callers
from libs.access.current import current_caller
from libs.access.policy import Policy
from libs.access.reloading import ReloadedFile
from services.broker.entries import finder as entry_finding
from services.broker.rpc.entries import EntryServicer
from slatemq.v1 import entry_pb2, queue_pb2
from tests.integration.broker.entry_calls import (
    AVAILABLE,
    DELAYED,
    DONE,
    FAILED,
    IN_FLIGHT,
    cancel,
    entries,
    find,
    get,
    listed,
    one_of_each,
    redriven,
    reschedule,
)
from tests.integration.broker.rig import Rig, refusal, running
from tests.manual_clock import ManualClock

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
REFUSED = grpc.StatusCode.FAILED_PRECONDITION
MINUTE = 60_000

BASIC = entry_pb2.ENTRY_VIEW_UNSPECIFIED
ATTEMPTS = entry_pb2.ENTRY_VIEW_ATTEMPTS
HEADERS = entry_pb2.ENTRY_VIEW_HEADERS
FULL = entry_pb2.ENTRY_VIEW_FULL
NO_VIEW: Any = 9


# --- What an entry tells ---------------------------------------------------------


async def test_an_entry_shows_all_of_its_state_also_after_a_restart(tmp_path: Path) -> None:
    clock = ManualClock()
    began_ms = clock.now_ms()
    async with running(tmp_path, clock) as rig:
        handles = await one_of_each(rig)
        assert sorted(handles) == [1, 2, 3, 4, 5]
        before = {number: await get(rig, handle, ATTEMPTS) for number, handle in handles.items()}
        assert [before[n].handle for n in before] == [handles[n] for n in before]
    async with running(tmp_path, clock) as rig:
        for number, handle in handles.items():
            entry = await get(rig, handle, ATTEMPTS)
            assert entry == before[number]
            assert (entry.queue_id, entry.message_id) == ("q", number)
            without = await get(rig, handle)
            assert not without.attempts
            entry.ClearField("attempts")
            assert without == entry
    assert [before[n].state for n in range(1, 6)] == [AVAILABLE, DELAYED, IN_FLIGHT, DONE, FAILED]
    assert [before[n].priority for n in range(1, 6)] == [128, 128, 9, 0, 11]
    assert [before[n].attempts_count for n in range(1, 6)] == [0, 0, 1, 1, 1]
    assert before[2].visible_at_ms == began_ms + MINUTE
    assert (before[3].consumer_id, before[3].claimed_at_ms) == ("worker", began_ms)
    assert before[3].lease_deadline_ms > began_ms
    assert (before[4].consumer_id, before[4].finished_at_ms) == ("worker", began_ms)
    assert (before[5].reason, before[5].finished_at_ms) == ("nack: broken", began_ms)
    [attempt] = before[5].attempts
    assert (attempt.consumer_id, attempt.claimed_at_ms) == ("worker", began_ms)
    assert attempt.outcome == "nack: broken"


async def test_views_show_as_much_as_is_asked() -> None:
    async with running() as rig:
        handles = await one_of_each(rig)
        rig.ingest.header_bytes = 3
        for number, handle in handles.items():
            basic, headers, full = [await get(rig, handle, view) for view in (BASIC, HEADERS, FULL)]
            assert not basic.HasField("message")
            assert not basic.etag
            assert (dict(headers.message.headers), headers.message.payload) == ({"big": "xxx"}, b"")
            assert headers.etag == full.etag == f"e{number}"
            assert full.message.payload == b"%010d" % number
        # An entry is shown without a message that is gone, and not while its ingest is down.
        rig.ingest.gone = {1}
        assert not (await get(rig, handles[1], FULL)).HasField("message")
        assert (await get(rig, handles[2], FULL)).HasField("message")
        rig.ingest.down = True
        refused = await refusal(get(rig, handles[1], HEADERS))
        assert refused[0] == grpc.StatusCode.UNAVAILABLE
        assert (await get(rig, handles[1], ATTEMPTS)).message_id == 1


# --- Handles ------------------------------------------------------------------------


async def test_every_kind_of_place_leads_to_the_entry() -> None:
    async with running() as rig:
        handles = await one_of_each(rig)
        assert [handles[n].split("/")[2][0] for n in range(1, 6)] == ["a", "a", "i", "d", "f"]
        now_ms = rig.clock.now_ms()
        for number, handle in handles.items():
            for place in ("", "/", f"/p{now_ms}", f"/p{now_ms + 500}", f"/p{now_ms - MINUTE}"):
                entry = await get(rig, f"q/{number:x}{place}")
                assert entry == await get(rig, handle)
        await rig.assign([6])
        [claimed] = await rig.claim(consumer_id="c")
        lease = f"q/1/l{claimed.lease_token}"
        assert (await get(rig, lease)).state == IN_FLIGHT
        await rig.ack(claimed.lease_token)
        assert (await get(rig, lease)).state == DONE, "a small queue is searched"
        # A lease of another broker says nothing, nor does one of another message.
        assert (await get(rig, f"q/6/l3f-{1:016x}")).state == AVAILABLE
        assert (await get(rig, f"q/6/l{claimed.lease_token}")).state == AVAILABLE


async def test_an_entry_is_followed_wherever_it_has_gone_however_deep_the_queue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(entry_finding, "SMALL_QUEUE", -1)  # so nothing is searched whole
    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        await rig.create(max_attempts=2)
        await rig.assign([1])
        [entry] = await listed(rig, AVAILABLE)
        stale = [entry.handle, f"q/1/p{clock.now_ms()}"]

        async def is_now(state: int) -> None:
            clock.advance(10)
            items = [await get(rig, handle) for handle in stale]
            assert [one.state for one in items] == [state] * len(items)
            if items[0].handle not in stale:
                stale.append(items[0].handle)

        await is_now(AVAILABLE)
        later = await reschedule(rig, entry.handle, clock.now_ms() + MINUTE)
        await is_now(DELAYED)
        far = await reschedule(rig, later.handle, later.visible_at_ms + MINUTE)
        later = await reschedule(rig, far.handle, later.visible_at_ms)
    async with running(tmp_path, clock) as rig:
        # It does not wait soon behind where it was last, but before: the answer says so.
        assert (await refusal(get(rig, far.handle)))[:2] == (REFUSED, "HANDLE_STALE")
        await is_now(DELAYED)
        clock.advance(MINUTE)
        await is_now(AVAILABLE)
        [claimed] = await rig.claim()
        await is_now(IN_FLIGHT)
        await rig.nack(claimed.lease_token)
        await is_now(AVAILABLE)
        [claimed] = await rig.claim()
        await is_now(IN_FLIGHT)
    async with running(tmp_path, clock) as rig:
        await rig.nack(claimed.lease_token)
        await is_now(FAILED)
        await redriven(rig)
        await is_now(AVAILABLE)
        [claimed] = await rig.claim()
        await rig.ack(claimed.lease_token)
        await is_now(DONE)
        refused = await refusal(get(rig, f"q/1/l{claimed.lease_token}"))
        assert refused[:2] == (REFUSED, "HANDLE_STALE")
        assert (await get(rig, "q/1")).state == DONE, "without a place it is searched"
        assert (await refusal(get(rig, "q/2")))[:2] == (NOT_FOUND, "ENTRY_UNKNOWN")


async def test_a_search_shows_no_queue_that_the_policy_has_hidden_since_its_start(
    tmp_path: Path,
) -> None:
    file = tmp_path / "policy.yaml"

    def permit(queues: str) -> None:
        roles = f"roles: {{r: [{{verbs: [inspect], queues: ['{queues}']}}]}}"
        file.write_text(f"{roles}\nbindings: [{{principals: [auditor], roles: [r]}}]")

    permit("*")
    policy = ReloadedFile.of_document(file, Policy)
    async with running() as rig:
        for queue_id in ("a", "b"):
            await rig.create(queue_id)
            await rig.assign([1], queue_id)
        [servicer] = [one for one in rig.service.servicers() if isinstance(one, EntryServicer)]
        identity = await Callers(policy).identify("", ["auditor"])
        before = current_caller.set(identity.caller)
        seen: list[str] = []
        call = SimpleNamespace(add_done_callback=lambda _: None)
        async for answer in servicer.FindMessage(entry_pb2.FindMessageRequest(message_id=1), call):
            seen += [entry.queue_id for entry in answer.entries]
            if seen == ["a"]:
                permit("elsewhere")
                policy.reload()
        current_caller.reset(before)

    assert seen == ["a"]


async def test_what_is_past_its_retention_or_purged_is_in_the_queue_no_more() -> None:
    async with running() as rig:
        await rig.create()
        await rig.assign([1, 2], retention_deadlines_ms=[rig.clock.now_ms() + MINUTE] * 2)
        handles = [one.handle for one in await listed(rig, AVAILABLE)]
        rig.clock.advance(MINUTE)
        for handle in (*handles, "q/1"):
            assert (await refusal(get(rig, handle)))[:2] == (NOT_FOUND, "ENTRY_UNKNOWN")
            assert (await refusal(cancel(rig, handle)))[:2] == (NOT_FOUND, "ENTRY_UNKNOWN")
        assert not any(answer.entries for answer in await find(rig, 1))
        await rig.assign([3])
        [entry] = await listed(rig, AVAILABLE)
        purge = queue_pb2.PurgeQueueRequest(queue_id="q", states=[AVAILABLE, DELAYED])
        await rig.queues.PurgeQueue(purge)
        assert (await refusal(get(rig, entry.handle)))[:2] == (NOT_FOUND, "ENTRY_UNKNOWN")


# --- Bad input ------------------------------------------------------------------------

BAD_HANDLES = [
    "",
    "/1",
    "a b/1",
    "q",
    "q/",
    "q/x",
    "q/A",
    "q/-1",
    "q/" + "f" * 16,
    "q/" + "1" * 17,
    "q/1/x",
    "q/1/a1.r",
    "q/1/a256.r.1",
    "q/1/a1.q.1",
    "q/1/a1.r." + "f" * 16,
    "q/1/i" + "f" * 16,
    "q/1/d",
    "q/1/f" + "1" * 17,
    "q/1/p-1",
    "q/1/p" + "9" * 16,
    "q/1/l",
    "q/1/lx",
    "q/1/d1/",
    "q/1/p١",
]

Call = Callable[[Rig, str], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "get": get,
    "cancel": cancel,
    "reschedule": lambda rig, handle: reschedule(rig, handle, 5),
    "edit": lambda rig, handle: entries(rig).EditMessage(
        entry_pb2.EditMessageRequest(handle=handle, payload=b"x")
    ),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))


@each_call
async def test_what_is_no_handle_is_refused_and_nothing_changes(call: Call) -> None:
    async with running() as rig:
        await one_of_each(rig)
        before = await rig.counts()
        for handle in BAD_HANDLES:
            code, _, field = await refusal(call(rig, handle))
            assert (handle, code, field) == (handle, INVALID, "handle")
        for handle in ("none/1", "none/1/p5", f"none/1/a1.r.{1 << 53:x}"):
            assert (await refusal(call(rig, handle)))[:2] == (NOT_FOUND, "QUEUE_NOT_FOUND")
        orders = ("0", "1", f"{(1 << 54) - 1:x}")
        places = [f"{dead_letter}{order}" for dead_letter in "idf" for order in orders]
        places += [f"a{priority}.{kind}.{order}" for priority in (0, 128, 255)
                   for kind in "rt" for order in orders]  # fmt: skip
        for place in ["", "p0", "p" + "9" * 15, f"l0-{1:016x}", *places]:
            refused = await refusal(call(rig, f"q/63/{place}"))
            assert (place, *refused[:2]) == (place, NOT_FOUND, "ENTRY_UNKNOWN")
        assert await rig.counts() == before
        assert not rig.ingest.edits


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("GetEntry", entry_pb2.GetEntryRequest(handle="q/1", view=NO_VIEW), "view"),
        ("FindMessage", entry_pb2.FindMessageRequest(), "message_id"),
        ("FindMessage", entry_pb2.FindMessageRequest(message_id=-1), "message_id"),
        ("FindMessage", entry_pb2.FindMessageRequest(message_id=1 << 62), "message_id"),
        (
            "FindMessage",
            entry_pb2.FindMessageRequest(message_id=1, queue_ids=["q", "a b"]),
            "queue_ids[1]",
        ),
        (
            "RescheduleEntry",
            entry_pb2.RescheduleEntryRequest(handle="q/1", visible_at_ms=-1),
            "visible_at_ms",
        ),
        ("EditMessage", entry_pb2.EditMessageRequest(handle="q/2"), "payload"),
        ("WatchDelayed", entry_pb2.WatchDelayedRequest(queue_id="a b"), "queue_id"),
        ("WatchDelayed", entry_pb2.WatchDelayedRequest(queue_id="q", view=NO_VIEW), "view"),
    ],
    ids=str,
)
async def test_other_bad_input_names_its_field(method: str, request_: Any, field: str) -> None:
    async with running() as rig:
        await one_of_each(rig)
        before = await rig.counts()
        call = getattr(entries(rig), method)(request_)
        answer = call if hasattr(call, "__await__") else anext(aiter(call))
        code, _, result = await refusal(answer)
        assert (code, result) == (INVALID, field)
        assert await rig.counts() == before
