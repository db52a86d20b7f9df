"""A router beside a broker that ends over what a replay brings to one queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from libs.serving.peers import calls, channels
from libs.serving.peers.topology import Peer
from services.router import backfill, brokers
from services.router.backfill import TURN_PIECES
from services.router.pieces import PieceLimits
from services.router.reserve import is_first
from slatemq.errors import Internal
from slatemq.v1 import assignment_pb2, queue_pb2
from tests.integration.client.ingest import refuse
from tests.integration.router.peers import (
    LogMemory,
    MemoryBroker,
    MemoryIngest,
    Running,
    ShardMemory,
)
from tests.integration.router.stack import Stack, peers
from tests.integration.waiting import eventually

SMALL = PieceLimits(messages_max=5, step_max=5, hold_ms=10)

SEVERAL_TURNS = 3 * TURN_PIECES
"""Entries, each of which is a piece."""


class Unable(MemoryBroker):
    """Ends over what a replay brings to the queue `bad`, until it is repaired.

    Attributes:
        beside: How many assignments were in flight as each of those calls began.
        ends_max: After so many ends, it does not answer any more about that queue.
        is_changing: Whether the queue changes behind each of those ends, so the next is refused.
    """

    def __init__(self, memory: ShardMemory) -> None:
        super().__init__(memory)
        self.replayed: dict[str, list[int]] = {}
        self.ended_count = 0
        self.beside: list[int] = []
        self.ends_max: int | None = None
        self.is_changing = False
        self.unanswered_count = 0
        self._changes_count = 0
        self._assigning_count = 0
        self.is_repaired = False

    async def Assign(  # noqa: N802
        self, request: assignment_pb2.AssignRequest, context: Any
    ) -> assignment_pb2.AssignResponse:
        self._assigning_count += 1
        try:
            await asyncio.sleep(0.01)  # So that something is in flight most of the time.
            return await super().Assign(request, context)
        finally:
            self._assigning_count -= 1

    async def Backfill(  # noqa: N802
        self, request: assignment_pb2.BackfillRequest, context: Any
    ) -> assignment_pb2.BackfillResponse:
        if request.queue_id == "bad" and not self.is_repaired:
            if self.ended_count == self.ends_max:
                self.unanswered_count += 1
                await asyncio.Event().wait()
            if self.is_changing and self._changes_count < self.ended_count:
                return await self._change_queue(request.range)
            self.ended_count += 1
            self.beside.append(self._assigning_count)
            error = Internal("record x cannot be encoded", reason="UNSTORABLE_RECORD")
            await refuse(context, error)
        for assignment in request.range.assignments:
            self.replayed.setdefault(request.queue_id, []).extend(assignment.message_ids)
        return assignment_pb2.BackfillResponse(applied=True, cursor=request.range.last_sequence)

    async def _change_queue(
        self, refused: assignment_pb2.LogRange
    ) -> assignment_pb2.BackfillResponse:
        self._changes_count += 1
        queue = self.memory.changes["bad"][1].queue
        queue.revision += 1
        await self.memory._change("bad", queue_pb2.QueueChange(queue=queue))
        return assignment_pb2.BackfillResponse(
            cursor=refused.previous_sequence, queue_revision=queue.revision
        )


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with peers(tmp_path) as running:
        yield running


@pytest.fixture
async def broker(stack: Stack) -> AsyncIterator[Unable]:
    """In place of the stack's."""
    await stack.broker_server.stop()
    made = Unable(stack.shard)
    server = Running(stack.directory, made)
    await server.start()
    yield made
    await server.stop()


async def replay(stack: Stack, queue_id: str) -> None:
    """Creates a queue that gets all that was published before."""
    queue = queue_pb2.Queue(queue_id=queue_id, filter="true")
    queue.replay.ranges.add(ingest_shard=0, end_sequence=stack.log.end)
    await stack.shard._change(queue_id, queue_pb2.QueueChange(queue=queue))


async def test_a_replay_over_which_a_broker_ends_waits_and_holds_up_no_other(
    stack: Stack,
    broker: Unable,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Given waits that none of this takes
    monkeypatch.setattr(calls, "UNSTORABLE_WAIT_S", 3600.0)
    published: list[int] = []
    for _ in range(SEVERAL_TURNS):
        published += await stack.log.publish([{}] * SMALL.messages_max)
    for queue_id in ("bad", "good"):
        await replay(stack, queue_id)

    with caplog.at_level(logging.WARNING):
        async with stack.router(SMALL):
            # When another queue is replayed, in several turns, then the broker has ended once
            await eventually(lambda: broker.replayed.get("good") == published)
    assert broker.ended_count == 1
    assert "record x cannot be encoded; queue bad waits for up to a minute" in caplog.text


async def test_a_replay_over_which_a_broker_ended_goes_again_after_each_wait(
    stack: Stack, broker: Unable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "UNSTORABLE_WAIT_S", 0.01)
    published = await stack.log.publish([{}] * 20)
    await replay(stack, "bad")

    async with stack.router(SMALL):
        await eventually(lambda: broker.ended_count > 3)
        broker.is_repaired = True
        await eventually(lambda: broker.replayed.get("bad") == published)


@pytest.mark.parametrize("is_changing", [False, True], ids=["as it was", "changed"])
async def test_a_replay_over_which_a_broker_ended_goes_while_no_assignment_is_in_flight(
    stack: Stack, broker: Unable, is_changing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "UNSTORABLE_WAIT_S", 0.01)
    broker.is_changing = is_changing
    stored = await stack.log.publish([{}] * 20)
    await replay(stack, "bad")
    await stack.shard.set_queue("all", "true")

    async with stack.router(SMALL):
        # While messages come all the time
        published: list[int] = []
        while broker.ended_count < 6:
            published += await stack.log.publish([{}])
            await asyncio.sleep(0.005)

        # Then each try but the first has none of them beside it, and they do not wait for it
        await eventually(lambda: stack.got("all")[-1:] == published[-1:])
        assert not any(broker.beside[1:])

        broker.is_repaired = True
        await eventually(lambda: broker.replayed.get("bad") == stored)


async def test_a_replay_that_has_no_answer_from_a_broker_that_was_lost_holds_nothing_up_at_the_next(
    stack: Stack, broker: Unable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "UNSTORABLE_WAIT_S", 0.01)
    monkeypatch.setattr(brokers, "LOOK_S", 0.02)
    for module, bound in ((backfill, "ANSWER_SECONDS"), (channels, "CLOSE_GRACE_SECONDS")):
        monkeypatch.setattr(module, bound, 3_600.0)
    for number in (0, 1):
        await stack.directory.announce(Peer("router", number, f"127.0.0.1:{1 + number}"))
    number = next(one for one in (0, 1) if is_first(one, (0, 1), 0))
    in_reserve = LogMemory(next(log for log in range(1, 100) if not is_first(number, (0, 1), log)))
    ingest = Running(stack.directory, MemoryIngest(in_reserve))
    await ingest.start()
    await stack.log.publish([{}])
    await replay(stack, "bad")
    await stack.shard.set_queue("all", "true")
    broker.ends_max = 1

    # Given a replay that goes beside no assignment, and has no answer
    async with stack.router(SMALL, number=number) as router:
        await eventually(lambda: broker.unanswered_count == 1 and len(router.logs) == 2)

        # When a look at the broker fails, and another process is in its place
        broker.is_replaced = True
        await in_reserve.publish([{}])
        await eventually(lambda: not router.is_routing)
        other = Running(stack.directory, MemoryBroker(stack.shard))
        await other.start()

        # Then that one gets what comes
        published = await stack.log.publish([{}])
        await eventually(lambda: stack.got("all")[-1:] == published)
    for server in (other, ingest):
        await server.stop()
