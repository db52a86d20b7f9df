"""What goes on while a queue moves: edits of its messages, redrives into it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from slatemq.v1 import entry_pb2
from tests.integration.broker.entry_calls import (
    DELAYED,
    entries,
    fail,
    listed,
    redriven,
)
from tests.integration.broker.moves.movers import begin_move, move, route, two_brokers
from tests.integration.broker.rig import Ingest, introduce, refusal, running
from tests.manual_clock import ManualClock


async def test_a_queue_stays_while_one_of_its_messages_is_edited(tmp_path: Path) -> None:
    clock, ingest = ManualClock(), Ingest()
    async with (
        running(tmp_path, clock=clock, ingest=ingest, shard=0) as first,
        running(tmp_path, clock=clock, ingest=ingest, shard=1) as second,
    ):
        await introduce(first, second)
        await first.create("q")
        await first.assign([1], visible_at_ms=[clock.now_ms() + 60_000])
        await route(second, 2)
        (entry,) = await listed(first, DELAYED)
        ingest.edit_gate.clear()
        request = entry_pb2.EditMessageRequest(handle=entry.handle, payload=b"new")
        edit = asyncio.ensure_future(entries(first).EditMessage(request))
        while not ingest.edits:
            await asyncio.sleep(0.01)
        assert (await refusal(begin_move(first, second)))[1] == "QUEUE_MOVING"
        ingest.edit_gate.set()
        await edit

        await move(first, second)
        clock.advance(61_000)
        (claimed,) = await second.claim()
        assert claimed.message.payload == b"new"


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
