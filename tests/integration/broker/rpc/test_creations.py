"""Queues are created and deleted while shards are drained and removed, and other queues move."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

import slatemq
from slatemq._admin import queue_calls
from slatemq.errors import Aborted, FailedPrecondition, NotFound
from slatemq.v1 import queue_pb2
from tests.integration.broker.moves.movers import (
    brokers,
    create_partitions,
    has_queue,
    move,
    remove,
    shard_of,
    then,
)
from tests.integration.broker.queue_calls import delete, update
from tests.integration.broker.rig import Rig, introduce, refusal


def once_after(
    monkeypatch: pytest.MonkeyPatch, name: str, action: Callable[[Any], Awaitable[object]]
) -> None:
    """Does something after the first choice of shards, with what was chosen."""
    choose, chosen = getattr(queue_calls, name), []

    async def choosing(*arguments: Any) -> Any:
        found = await choose(*arguments)
        chosen.append(found)
        if len(chosen) == 1:
            await action(found)
        return found

    monkeypatch.setattr(queue_calls, name, choosing)


async def begin(rigs: Sequence[Rig], queue_id: str = "q") -> None:
    """Creates partition 0 of a queue on the first of these brokers, as if that broke off."""
    await create_one(rigs, 0, queue_id)


async def create_one(rigs: Sequence[Rig], index: int, queue_id: str = "q") -> None:
    partition = queue_pb2.Partition(index=index, count=len(rigs))
    request = queue_pb2.CreateQueueRequest(
        queue=queue_pb2.Queue(queue_id=queue_id, partition=partition),
        broker_shards=map(shard_of, rigs),
    )
    await rigs[index].queues.CreateQueue(request)


def shards_of(queue: slatemq.Queue) -> list[int]:
    return [queue.partitions[index].broker_shard for index in range(queue.partitions_count)]


async def test_a_queue_is_created_beside_one_that_has_moved(tmp_path: Path) -> None:
    async with brokers(tmp_path) as rigs, slatemq.connect(rigs[0].running.address) as client:
        await rigs[1].create("q")
        assert (await client.get_queue("q")).broker_shard == 1
        await move(rigs[1], rigs[2])

        assert (await client.create_queue("beside", with_queue="q")).broker_shard == 2


async def test_a_queue_is_created_beside_one_that_moves_before_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with brokers(tmp_path) as rigs, slatemq.connect(rigs[0].running.address) as client:
        await rigs[1].create("q")
        choose, choices = client._shard_for, 0

        async def choose_first(*arguments: Any) -> int:
            nonlocal choices
            chosen = await choose(*arguments)
            choices += 1
            if choices == 1:
                await move(rigs[1], rigs[2])
            return chosen

        monkeypatch.setattr(client, "_shard_for", choose_first)

        assert (await client.create_queue("beside", with_queue="q")).broker_shard == 2


async def test_partitions_are_created_beside_those_that_have_moved(tmp_path: Path) -> None:
    async with brokers(tmp_path) as rigs, slatemq.connect(rigs[0].running.address) as client:
        await create_partitions(rigs[0], rigs[1])
        assert shards_of(await client.get_queue("q")) == [0, 1]
        await move(rigs[1], rigs[2])

        beside = await client.create_queue("beside", partitions=2, with_queue="q")

        assert shards_of(beside) == [0, 2]


async def test_a_partition_is_created_beside_one_that_moves_meanwhile(tmp_path: Path) -> None:
    async with brokers(tmp_path) as rigs, slatemq.connect(rigs[0].running.address) as client:
        # Given a creation that broke off, after which a partition of the other queue has moved
        await create_partitions(rigs[0], rigs[1])
        await begin(rigs[:2], "beside")
        await move(rigs[1], rigs[2])

        beside = await client.create_queue("beside", partitions=2, with_queue="q")

        assert shards_of(beside) == [0, 2]
        assert beside.quarantine is None


async def test_a_queue_is_created_elsewhere_where_its_shard_is_drained_before_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with brokers(tmp_path) as rigs, slatemq.connect(rigs[0].running.address) as client:
        drained: list[int] = []

        async def drain(chosen: int) -> None:
            drained.append(chosen)
            await client.drain_shard("broker", chosen)

        once_after(monkeypatch, "least_loaded", drain)

        assert (await client.create_queue("q")).broker_shard not in drained
        with pytest.raises(FailedPrecondition) as refused:
            await client.create_queue("here", shard=drained[0])
        assert refused.value.reason == "SHARD_DRAINING"


@pytest.mark.parametrize("index", [0, 1])
async def test_partitions_are_created_elsewhere_where_a_shard_is_drained_before_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    async with brokers(tmp_path) as rigs, slatemq.connect(rigs[0].running.address) as client:
        drained: list[int] = []

        async def drain(chosen: Sequence[int]) -> None:
            drained.append(chosen[index])
            await client.drain_shard("broker", chosen[index])

        once_after(monkeypatch, "least_loaded_of_all", drain)

        queue = await client.create_queue("q", partitions=2)

        assert drained[0] not in shards_of(queue)
        assert queue.quarantine is None


@pytest.mark.parametrize("is_removed", [False, True], ids=["drained", "removed"])
async def test_a_creation_that_broke_off_is_finished_though_a_shard_of_it_takes_no_queues(
    tmp_path: Path, is_removed: bool
) -> None:
    async with brokers(tmp_path) as rigs, slatemq.connect(rigs[0].running.address) as client:
        await begin((rigs[0], rigs[2], rigs[1]))
        if is_removed:
            await remove(rigs[2])
        else:
            await client.drain_shard("broker", 2)

        queue = await client.create_queue("q", partitions=3)

        assert shards_of(queue) == [0, 3, 1]
        assert queue.quarantine is None
        assert shards_of(await client.get_queue("q")) == [0, 3, 1]
        await client.delete_queue("q")
        with pytest.raises(NotFound):
            await client.get_queue("q")


async def test_a_creation_that_broke_off_is_finished_with_the_partitions_of_a_drained_shard(
    tmp_path: Path,
) -> None:
    async with brokers(tmp_path) as rigs, slatemq.connect(rigs[0].running.address) as client:
        for index in range(2):
            await create_one((rigs[0], rigs[2], rigs[1]), index)
        for shard in (0, 2):
            await client.drain_shard("broker", shard)

        assert shards_of(await client.create_queue("q", partitions=3)) == [0, 2, 1]


async def test_a_deletion_by_an_etag_is_refused_by_a_shard_that_comes_late(tmp_path: Path) -> None:
    async with brokers(tmp_path) as rigs, slatemq.connect(rigs[0].running.address) as client:
        # Given a queue that was changed, and a shard that the topology lacks, as after a restore
        await rigs[2].create("q")
        etag = (await client.get_queue("q")).etag
        await update(rigs[2], ["max_attempts"], max_attempts=2)
        path, directory = "topology/broker-2.json", rigs[2].service.directory
        entry = await rigs[2].root.objects.get(path)
        await directory.remove(path)
        await introduce(*rigs)
        await client._peers.fresh_topology()

        async def announce() -> None:
            await rigs[2].root.objects.put(path, entry)
            await directory._note_change()
            await introduce(*rigs)

        then(client, "_delete_others", announce)

        with pytest.raises(Aborted):
            await client.delete_queue("q", etag=etag)
        assert await has_queue(rigs[2])


async def test_no_partition_is_created_twice_on_two_shards(tmp_path: Path) -> None:
    async with brokers(tmp_path) as rigs:
        await create_partitions(rigs[0], rigs[1])

        elsewhere = create_one((rigs[0], rigs[2]), 1)

        assert (await refusal(elsewhere))[0] == grpc.StatusCode.ALREADY_EXISTS
        assert not await has_queue(rigs[2])


async def test_a_partition_is_not_created_elsewhere_while_its_shard_cannot_be_asked(
    tmp_path: Path,
) -> None:
    async with brokers(tmp_path) as rigs:
        await begin((rigs[0], rigs[1]))
        rigs[1].signals.first.set()
        await rigs[1].ended

        elsewhere = create_one((rigs[0], rigs[2]), 1)

        assert (await refusal(elsewhere))[1] == "BROKER_DOWN"


async def test_a_deletion_that_broke_off_is_finished_though_a_shard_of_it_was_removed(
    tmp_path: Path,
) -> None:
    async with brokers(tmp_path) as rigs:
        await create_partitions(rigs[2], rigs[1], rigs[3])
        await delete(rigs[2], "q")
        await remove(rigs[2])
        await introduce(rigs[0], rigs[1], rigs[3])

        async with slatemq.connect(rigs[0].running.address) as client:
            await client.delete_queue("q")

            assert [await has_queue(rig) for rig in (rigs[0], rigs[1], rigs[3])] == [False] * 3
            await client.create_queue("q", partitions=3)
