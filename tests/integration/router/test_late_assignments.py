"""Assignments that a broker does not take in time: sent again in smaller pieces, until it does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from services.router.pieces import PieceLimits
from slatemq.v1 import assignment_pb2
from tests.integration.router.peers import MemoryBroker, Running, ShardMemory
from tests.integration.router.stack import Stack, peers
from tests.integration.waiting import eventually

LIMITS = PieceLimits(messages_max=64, thin_max=64, matches_max=64, step_max=64, gather_ms=0)


class SlowBroker(MemoryBroker):
    """Says of calls with more than `matches_max` matches, at once, that their time is over."""

    def __init__(self, memory: ShardMemory, matches_max: int) -> None:
        super().__init__(memory)
        self.matches_max = matches_max
        self.calls: list[int] = []
        """How many matches each call had."""

    async def Assign(  # noqa: N802
        self, request: assignment_pb2.AssignRequest, context: Any
    ) -> assignment_pb2.AssignResponse:
        matches = [one for piece in request.ranges for one in piece.assignments]
        self.calls.append(sum(len(one.message_ids) for one in matches))
        if self.calls[-1] > self.matches_max:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "it takes too long")
        return await super().Assign(request, context)


@asynccontextmanager
async def slow_peers(folder: Path, matches_max: int) -> AsyncIterator[tuple[Stack, SlowBroker]]:
    """Peers of which the broker is slow, with one queue."""
    async with peers(folder) as stack:
        await stack.broker_server.stop()
        broker = SlowBroker(stack.shard, matches_max)
        server = Running(stack.directory, broker)
        await server.start()
        await stack.shard.set_queue("all", "true")
        yield stack, broker
        await server.stop()


def is_routed(stack: Stack, message_id: int) -> bool:
    return stack.shard.cursors.get(0) == message_id


async def test_pieces_that_are_late_become_smaller_and_as_large_as_before_later(
    tmp_path: Path,
) -> None:
    async with slow_peers(tmp_path, matches_max=8) as (stack, broker), stack.router(LIMITS):
        ids = await stack.log.publish([{}] * 128)
        await eventually(partial(is_routed, stack, ids[-1]))
        assert [size for size in broker.calls if size > 8][:3] == [64, 32, 16]

        # When the broker takes more again
        broker.matches_max = LIMITS.matches_max
        before = len(broker.calls)
        while max(broker.calls[before:], default=0) < LIMITS.matches_max:
            ids += await stack.log.publish([{}] * 64)
            await eventually(partial(is_routed, stack, ids[-1]))

    assert stack.got("all") == ids
