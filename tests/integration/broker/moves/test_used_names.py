"""Nothing of a deleted queue comes back where its name is used again, whatever its moves left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import slatemq
from libs.storage.database.roots import open_root
from libs.storage.objects.queue_names import QueueNames
from services.broker.moves import arrivals
from slatemq.errors import AlreadyExists, FailedPrecondition, Unavailable
from slatemq.v1 import queue_pb2
from tests.integration.broker.moves.movers import (
    Steps,
    begin_move,
    claimed,
    create_partitions,
    down_ingest,
    gone,
    has_queue,
    listed_moves,
    queue_on,
    route,
    swept,
    two_brokers,
)
from tests.integration.broker.queue_calls import delete
from tests.integration.broker.rig import NO_BACKOFF, Rig, introduce, refusal, running
from tests.integration.broker.rpc.test_partitions import outcome

Three = tuple[Rig, Rig, Rig]


@asynccontextmanager
async def three_brokers(folder: Path) -> AsyncIterator[Three]:
    async with two_brokers(folder) as (first, second), running(folder, shard=2) as third:
        await introduce(first, second, third)
        yield first, second, third


async def filled(first: Rig, second: Rig, third: Rig) -> None:
    """A queue with partition 0 on the first broker and partition 1, with messages, on the second.

    The third is as far in the log as they are.
    """
    await create_partitions(first, second)
    await route(first, 4)
    await route(second, 4, q=[3, 4])
    await route(third, 4)


async def is_free(folder: Path) -> bool:
    names = QueueNames(open_root(folder.as_uri()).objects)
    return not (await names.get("q")).broker_shards


async def created(rig: Rig, index: int, shards: list[int]) -> set[str]:
    """Creates a partition, however often it must be asked for; the reasons of the refusals."""
    refused = set[str]()
    async with asyncio.timeout(60):
        while (reason := await outcome(rig, index, shards)) != "created":
            refused.add(reason)
            await asyncio.sleep(0.02)
    return refused


async def opened(*rigs: Rig) -> None:
    for rig in rigs:
        await rig.queues.LiftQuarantine(
            queue_pb2.LiftQuarantineRequest(queue_id="q", all_created=True)
        )


async def test_a_shard_takes_no_deleted_queue_back_that_has_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with three_brokers(tmp_path) as (first, second, third):
        await filled(first, second, third)
        up = down_ingest(monkeypatch)
        await begin_move(second, third)
        async with asyncio.timeout(60):
            while not await has_queue(third):
                await asyncio.sleep(0.01)
        assert sorted(await claimed(third)) == [3, 4]
        await delete(first)
        await delete(third)
        assert await is_free(tmp_path)

        # When its name is used again, also on the shard that does not forget it yet
        assert await outcome(first, 0, [0, 1]) == "QUEUE_CHANGING"
        assert await is_free(tmp_path)
        up.set()
        await gone(second)
        await created(first, 0, [0, 1])
        await created(second, 1, [0, 1])
        await opened(first, second)

        assert await claimed(second) == {}


async def test_a_shard_that_was_down_takes_no_deleted_queue_back_that_has_left_it(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, shard=0) as first, running(tmp_path, shard=2) as third:
        async with running(tmp_path, shard=1) as old:
            await introduce(first, third)
            await filled(first, old, third)
            steps = Steps(1)
            steps.between(old.broker.departures._targets, "arrive")
            await begin_move(old, third)
            await steps.reached.wait()
        third.broker.arrivals._heard.clear()
        async with asyncio.timeout(60):
            while not await has_queue(third):
                await asyncio.sleep(0.01)
        await delete(first)
        await delete(third)
        assert await is_free(tmp_path)

        # When its name is used again before it has learned that the queue has arrived
        assert await outcome(first, 0, [0, 1]) == "BROKER_DOWN"
        async with running(tmp_path, shard=1, clock=old.clock) as second:
            await created(first, 0, [0, 1])
            await created(second, 1, [0, 1])
            await opened(first, second)
            assert await claimed(second) == {}


async def test_a_shard_takes_in_nothing_that_came_of_a_move_that_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "SILENT_S", 1e9)
    async with three_brokers(tmp_path) as (first, second, third):
        await filled(first, second, third)
        # Given a target that has all rows, and of which the source gets no answer
        targets = second.broker.departures._targets
        send = targets.send

        async def lose(*args: Any, **options: Any) -> None:
            await send(*args, **options)
            if options.get("is_last"):
                raise FailedPrecondition("LOST", "the answer was lost")

        async def arrive(*_: object) -> bool:
            raise Unavailable("it does not answer")

        monkeypatch.setattr(targets, "send", lose)
        monkeypatch.setattr(targets, "arrive", arrive)
        await begin_move(second, third)
        await gone(second)
        assert await has_queue(second)
        assert third.owner.shard.moves.arrivals
        await delete(first)
        await delete(second)
        assert await is_free(tmp_path)

        # When the name is used again on the target
        assert await outcome(first, 0, [0, 2]) == "QUEUE_CHANGING"
        monkeypatch.setattr(arrivals, "SILENT_S", 0)
        await created(first, 0, [0, 2])
        await created(third, 1, [0, 2])
        await opened(first, third)

        assert await claimed(third) == {}


async def test_a_creation_goes_on_with_partitions_as_it_wants_them_alone(tmp_path: Path) -> None:
    async with (
        two_brokers(tmp_path) as (first, second),
        slatemq.connect(first.running.address) as client,
    ):
        for index, (rig, attempts) in enumerate(((first, 3), (second, 7))):
            partition = queue_pb2.Partition(index=index, count=2)
            queue = queue_pb2.Queue(
                queue_id="q", partition=partition, backoff=NO_BACKOFF, max_attempts=attempts
            )
            request = queue_pb2.CreateQueueRequest(queue=queue, broker_shards=[0, 1])
            await rig.queues.CreateQueue(request)

        async def create() -> slatemq.Queue:
            return await client.create_queue(
                "q", partitions=2, max_attempts=3, backoff=slatemq.Backoff.none()
            )

        with pytest.raises(AlreadyExists):
            await create()
        assert (await queue_on(first)).quarantine.being_created
        await delete(second)
        await swept(second)
        assert (await create()).max_attempts == 3


async def test_a_queue_that_has_arrived_is_only_there_while_an_ingest_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = down_ingest(monkeypatch)
    async with running(tmp_path, shard=1) as target:
        async with (
            running(tmp_path, shard=0) as source,
            slatemq.connect(target.running.address) as client,
        ):
            await source.create("q")

            assert await client.move_queue("q", 1) == 1

            assert await listed_moves(source) == []
            assert (await refusal(queue_on(source)))[1] == "WRONG_SHARD"
            left, _ = (await client.shards("broker")).shards
            assert left.remaining == (
                "1 queue that has left, until each ingest is up and knows of it",
            )
        async with (
            running(tmp_path, shard=0, clock=source.clock) as source,
            slatemq.connect(target.running.address) as client,
        ):
            assert await listed_moves(source) == []
            assert (await refusal(queue_on(source)))[1] == "WRONG_SHARD"
            await client.delete_queue("q")

            assert [one.queue_id async for one in client.list_queues()] == []
            assert (await refusal(source.create("q")))[1] == "QUEUE_BEING_REMOVED"
            up.set()
            await gone(source)
            await swept(source)
            await source.create("q")
