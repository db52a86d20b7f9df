"""A queue is found by one call to any broker, and again after it has changed its shard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import slatemq
from slatemq._rpc import queue_locations
from slatemq.errors import NotFound
from slatemq.v1 import consumer_pb2, queue_pb2
from tests.integration.broker.moves.movers import brokers, move, remove
from tests.integration.broker.rig import Rig, introduce, refusal


async def located(rig: Rig, queue_id: str, *, fresh: bool = False) -> list[int]:
    request = queue_pb2.LocateQueueRequest(queue_id=queue_id, fresh=fresh)
    return list((await rig.queues.LocateQueue(request)).broker_shards)


async def relocate(rigs: Sequence[Rig], queue_id: str, source: int, target: int) -> None:
    """Deletes a queue, and creates it on another shard."""
    await rigs[source].queues.DeleteQueue(queue_pb2.DeleteQueueRequest(queue_id=queue_id))
    await rigs[target].create(queue_id)


def remembering(rigs: Sequence[Rig], queue_id: str) -> list[Rig]:
    return [rig for rig in rigs if queue_id in rig.broker.placement.locations._known]


async def test_every_broker_says_where_a_queue_is(tmp_path: Path) -> None:
    async with brokers(tmp_path) as rigs:
        await rigs[2].create("q")

        assert [await located(rig, "q") for rig in rigs] == [[2]] * len(rigs)
        code, reason, _ = await refusal(located(rigs[0], "absent"))
        assert (code.name, reason) == ("NOT_FOUND", "QUEUE_NOT_FOUND")


async def test_a_client_looks_a_queue_up_with_one_call_to_one_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A broker that is slow to answer is not the only one that is asked
    monkeypatch.setattr(queue_locations, "STAGGER_S", 60.0)
    async with (
        brokers(tmp_path) as rigs,
        slatemq.connect(rigs[0].running.address) as client,
    ):
        await rigs[3].create("q")

        for _ in range(3):
            assert (await client.get_queue("q")).broker_shard == 3

        assert len(remembering(rigs, "q")) == 1


async def test_a_client_knows_where_the_queue_is_that_it_has_created(tmp_path: Path) -> None:
    async with (
        brokers(tmp_path) as rigs,
        slatemq.connect(rigs[0].running.address) as client,
    ):
        created = await client.create_queue("q")

        assert (await client.get_queue("q")).broker_shard == created.broker_shard
        assert not remembering(rigs, "q")


async def test_a_queue_is_found_once_it_exists_though_brokers_remember_that_it_did_not(
    tmp_path: Path,
) -> None:
    async with (
        brokers(tmp_path) as rigs,
        slatemq.connect(rigs[0].running.address) as client,
    ):
        for rig in rigs:
            await refusal(located(rig, "q"))
        await rigs[1].create("q")
        await rigs[1].assign([1], "q")

        async with client.consume("q") as messages, asyncio.timeout(60):
            assert (await anext(messages)).message_id == 1


async def test_the_refusal_of_a_call_to_the_wrong_shard_names_the_right_one(tmp_path: Path) -> None:
    async with brokers(tmp_path) as rigs:
        await rigs[1].create("q")
        calls = (
            rigs[0].queues.GetQueue(queue_pb2.GetQueueRequest(queue_id="q")),
            rigs[0].consumers.Claim(consumer_pb2.ClaimRequest(queue_id="q", max_messages=1)),
            rigs[0].queues.PauseQueue(queue_pb2.PauseQueueRequest(queue_id="q")),
        )
        for call in calls:
            code, reason, message = await refusal(call)
            assert (code.name, reason) == ("NOT_FOUND", "WRONG_SHARD")
            assert message == "queue 'q' is not on broker 0: ask broker 1"


async def test_a_client_follows_a_queue_that_has_changed_its_shard(tmp_path: Path) -> None:
    async with (
        brokers(tmp_path) as rigs,
        slatemq.connect(rigs[0].running.address) as client,
    ):
        await rigs[1].create("q")
        assert (await client.get_queue("q")).broker_shard == 1
        await relocate(rigs, "q", source=1, target=2)
        await rigs[2].assign([1, 2], "q")

        # Then the old place sends it on
        assert (await client.get_queue("q")).broker_shard == 2
        (message,) = await client.claim("q", 1)
        assert message.message_id == 1


async def test_a_queue_is_found_though_the_shard_is_removed_on_which_it_was(tmp_path: Path) -> None:
    async with brokers(tmp_path) as rigs, slatemq.connect(rigs[0].running.address) as client:
        # Given a client and brokers that remember a queue where it was before a move
        await rigs[2].create("q")
        assert (await client.get_queue("q")).broker_shard == 2
        for rig in rigs:
            assert await located(rig, "q") == [2]
        await move(rigs[2], rigs[1])
        await remove(rigs[2])
        left = [rigs[0], rigs[1], rigs[3]]
        await introduce(*left)

        assert (await client.get_queue("q")).broker_shard == 1
        assert [await located(rig, "q") for rig in left] == [[1]] * 3


async def test_a_client_asks_for_a_fresh_answer_where_one_names_a_shard_that_it_does_not_know(
    tmp_path: Path,
) -> None:
    async with brokers(tmp_path) as rigs:
        # Given brokers that remember a shard which was removed, and have not heard of that
        await rigs[2].create("q")
        for rig in rigs:
            assert await located(rig, "q") == [2]
        await move(rigs[2], rigs[1])
        await remove(rigs[2])

        async with slatemq.connect(rigs[0].running.address) as client:
            await client._peers.fresh_topology()
            for rig in (rigs[0], rigs[1], rigs[3]):
                rig.broker.placement.locations.note("q", (2,), time.monotonic())

            assert (await client.get_queue("q")).broker_shard == 1


async def test_a_consumer_and_a_watch_begin_where_the_queue_is_now(tmp_path: Path) -> None:
    async with (
        brokers(tmp_path) as rigs,
        slatemq.connect(rigs[0].running.address) as client,
    ):
        # Given a client that knows where the queue was
        await rigs[1].create("q")
        assert (await client.get_queue("q")).broker_shard == 1
        await relocate(rigs, "q", source=1, target=3)
        later_ms = rigs[3].clock.now_ms() + 600_000
        await rigs[3].assign([1, 2], "q", visible_at_ms=[0, later_ms])

        watch = client.watch_delayed("q")
        async with client.consume("q") as messages, asyncio.timeout(60):
            assert (await anext(messages)).message_id == 1
            assert (await anext(watch)).message_id == 2
        await watch.close()


async def test_an_outdated_answer_is_asked_for_again(tmp_path: Path) -> None:
    async with (
        brokers(tmp_path) as rigs,
        slatemq.connect(rigs[0].running.address) as client,
    ):
        # Given brokers that all remember a queue where it is not any more
        await rigs[1].create("q")
        for rig in rigs:
            assert await located(rig, "q") == [1]
        await relocate(rigs, "q", source=1, target=2)
        assert await located(rigs[0], "q") == [1]
        assert await located(rigs[3], "q", fresh=True) == [2]

        assert (await client.get_queue("q")).broker_shard == 2


async def test_a_deleted_queue_is_not_found(tmp_path: Path) -> None:
    async with (
        brokers(tmp_path) as rigs,
        slatemq.connect(rigs[0].running.address) as client,
    ):
        await rigs[1].create("q")
        assert (await client.get_queue("q")).broker_shard == 1
        await rigs[1].queues.DeleteQueue(queue_pb2.DeleteQueueRequest(queue_id="q"))

        for look in (client.get_queue("q"), client.claim("q", 1)):
            with pytest.raises(NotFound) as refused:
                await look
            assert refused.value.reason == "QUEUE_NOT_FOUND"
