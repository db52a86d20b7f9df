"""The etag of a queue, on whichever shard it is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

import slatemq
from slatemq.v1 import queue_pb2
from tests.integration.broker.moves.movers import (
    NEVER,
    Steps,
    begin_move,
    queue_on,
    two_brokers,
)
from tests.integration.broker.queue_calls import delete
from tests.integration.broker.rig import refusal


async def test_an_etag_is_not_that_of_a_later_queue_of_the_name_on_another_shard(
    tmp_path: Path,
) -> None:
    async with two_brokers(tmp_path) as (first, second):
        seen = await first.create("q")
        await delete(first, "q")
        now = await second.create("q", max_attempts=9)
        assert now.revision == seen.revision

        wire = queue_pb2.Queue(queue_id="q", filter="true", etag=seen.etag)
        request = queue_pb2.UpdateQueueRequest(queue=wire)
        request.update_mask.paths.append("filter")

        assert (await refusal(second.queues.UpdateQueue(request)))[0] == grpc.StatusCode.ABORTED
        assert (await queue_on(second)).filter == now.filter


async def test_an_update_by_an_etag_waits_for_the_end_of_a_move(tmp_path: Path) -> None:
    async with (
        two_brokers(tmp_path) as (first, second),
        slatemq.connect(first.running.address) as client,
    ):
        # Given a queue that moves, and an update that was refused for that
        await first.create("q")
        etag = (await client.get_queue("q")).etag
        steps, tries = Steps(1), Steps(NEVER)
        steps.between(first.broker.departures._targets, "send")
        await begin_move(first, second)
        await steps.reached.wait()
        tries.between(first.owner, "find")
        updating = asyncio.create_task(client.update_queue("q", etag=etag, max_attempts=3))
        async with asyncio.timeout(60):
            while tries.step < 2 and not updating.done():
                await asyncio.sleep(0.01)

        steps.thawed.set()

        assert (await updating).max_attempts == 3
        assert (await queue_on(second)).max_attempts == 3
