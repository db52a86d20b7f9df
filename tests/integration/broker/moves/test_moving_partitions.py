"""A partition of a queue moves to another broker shard, beside the others."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

import slatemq
from libs.storage.database.roots import open_root
from libs.storage.objects.queue_names import NameClaim, QueueNames
from slatemq.errors import FailedPrecondition, InvalidArgument
from slatemq.v1 import entry_pb2, move_pb2, move_pb2_grpc, queue_pb2
from tests.integration.broker.entry_calls import entries
from tests.integration.broker.moves.movers import (
    Steps,
    begin_move,
    claimed,
    create_partitions,
    gone,
    has_queue,
    move,
    queue_on,
    route,
    swept,
    then,
)
from tests.integration.broker.queue_calls import delete
from tests.integration.broker.rig import Rig, introduce, refusal, running
from tests.integration.broker.rpc.test_partitions import outcome


async def brokers(stack: AsyncExitStack, folder: Path, count: int) -> list[Rig]:
    rigs = [await stack.enter_async_context(running(folder, shard=n)) for n in range(count)]
    await introduce(*rigs)
    return rigs


async def claim_of(folder: Path) -> NameClaim:
    return await QueueNames(open_root(folder.as_uri()).objects).get("q")


async def test_a_partition_moves_and_the_others_stay(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first, second, third = await brokers(stack, tmp_path, 3)
        await create_partitions(first, second)
        await route(first, 2, q=[1, 2])
        await route(second, 4, q=[3, 4])
        await route(third, 4)

        moved = await begin_move(second, third)
        await gone(second)

        assert moved.partition == 1
        found = await queue_on(third)
        assert (found.broker_shard, found.partition.index, found.partition.count) == (2, 1, 2)
        assert (await claim_of(tmp_path)).broker_shards == (0, 2)
        assert await refusal(queue_on(second)) == (
            grpc.StatusCode.NOT_FOUND,
            "WRONG_SHARD",
            "queue 'q' is not on broker 1: ask brokers 0 and 2",
        )
        assert sorted(await claimed(third)) == [3, 4]
        assert sorted(await claimed(first)) == [1, 2]


async def test_a_partition_moves_to_no_shard_that_has_another_one(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first, second, third = await brokers(stack, tmp_path, 3)
        await create_partitions(first, second)
        found = await refusal(begin_move(first, second))
        assert found[1] == "SHARD_HAS_PARTITION"

        # Nor where its creation broke off, and may be repeated there
        await delete(second)
        await delete(first)
        for rig in (first, second):
            await swept(rig)
        assert await outcome(first, 0, [0, 1]) == "created"
        assert (await refusal(begin_move(first, second)))[1] == "SHARD_HAS_PARTITION"

        # Another one takes it, and the creation goes on with it
        await move(first, third)
        assert (await queue_on(third)).quarantine.being_created
        assert await outcome(second, 1, [0, 1]) == "PARTITION_MISSING"
        assert await outcome(second, 1, [2, 1]) == "created"
        assert (await claim_of(tmp_path)).broker_shards == (2, 1)


async def test_a_shard_gets_another_partition_once_its_own_has_left(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first, second, third = await brokers(stack, tmp_path, 3)
        client = await stack.enter_async_context(slatemq.connect(first.running.address))
        await create_partitions(first, second)
        await route(first, 2, q=[1, 2])
        await route(second, 5, q=[3, 4, 5])
        for rig in (first, third):
            await route(rig, 5)
        await client.get_queue("q")  # It knows now where the partitions are.

        await move(first, third)
        await swept(first)
        await move(second, first)

        # One who knows of the places before finds the new ones
        assert (await claim_of(tmp_path)).broker_shards == (2, 0)
        queue = await client.get_queue("q")
        assert not queue.missing_partitions
        each = {index: part.counts.available_count for index, part in queue.partitions.items()}
        assert each == {0: 2, 1: 3}
        page = await client.entry_page("q", "available")
        assert [entry.message_id for entry in page.entries] == [1, 2]
        assert (await client.get_entry(page.entries[0].handle)).message_id == 1

        # And one who knew an older claim learns where it is
        naming = (("slatemq-partition", "q/0"),)
        request = queue_pb2.PurgeQueueRequest(queue_id="q")
        found = await refusal(first.queues.PurgeQueue(request, metadata=naming))
        assert found == (
            grpc.StatusCode.NOT_FOUND,
            "WRONG_SHARD",
            "partition 0 of queue 'q' is not here, but partition 1",
        )
        handle = entry_pb2.GetEntryRequest(handle=page.entries[0].handle)
        assert (await refusal(entries(first).GetEntry(handle)))[1] == "WRONG_SHARD"
        for bad in ("q", "q/", "q/x", "/", "q/-1"):
            call = first.queues.PurgeQueue(request, metadata=(("slatemq-partition", bad),))
            assert (await refusal(call))[2] == "slatemq-partition"
        other = (("slatemq-partition", "other/7"),)
        await first.queues.GetQueue(queue_pb2.GetQueueRequest(queue_id="q"), metadata=other)


async def test_a_call_names_its_partition_while_another_one_looks_for_the_queue(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        first, second, third = await brokers(stack, tmp_path, 3)
        client = await stack.enter_async_context(slatemq.connect(first.running.address))
        await create_partitions(first, second)
        await route(first, 2, q=[1, 2])
        await route(second, 5, q=[3, 4, 5])
        await route(first, 5)
        await route(third, 5)
        await client.get_queue("q")
        await move(first, third)
        await swept(first)
        await move(second, first)

        # Given another call, which has just found that the queue is not where it was
        async def forget() -> None:
            client._locations.forget("q")

        then(client._peers, "broker", forget)

        queue = await client.get_queue("q")
        each = {index: part.counts.available_count for index, part in queue.partitions.items()}
        assert each == {0: 2, 1: 3}


async def test_a_creation_opens_its_partitions_where_they_have_moved(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first, second, third = await brokers(stack, tmp_path, 3)
        client = await stack.enter_async_context(slatemq.connect(first.running.address))
        assert await outcome(first, 0, [0, 1]) == "created"

        async def move_first() -> None:
            if await has_queue(first):
                await move(first, third)

        then(client, "_create_partition", move_first)

        created = await client.create_queue("q", partitions=2, backoff=slatemq.Backoff.none())

        assert created.broker_shards == (2, 1)
        for rig in (second, third):
            assert not (await queue_on(rig)).HasField("quarantine")


async def test_a_move_is_of_the_partition_that_its_caller_means(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first, second, third = await brokers(stack, tmp_path, 3)
        await create_partitions(first, second)
        steps = Steps(1)
        steps.between(first.broker.departures._targets, "send")
        await begin_move(first, third)
        await steps.reached.wait()

        stub = move_pb2_grpc.MoveServiceStub(first.channel)
        request = move_pb2.MoveQueueRequest(queue_id="q", to_broker_shard=2)
        other = stub.MoveQueue(request, metadata=(("slatemq-partition", "q/1"),))
        assert (await refusal(other))[1] == "WRONG_SHARD"
        same = await stub.MoveQueue(request, metadata=(("slatemq-partition", "q/0"),))
        assert same.move.partition == 0
        steps.thawed.set()
        await gone(first)


async def test_two_partitions_move_at_the_same_time(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first, second, third, fourth = await brokers(stack, tmp_path, 4)
        await create_partitions(first, second)
        await route(first, 2, q=[1, 2])
        await route(second, 4, q=[3, 4])
        for rig in (third, fourth):
            await route(rig, 4)
        steps = Steps(1)
        steps.between(first.broker.departures._names, "place")
        await begin_move(first, third)
        await steps.reached.wait()

        await move(second, fourth)
        steps.thawed.set()
        await gone(first)

        assert await claim_of(tmp_path) == NameClaim(4, (2, 3), (4, 3))
        assert sorted(await claimed(third)) == [1, 2]
        assert sorted(await claimed(fourth)) == [3, 4]


async def test_of_two_partitions_that_move_to_one_shard_one_stays(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first, second, third = await brokers(stack, tmp_path, 3)
        await create_partitions(first, second)
        await route(first, 2, q=[1, 2])
        await route(second, 2)
        await route(third, 2)
        # Given two that the target has agreed to take
        held = [Steps(2), Steps(2)]
        for steps, rig in zip(held, (first, second), strict=True):
            steps.between(rig.broker.departures._targets, "check")
        begun = [asyncio.create_task(begin_move(rig, third)) for rig in (first, second)]
        for steps in held:
            await steps.reached.wait()
        held[0].thawed.set()
        await begun[0]
        await gone(first)
        held[1].thawed.set()
        await begun[1]
        await gone(second)

        assert (await claim_of(tmp_path)).broker_shards == (2, 1)
        assert await has_queue(second)
        assert sorted(await claimed(third)) == [1, 2]


async def test_a_queue_is_deleted_while_a_partition_moves(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first, second, third = await brokers(stack, tmp_path, 3)
        for step in range(1, 9):
            await create_partitions(first, second)
            steps = Steps(step)
            steps.between(second.broker.departures._names, "get", "place")
            steps.between(second.broker.departures._targets, "arrive")
            moving = asyncio.create_task(move(second, third))
            reached = asyncio.create_task(steps.reached.wait())
            await asyncio.wait([moving, reached], return_when=asyncio.FIRST_COMPLETED)
            # When partition 0 is deleted, which was there alone
            await delete(first)
            assert (await claim_of(tmp_path)).broker_shards[0] == 0
            steps.thawed.set()
            await moving
            reached.cancel()
            assert (await claim_of(tmp_path)).broker_shards == (0, 2)
            await delete(third)
            assert (await claim_of(tmp_path)).broker_shards == ()
            for rig in (first, second, third):
                await swept(rig)
            for owner in (second.broker.departures._names, second.broker.departures._targets):
                for name in ("get", "place", "arrive"):
                    vars(owner).pop(name, None)


async def test_the_client_moves_partitions_and_empties_shards(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first, second, _ = await brokers(stack, tmp_path, 3)
        client = await stack.enter_async_context(slatemq.connect(first.running.address))
        await create_partitions(first, second)
        with pytest.raises(InvalidArgument) as unsaid:
            await client.move_queue("q", 2)
        assert unsaid.value.field == "partition"
        with pytest.raises(InvalidArgument):
            await client.move_queue("q", 2, partition=2)
        with pytest.raises(FailedPrecondition) as there:
            await client.move_queue("q", 0, partition=1)
        assert there.value.reason == "SHARD_HAS_PARTITION"

        assert await client.move_queue("q", partition=0) == 2
        assert await client.move_queue("q", 2, partition=0) == 2
        queue = await client.get_queue("q")
        assert queue.broker_shards == (2, 1)
        await swept(first)
        assert await client.move_queue("q", partition=1) == 0
        assert (await client.get_queue("q")).broker_shards == (2, 0)


async def test_where_every_shard_has_a_partition_none_moves(tmp_path: Path) -> None:
    async with (
        running(tmp_path, shard=0) as first,
        running(tmp_path, shard=1) as second,
        slatemq.connect(first.running.address) as client,
    ):
        await introduce(first)
        await create_partitions(first, second)
        with pytest.raises(FailedPrecondition) as refused:
            await client.move_queue("q", partition=1)
        assert refused.value.reason == "NO_OTHER_SHARD"
        assert "every broker shard has a partition of the queue" in refused.value.message
