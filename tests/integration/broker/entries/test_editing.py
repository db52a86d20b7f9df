"""Editing delayed messages: whoever gets one, gets it whole, old or new as the answer says."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from libs.serving.peers.topology import Peer, TopologyDirectory
from services.broker.delivery import late_fetches
from services.broker.delivery.message_cache import IngestMessages
from services.broker.entries import editor as editing_module
from services.broker.entries.editor import Find, replacement
from services.broker.entries.handles import parse_handle
from slatemq.errors import (
    Aborted,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from slatemq.v1 import assignment_pb2, entry_pb2, message_pb2
from tests.claimed_runs import ClaimedMessage
from tests.entry_stubs import EntryStubs
from tests.integration.broker.entries.delayed_rows import watches
from tests.integration.broker.moves.movers import route
from tests.integration.broker.rig import Disk, Ingest, Rig, memory_root, refusal, running
from tests.manual_clock import ManualClock

MINUTE = 60_000


class Editing:
    """Edits messages of the queue `q`, found where its journal says that they were put."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._payloads = rig.delivery._payloads
        self._watches = watches(rig)
        self._editor = rig.broker.editor

    async def edit(self, message_id: int, caller: Any = None, **fields: object) -> str:
        fields.setdefault("payload", b"new")
        wanted = replacement(entry_pb2.EditMessageRequest(**fields))  # type: ignore[arg-type]
        wanted.message_id = message_id
        return await self._editor.edit(wanted, await self._find(message_id), caller)

    async def _find(self, message_id: int) -> Find:
        queue = self._rig.owner.shard.queues["q"]
        watch = self._watches.watch("q", "", entry_pb2.ENTRY_VIEW_UNSPECIFIED)
        async with aclosing(watch) as answers:
            entries = (await anext(answers)).entries
        handles = [parse_handle(one.handle, 0) for one in entries]
        places = [one.waiting for one in handles if one.message_id == message_id]

        def find(_: int) -> int:
            item = queue.waiting.find(places[0], message_id) if places and places[0] else None
            if item is None:
                raise NotFound("entry", str(message_id), reason="ENTRY_UNKNOWN")
            return item.visible_at_ms

        return find


async def delayed(rig: Rig, *ids: int, by_ms: int = MINUTE, queue_id: str = "q") -> None:
    await rig.assign(ids, queue_id, visible_at_ms=[rig.clock.now_ms() + by_ms] * len(ids))


async def poll(condition: object) -> None:
    async with asyncio.timeout(60):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.001)


def payloads(claimed: list[ClaimedMessage]) -> list[bytes]:
    return [one.message.payload for one in claimed]


async def test_who_claims_after_an_edit_gets_the_new_content_whatever_was_in_memory() -> None:
    async with running() as rig:
        await rig.create()
        await rig.create("other")
        await delayed(rig, 1)
        await delayed(rig, 2)
        # Another queue has handed it out already, so the broker holds the message as it was.
        await rig.assign([1], "other")
        assert payloads(await rig.claim("other")) == [b"%010d" % 1]
        editing = Editing(rig)

        assert await editing.edit(1, headers={"a": "b"}, replace_headers=True) == "edited"

        rig.clock.advance(MINUTE)
        first, second = await rig.claim(max_messages=2)
        assert first.message.payload == b"new"
        assert dict(first.message.headers) == {"a": "b"}
        assert second.message.payload == b"%010d" % 2


async def test_an_edit_ends_once_routing_here_has_passed_the_message_of_a_queue_that_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(editing_module, "LOOKS", 5)
    async with running() as rig:
        await rig.create()
        await rig.assign([5], visible_at_ms=[rig.clock.now_ms() + MINUTE])
        assert rig.owner.shard.cursors[0] == 1
        editing = Editing(rig)

        with pytest.raises(Unavailable, match="message 5 is not assigned yet"):
            await editing.edit(5)
        await route(rig, 5)
        assert await editing.edit(5) == "edited"


async def test_what_is_not_named_is_kept() -> None:
    async with running() as rig:
        await rig.create()
        await delayed(rig, 1)
        editing = Editing(rig)
        await editing.edit(1, payload=b"")
        await editing.edit(1, payload=None, headers={}, replace_headers=True)
        kept = [(one.keep_payload, one.keep_headers) for one in rig.ingest.edits]
        assert kept == [(False, True), (True, False)]
        for nothing in ({"payload": None}, {"headers": {"a": "b"}}):
            with pytest.raises(InvalidArgument):
                await editing.edit(1, **nothing)
        assert len(rig.ingest.edits) == 2


async def test_while_an_edit_runs_the_entry_is_not_delivered() -> None:
    async with running() as rig:
        await rig.create()
        await delayed(rig, 1, 2)
        rig.ingest.edit_gate.clear()
        editing = asyncio.create_task(Editing(rig).edit(1))
        await poll(lambda: rig.ingest.edits)
        # Its time comes, and someone waits.
        rig.clock.advance(2 * MINUTE)
        assert payloads(await rig.claim(max_messages=9, wait_ms=100)) == [b"%010d" % 2]
        claiming = asyncio.create_task(rig.claim(max_messages=9, wait_ms=30_000))
        await delayed(rig, 3, by_ms=0)
        assert payloads(await claiming) == [b"%010d" % 3]
        waiting = asyncio.create_task(rig.claim(max_messages=9, wait_ms=60_000))
        rig.ingest.edit_gate.set()
        assert await editing == "edited"
        assert payloads(await waiting) == [b"new"]


async def test_only_a_delayed_message_is_edited() -> None:
    async with running() as rig:
        await rig.create()
        await delayed(rig, 1, 2)
        editing = Editing(rig)
        find = await editing._find(1)
        rig.clock.advance(MINUTE)
        wanted = replacement(entry_pb2.EditMessageRequest(payload=b"x"))
        wanted.message_id = 1
        with pytest.raises(FailedPrecondition) as refused:
            await editing._editor.edit(wanted, find, None)
        assert refused.value.reason == "WRONG_STATE"
        assert len(await rig.claim(max_messages=2)) == 2
        with pytest.raises(NotFound):
            await editing._editor.edit(wanted, find, None)
        assert rig.ingest.edits == []


async def test_what_ingest_refuses_is_reported_and_the_entry_is_free_again() -> None:
    async with running() as rig:
        await rig.create()
        await delayed(rig, 1)
        editing = Editing(rig)
        with pytest.raises(Aborted) as refused:
            await editing.edit(1, etag="another")
        assert refused.value.etag == "e1"
        rig.ingest.down = True
        with pytest.raises(Unavailable):
            await editing.edit(1)
        rig.ingest.down = False
        rig.clock.advance(MINUTE)
        assert payloads(await rig.claim()) == [b"%010d" % 1]


class Clerk:
    """May edit what is not secret, and counts how often that was asked."""

    def __init__(self) -> None:
        self.judged_count = 0

    def require_edit(self, headers: Mapping[str, str], direct_queue_id: str) -> None:
        self.judged_count += 1
        if "secret" in headers:
            raise PermissionDenied("it is secret")


@pytest.mark.parametrize("etag", ["", "e1"])
async def test_an_edit_is_judged_by_the_headers_that_it_replaces(etag: str) -> None:
    async with running() as rig:
        await rig.create()
        await delayed(rig, 1)
        for headers, payload in (({"a": "1"}, b"new"), ({"secret": "1"}, b"theirs")):
            # Given an edit that was permitted and is not made yet
            clerk = Clerk()
            rig.ingest.edit_gate.clear()
            rig.ingest.edits.clear()
            editing = asyncio.create_task(Editing(rig).edit(1, clerk, etag=etag))
            await poll(lambda: rig.ingest.edits)

            # When another one gives the message other headers
            rig.ingest.replaced[1] = message_pb2.Message(
                message_id=1, payload=b"theirs", headers=headers
            )
            rig.ingest.edit_gate.set()
            if "secret" in headers:
                with pytest.raises(PermissionDenied):
                    await editing
            else:
                await editing

            # Then it is judged by these
            assert clerk.judged_count == 2
            assert rig.ingest.replaced[1].payload == payload


async def test_an_edit_whose_etag_does_not_fit_is_refused_at_once() -> None:
    async with running() as rig:
        await rig.create()
        await delayed(rig, 1)
        clerk = Clerk()
        with pytest.raises(Aborted):
            await Editing(rig).edit(1, clerk, etag="other")
        assert clerk.judged_count == 1


async def test_an_edit_goes_on_when_its_caller_has_gone() -> None:
    async with running() as rig:
        await rig.create()
        await delayed(rig, 1)
        rig.ingest.edit_gate.clear()
        editing = asyncio.create_task(Editing(rig).edit(1))
        await poll(lambda: rig.ingest.edits)
        editing.cancel()
        rig.clock.advance(MINUTE)
        assert await rig.claim() == []
        rig.ingest.edit_gate.set()
        assert payloads(await rig.claim(wait_ms=60_000)) == [b"new"]


async def test_a_read_that_an_edit_has_overtaken_is_not_delivered() -> None:
    async with running() as rig:
        await rig.create()
        await rig.create("other")
        await delayed(rig, 1)
        await rig.assign([1], "other")
        rig.ingest.read_gate.clear()
        claiming = asyncio.create_task(rig.claim("other", wait_ms=60_000))
        await poll(lambda: rig.ingest.reads)
        await Editing(rig).edit(1)
        rig.ingest.read_gate.set()
        assert payloads(await claiming) == [b"new"]


class SlowShard(Ingest):
    """Ingests of which shard 1 answers when a test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = asyncio.Event()

    async def fetch(self, shard: int, ids: Sequence[int], max_bytes: int) -> IngestMessages:
        fetched = await super().fetch(shard, ids, max_bytes)
        if shard == 1:
            await self.slow.wait()
        return fetched


async def test_what_was_read_for_a_claim_before_an_edit_is_not_handed_out_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(late_fetches, "LATE_S", 600.0)
    ingest = SlowShard()
    async with running(ingest=ingest) as rig:
        await rig.create()
        await rig.create("other")
        await delayed(rig, 1)
        await rig.assign([1], "other")
        elsewhere = (1 << 48) + 1
        there = assignment_pb2.QueueAssignment(queue_id="other", message_ids=[elsewhere])
        piece = assignment_pb2.LogRange(
            ingest_shard=1, last_sequence=elsewhere, assignments=[there], config_revision=2
        )
        request = assignment_pb2.AssignRequest(ranges=[piece])
        await rig.assignments.Assign(request)
        # The claim has one message, and waits for the other one.
        claiming = asyncio.create_task(rig.claim("other", max_messages=2))
        await poll(lambda: len(ingest.reads) == 2)
        await Editing(rig).edit(1)
        ingest.slow.set()
        assert payloads(await claiming) == [b"new", b"%010d" % elsewhere]


async def test_another_broker_hands_out_nothing_that_it_held_before_an_edit() -> None:
    disk, clock, ingest = Disk(), ManualClock(), Ingest()
    root = memory_root(disk)
    async with running(root, clock, ingest, disk) as rig:
        await rig.create()
        await delayed(rig, 1)
        async with running(root, clock, ingest, disk, shard=1) as other:
            await other.create("there")
            await other.assign([1], "there")
            (claimed,) = await other.claim("there")
            assert claimed.message.payload == b"%010d" % 1
            await other.nack(claimed.lease_token)

            await Editing(rig).edit(1)

            assert payloads(await other.claim("there")) == [b"new"]
            address = other.running.peer_address
        # While it is down no one knows what it hands out.
        await TopologyDirectory(root.objects).announce(Peer("broker", 1, address))
        with pytest.raises(Unavailable) as refused:
            await Editing(rig).edit(1)
        assert refused.value.reason == "BROKER_DOWN"
        async with running(root, clock, ingest, disk, shard=1):
            assert await Editing(rig).edit(1) == "edited"


@pytest.mark.parametrize("message_id", [0, -1, 1 << 62])
async def test_only_a_message_can_be_forgotten(message_id: int) -> None:
    async with running() as rig:
        stub = EntryStubs(rig.channel)
        request = entry_pb2.ForgetMessageRequest(message_id=message_id)
        code, _, field = await refusal(stub.ForgetMessage(request))
        assert (code, field) == (grpc.StatusCode.INVALID_ARGUMENT, "message_id")


async def test_edits_that_run_are_bounded_also_when_their_callers_have_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(editing_module, "RUNNING_BYTES_MAX", 1000)
    async with running() as rig:
        await rig.create()
        await delayed(rig, 1)
        rig.ingest.edit_gate.clear()
        editing = Editing(rig)
        first = asyncio.create_task(editing.edit(1, payload=bytes(5000)))
        await poll(lambda: rig.ingest.edits)
        first.cancel()
        with pytest.raises(ResourceExhausted) as refused:
            await editing.edit(1)
        assert refused.value.reason == "TOO_MANY_EDITS"
        rig.ingest.edit_gate.set()
        await poll(lambda: not editing._editor._running)
        assert await editing.edit(1) == "edited"
