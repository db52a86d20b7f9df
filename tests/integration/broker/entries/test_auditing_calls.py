"""WatchDelayed and EditMessage as calls: what they answer, and how they refuse."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from services.broker.entries import delayed as delayed_watch
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.v1 import entry_pb2, queue_pb2
from tests.entry_stubs import EntryStubs
from tests.integration.broker.moves.movers import route
from tests.integration.broker.rig import Rig, refusal, running

MINUTE = 60_000
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def entries(rig: Rig) -> EntryStubs:
    return EntryStubs(rig.channel)


async def first_answer(rig: Rig, **fields: Any) -> entry_pb2.WatchDelayedResponse:
    call = entries(rig).WatchDelayed(entry_pb2.WatchDelayedRequest(**fields), timeout=60)
    try:
        async for answer in call:
            first: entry_pb2.WatchDelayedResponse = answer
            return first
    finally:
        call.cancel()
    raise AssertionError("a watch has no end")


async def delayed(rig: Rig, *ids: int) -> None:
    at = rig.clock.now_ms() + MINUTE
    await rig.assign(ids, visible_at_ms=[at] * len(ids), priorities=[7] * len(ids))


@pytest.mark.parametrize("view", entry_pb2.EntryView.values())
async def test_a_watch_shows_as_much_of_an_entry_as_its_view_says(
    view: entry_pb2.EntryView.ValueType,
) -> None:
    async with running() as rig:
        rig.ingest.header_bytes = 3
        await rig.create()
        await delayed(rig, 5)
        (entry,) = (await first_answer(rig, queue_id="q", view=view)).entries
        assert (entry.queue_id, entry.message_id, entry.priority) == ("q", 5, 7)
        assert entry.state == queue_pb2.ENTRY_STATE_DELAYED
        assert entry.visible_at_ms == rig.clock.now_ms() + MINUTE
        with_message = view in (entry_pb2.ENTRY_VIEW_HEADERS, entry_pb2.ENTRY_VIEW_FULL)
        assert entry.HasField("message") == with_message
        assert entry.etag == ("e5" if with_message else "")
        assert dict(entry.message.headers) == ({"big": "xxx"} if with_message else {})
        assert bool(entry.message.payload) == (view == entry_pb2.ENTRY_VIEW_FULL)


async def test_what_a_watch_shows_can_be_edited_by_its_handle() -> None:
    async with running() as rig:
        await rig.create()
        await delayed(rig, 5, 6)
        _, entry = (await first_answer(rig, queue_id="q", view=entry_pb2.ENTRY_VIEW_FULL)).entries
        request = entry_pb2.EditMessageRequest(
            handle=entry.handle, etag=entry.etag, payload=b"repaired"
        )
        await route(rig, 6)
        answer = await entries(rig).EditMessage(request)
        assert answer.etag == "edited"
        rig.clock.advance(MINUTE)
        claimed = await rig.claim(max_messages=2)
        assert [one.message.payload for one in claimed] == [b"%010d" % 5, b"repaired"]
        code, reason, _ = await refusal(entries(rig).EditMessage(request))
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")


async def test_a_watch_of_nothing_answers_at_once_and_shows_where_to_go_on() -> None:
    async with running() as rig:
        await rig.create()
        answer = await first_answer(rig, queue_id="q")
        assert not answer.entries
        await delayed(rig, 1)
        answer = await first_answer(rig, queue_id="q", position=answer.position)
        assert [entry.message_id for entry in answer.entries] == [1]
        answer = await first_answer(rig, queue_id="q", position=answer.position)
        assert not answer.entries


async def test_watches_end_when_the_broker_drains() -> None:
    async with running() as rig:
        await rig.create()
        call = entries(rig).WatchDelayed(entry_pb2.WatchDelayedRequest(queue_id="q"), timeout=60)
        answers = aiter(call)
        await anext(answers)
        rig.signals.first.set()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await anext(answers)
        assert from_rpc_error(ended.value).reason == "DRAINING"


async def test_more_streams_than_are_allowed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as rig:
        await rig.create()
        monkeypatch.setattr(rig.broker.watches._shares, "_max", 1)
        assert delayed_watch.STREAMS_MAX == 1000
        call = entries(rig).WatchDelayed(entry_pb2.WatchDelayedRequest(queue_id="q"), timeout=60)
        await anext(aiter(call))
        code, reason, _ = await refusal(first_answer(rig, queue_id="q"))
        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS")
        call.cancel()
        async with asyncio.timeout(60):
            while rig.broker.watches._streams:
                await asyncio.sleep(0.01)
        await first_answer(rig, queue_id="q")


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("queue_id", {}),
        ("queue_id", {"queue_id": "a b"}),
        ("queue_id", {"queue_id": "q" * 256}),
        ("view", {"queue_id": "q", "view": 99}),
        ("position", {"queue_id": "q", "position": "x"}),
        ("position", {"queue_id": "q", "position": "A" * 24}),
    ],
)
async def test_bad_watches_name_their_field(field: str, fields: dict[str, Any]) -> None:
    async with running() as rig:
        await rig.create()
        code, _, result = await refusal(first_answer(rig, **fields))
        assert (code, result) == (INVALID, field)


async def test_the_watch_of_an_unknown_queue_is_refused() -> None:
    async with running() as rig:
        code, reason, _ = await refusal(first_answer(rig, queue_id="q"))
        assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "QUEUE_NOT_FOUND")


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("handle", {"payload": b"x"}),
        ("handle", {"payload": b"x", "handle": "q"}),
        ("handle", {"payload": b"x", "handle": "q/zz/"}),
        ("handle", {"payload": b"x", "handle": "q/5/nowhere"}),
        ("payload", {"handle": "q/5"}),
        ("payload", {"handle": "q/5", "etag": "e5"}),
        ("headers", {"handle": "q/5", "payload": b"x", "headers": {"a": "b"}}),
    ],
)
async def test_bad_edits_name_their_field_and_change_nothing(
    field: str, fields: dict[str, Any]
) -> None:
    async with running() as rig:
        await rig.create()
        await delayed(rig, 5)
        code, _, result = await refusal(
            entries(rig).EditMessage(entry_pb2.EditMessageRequest(**fields))
        )
        assert (code, result) == (INVALID, field)
        assert rig.ingest.edits == []


@pytest.mark.parametrize(
    ("reason", "handle"),
    [("QUEUE_NOT_FOUND", "other/5"), ("ENTRY_UNKNOWN", "q/6"), ("ENTRY_UNKNOWN", "q/6/p1")],
)
async def test_edits_of_what_is_not_there_are_refused(reason: str, handle: str) -> None:
    async with running() as rig:
        await rig.create()
        await delayed(rig, 5)
        request = entry_pb2.EditMessageRequest(handle=handle, payload=b"x")
        code, result, _ = await refusal(entries(rig).EditMessage(request))
        assert (code, result) == (grpc.StatusCode.NOT_FOUND, reason)
        assert rig.ingest.edits == []


async def test_an_edit_under_an_old_etag_returns_the_current_one() -> None:
    async with running() as rig:
        await rig.create()
        await delayed(rig, 5)
        request = entry_pb2.EditMessageRequest(handle="q/5", payload=b"x", etag="old")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await entries(rig).EditMessage(request)
        assert refused.value.code() == grpc.StatusCode.ABORTED
        assert from_rpc_error(refused.value).metadata["etag"] == "e5"
