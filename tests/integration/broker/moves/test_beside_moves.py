"""What goes on while a queue moves: edits of its messages, redrives, purges."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.broker.core.queue import Queue
from services.broker.moves import departures
from slatemq.v1 import entry_pb2, queue_pb2
from tests.claimed_runs import ClaimedMessage
from tests.integration.broker.entry_calls import (
    DELAYED,
    entries,
    fail,
    listed,
    redriven,
    start,
)
from tests.integration.broker.moves.movers import begin_move, move, route, then, two_brokers
from tests.integration.broker.rig import Ingest, Rig, introduce, refusal, running
from tests.manual_clock import ManualClock


async def edit(rig: Rig) -> None:
    """Edits the one delayed message of q."""
    (entry,) = await listed(rig, DELAYED)
    request = entry_pb2.EditMessageRequest(handle=entry.handle, payload=b"new")
    await entries(rig).EditMessage(request)


@asynccontextmanager
async def edited_in_a_move(
    folder: Path,
) -> AsyncIterator[tuple[Rig, Rig, list[asyncio.Future[None]], ClaimedMessage]]:
    """Two brokers, and a move from the first in whose midst an edit begins, which stands still.

    The queue has message 1 delayed, and 2 in flight.
    """
    clock, ingest = ManualClock(), Ingest()
    async with (
        running(folder, clock=clock, ingest=ingest, shard=0) as first,
        running(folder, clock=clock, ingest=ingest, shard=1) as second,
    ):
        await introduce(first, second)
        await first.create("q")
        await first.assign([1, 2], visible_at_ms=[clock.now_ms() + 60_000, 0])
        (in_flight,) = await first.claim()
        await route(second, 2)
        edits = list[asyncio.Future[None]]()

        async def begin_edit() -> None:
            if not edits:
                edits.append(asyncio.ensure_future(edit(first)))
                while not ingest.edits:
                    await asyncio.sleep(0.01)

        ingest.edit_gate.clear()
        then(first.broker.departures._targets, "check", begin_edit)
        yield first, second, edits, in_flight


async def test_a_queue_stays_as_it_is_where_an_edit_of_a_message_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departures, "EDITS_S", 0.0)
    async with edited_in_a_move(tmp_path) as (first, second, edits, in_flight):
        waiting = asyncio.ensure_future(first.claim(wait_ms=60_000))
        async with asyncio.timeout(60):
            while not first.delivery.has_waiters("q"):
                await asyncio.sleep(0.01)

        assert (await refusal(begin_move(first, second)))[1] == "QUEUE_MOVING"

        assert await first.ack(in_flight.lease_token) == [0]
        first.clock.advance(61_000)
        first.ingest.edit_gate.set()
        await asyncio.gather(*edits)
        (claimed,) = await waiting
        assert claimed.message.payload == b"new"


async def leaving(first: Rig, second: Rig) -> tuple[asyncio.Future[None], Queue]:
    """A move that has begun to wait for edits, unless it has ended, and its queue."""
    moving = asyncio.ensure_future(move(first, second))
    queue = first.owner.shard.queues["q"]
    async with asyncio.timeout(60):
        while not queue.is_leaving and not moving.done():
            await asyncio.sleep(0.01)
    return moving, queue


async def test_a_move_waits_for_an_edit_and_others_for_the_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departures, "EDITS_S", 60.0)
    async with edited_in_a_move(tmp_path) as (first, second, edits, _):
        moving, queue = await leaving(first, second)
        assert not moving.done()

        assert (await refusal(edit(first)))[1] == "QUEUE_MOVING"
        assert queue.leases.count == 1
        first.ingest.edit_gate.set()

        await asyncio.gather(moving, *edits)
        assert len(first.ingest.edits) == 1
        first.clock.advance(61_000)
        payloads = {}
        for _ in range(2):
            (one,) = await second.claim()
            payloads[one.message.message_id] = one.message.payload
        assert sorted(payloads) == [1, 2]
        assert payloads[1] == b"new"


async def test_a_redrive_goes_on_whose_target_comes_while_it_is_looked_for(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as (first, second):
        await second.create("target")
        await first.create("q", max_attempts=1)
        await fail(first, [1, 2, 3])
        await route(second, 10)
        await route(first, 10)
        others = first.broker.redrives._mover.pusher._others
        having, calls_count = others.having, 0

        async def find(queue_ids: Iterable[str]) -> frozenset[str]:
            nonlocal calls_count
            calls_count += 1
            if calls_count == 2:  # The first one is by the call that starts the redrive.
                await move(second, first, "target")
            return await having(queue_ids)

        others.having = find  # type: ignore[method-assign]
        redrive = await redriven(first, target_queue_id="target")
        assert (redrive.state, redrive.redriven_count) == (entry_pb2.Redrive.STATE_DONE, 3)
        assert (await first.counts("target"))["available"] == 3


async def purge(rig: Rig) -> None:
    await rig.queues.PurgeQueue(queue_pb2.PurgeQueueRequest(queue_id="q"))


async def test_a_queue_keeps_its_leases_where_a_redrive_begins_before_it_leaves(
    tmp_path: Path,
) -> None:
    async with two_brokers(tmp_path) as (first, second):
        # Given a queue with dead letters and a lease, and a redrive that comes before its move
        await first.create("q", max_attempts=1)
        await fail(first, [1, 2, 3])
        await first.assign([4])
        (in_flight,) = await first.claim()
        await route(second, 10)
        await route(first, 10)

        async def begin() -> None:
            await start(first, rate=1)

        then(first.broker.departures._targets, "check", begin)

        # Then it stays, with its leases
        assert (await refusal(begin_move(first, second)))[1] == "REDRIVE_RUNNING"
        assert await first.ack(in_flight.lease_token) == [0]


async def test_no_redrive_and_no_purge_of_a_queue_begins_while_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departures, "EDITS_S", 60.0)
    async with edited_in_a_move(tmp_path) as (first, second, edits, _):
        # Given a queue that is about to leave
        moving, queue = await leaving(first, second)

        # When others would begin, then they wait for it, and the move is not in vain
        assert (await refusal(purge(first)))[1] == "QUEUE_MOVING"
        assert (await refusal(start(first)))[1] == "QUEUE_MOVING"
        assert queue.leases.count == 1
        first.ingest.edit_gate.set()
        await asyncio.gather(moving, *edits)
        await purge(second)
