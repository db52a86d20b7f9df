"""A partitioned queue: one name on several shards, whichever step a creation is broken off at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from libs.storage.database.roots import open_root
from libs.storage.objects.queue_names import QueueNames
from services.broker.outbox import targets
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.errors import InvalidArgument
from slatemq.v1 import consumer_pb2, queue_name_pb2, queue_name_pb2_grpc, queue_pb2
from tests.integration.broker.queue_calls import delete, get
from tests.integration.broker.rig import NO_BACKOFF, Rig, introduce, refusal
from tests.integration.broker.rpc.test_unique_names import Broker, broker


@asynccontextmanager
async def brokers(folder: Path, count: int) -> AsyncIterator[list[Broker]]:
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(broker(folder, n)) for n in range(count)]
        await introduce(*(one.rig for one in found))
        yield found


def request(
    index: int, shards: Sequence[int], header: str = "", **others: Any
) -> queue_pb2.CreateQueueRequest:
    partition = queue_pb2.Partition(index=index, count=len(shards), ordering_header=header)
    queue = queue_pb2.Queue(queue_id="q", partition=partition, backoff=NO_BACKOFF)
    return queue_pb2.CreateQueueRequest(queue=queue, broker_shards=shards, **others)


async def create(rig: Rig, index: int, shards: Sequence[int], header: str = "") -> queue_pb2.Queue:
    return (await rig.queues.CreateQueue(request(index, shards, header))).queue


async def outcome(rig: Rig, index: int, shards: Sequence[int]) -> str:
    """`created`, or the reason of the refusal."""
    try:
        await create(rig, index, shards)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    return "created"


async def lift(rig: Rig) -> queue_pb2.Queue:
    return (
        await rig.queues.LiftQuarantine(
            queue_pb2.LiftQuarantineRequest(queue_id="q", all_created=True)
        )
    ).queue


async def claim_of(folder: Path) -> tuple[int, ...]:
    return (await QueueNames(open_root(folder.as_uri()).objects).get("q")).broker_shards


async def test_a_push_to_a_queue_elsewhere_needs_one_broker_that_has_a_partition(
    tmp_path: Path,
) -> None:
    async with brokers(tmp_path, 3) as (third, *own):
        for index, one in enumerate(own):
            await create(one.rig, index, (1, 2))

        # When the broker of partition 0 is down, then another one says that there is the queue
        own[0].rig.signals.first.set()
        await own[0].rig.ended
        push = consumer_pb2.PushCommand(queue_id="q", payload=b"x")
        request = consumer_pb2.ExecuteRequest(commands=[consumer_pb2.Command(push=push)])
        await third.rig.consumers.Execute(request)

        # And when all are, it is not known
        own[1].rig.signals.first.set()
        await own[1].rig.ended
        _, reason, _ = await refusal(third.rig.consumers.Execute(request))
        assert reason == "BROKER_DOWN"


async def test_a_push_to_a_queue_elsewhere_does_not_wait_for_a_broker_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "ASK_NEXT_S", 0.001)
    is_on, thawed = targets.OtherBrokers._is_on, asyncio.Event()

    async def hang(others: targets.OtherBrokers, queue_id: str, shard: int) -> bool:
        if shard == 1:
            await thawed.wait()
        return await is_on(others, queue_id, shard)

    monkeypatch.setattr(targets.OtherBrokers, "_is_on", hang)
    async with brokers(tmp_path, 3) as (third, *own):
        for index, one in enumerate(own):
            await create(one.rig, index, (1, 2))
        push = consumer_pb2.PushCommand(queue_id="q", payload=b"x")
        request = consumer_pb2.ExecuteRequest(commands=[consumer_pb2.Command(push=push)])
        await third.rig.consumers.Execute(request)
        assert not thawed.is_set()


async def test_partitions_get_nothing_until_each_is_there_and_then_what_came_meanwhile(
    tmp_path: Path,
) -> None:
    async with brokers(tmp_path, 3) as (first, _, last):
        await first.create("other")
        await first.rig.assign([1], "other")
        made = await create(first.rig, 0, [0, 2], "customer")
        assert made.quarantine.reason
        assert (made.partition.index, made.partition.count) == (0, 2)
        await create(last.rig, 1, [0, 2], "customer")
        assert await claim_of(tmp_path) == (0, 2)
        await first.rig.assign([2], "other")

        assert not (await lift(last.rig)).HasField("quarantine")
        opened = await lift(first.rig)
        assert opened.partition == made.partition
        assert opened.partition.ordering_header == "customer"
        # What was in the log when it was created is not its own; what came since then is.
        (left,) = opened.replay.ranges
        assert (left.start_sequence, left.end_sequence) == (1, 2)
        assert not opened.replay.done


async def test_only_its_creator_ends_the_quarantine_in_which_a_partition_begins(
    tmp_path: Path,
) -> None:
    async with brokers(tmp_path, 1) as (one,):
        await create(one.rig, 0, [0])
        call = one.rig.queues.LiftQuarantine(queue_pb2.LiftQuarantineRequest(queue_id="q"))
        code, reason, _ = await refusal(call)
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "BEING_CREATED")

        update = queue_pb2.UpdateQueueRequest(queue=queue_pb2.Queue(queue_id="q", filter="true"))
        update.update_mask.paths.append("filter")
        updated = (await one.rig.queues.UpdateQueue(update)).queue
        assert updated.filter == "true"
        assert updated.quarantine.being_created

        assert not (await lift(one.rig)).HasField("quarantine")


async def test_partition_0_comes_first_and_each_is_created_on_one_shard(tmp_path: Path) -> None:
    async with brokers(tmp_path, 3) as (zero, one, two):
        assert await outcome(one.rig, 1, [0, 1]) == "PARTITION_MISSING"
        assert await outcome(zero.rig, 0, [0, 1]) == "created"

        # Where the shard that the claim has for it takes no queues, another one may have it.
        assert await outcome(two.rig, 1, [0, 2]) == "created"
        assert await claim_of(tmp_path) == (0, 2)
        assert await outcome(one.rig, 0, [1, 0]) == "QUEUE_ALREADY_EXISTS"
        assert await outcome(one.rig, 1, [0, 1, 2]) == "QUEUE_ALREADY_EXISTS"
        assert await two.create("q") == "QUEUE_ALREADY_EXISTS"
        assert await one.create("q") == "QUEUE_ALREADY_EXISTS"
        assert await outcome(one.rig, 1, [0, 1]) == "QUEUE_ALREADY_EXISTS"
        assert await outcome(zero.rig, 0, [0, 1]) == "QUEUE_ALREADY_EXISTS"
        assert await outcome(two.rig, 1, [0, 2]) == "QUEUE_ALREADY_EXISTS"
        assert await claim_of(tmp_path) == (0, 2)


async def test_a_queue_that_is_not_partitioned_gets_no_partition(tmp_path: Path) -> None:
    async with brokers(tmp_path, 2) as (zero, one):
        await zero.create("q")
        assert await outcome(one.rig, 1, [0, 1]) == "QUEUE_ALREADY_EXISTS"
        assert await outcome(one.rig, 0, [1, 0]) == "QUEUE_ALREADY_EXISTS"


async def test_the_name_is_free_once_the_last_partition_is_deleted(tmp_path: Path) -> None:
    async with brokers(tmp_path, 3) as (zero, one, two):
        for index, each in enumerate((zero, one)):
            await create(each.rig, index, [0, 1])
        await delete(zero.rig)
        assert await claim_of(tmp_path) == (0, 1)
        # What is left holds the name, and a deletion that broke off is repeated.
        assert await two.create("q") == "QUEUE_ALREADY_EXISTS"
        assert await outcome(zero.rig, 0, [0, 1]) == "QUEUE_ALREADY_EXISTS"

        await delete(one.rig)
        assert await claim_of(tmp_path) == ()
        assert await two.create("q") == "created"


@pytest.mark.parametrize("step", range(1, 4))
@pytest.mark.parametrize("index", [0, 1])
async def test_a_creation_killed_at_any_step_is_repeated_and_doubles_nothing(
    tmp_path: Path, index: int, step: int
) -> None:
    # Given a creation that stands still around one of its requests about names.
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(broker(tmp_path, 0))
        old = await stack.enter_async_context(broker(tmp_path, 1))
        other = await stack.enter_async_context(broker(tmp_path, 2))
        shards = (1, 0) if index == 0 else (0, 1)
        if index == 1:
            await create(first.rig, 0, shards)
        old.objects.step, old.objects.held_step = 0, step
        frozen = asyncio.create_task(outcome(old.rig, index, shards))
        reached = asyncio.create_task(old.objects.reached.wait())
        await asyncio.wait([frozen, reached], return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()

        # When another process takes the shard over, and the command is repeated
        new = await stack.enter_async_context(broker(tmp_path, 1))
        async with asyncio.timeout(60):
            while (again := await outcome(new.rig, index, shards)) == "BROKER_DOWN":
                await asyncio.sleep(0.05)
        old.objects.thawed.set()
        late = await frozen

        # Then it is done once, and the name is no one else's.
        assert again == "created" or (again, late) == ("QUEUE_ALREADY_EXISTS", "created")
        assert (await get(new.rig)).partition.index == index
        assert await claim_of(tmp_path) == shards
        assert await other.create("q") == "QUEUE_ALREADY_EXISTS"


@pytest.mark.parametrize(
    ("index", "shards", "field"),
    [
        (0, [], "queue.partition.count"),
        (2, [0, 1], "queue.partition.index"),
        (0, [0, 0], "broker_shards"),
        (0, [0, -1], "broker_shards"),
        (0, [1, 0], "broker_shards[0]"),
    ],
)
async def test_partitions_that_cannot_be_are_refused(
    tmp_path: Path, index: int, shards: list[int], field: str
) -> None:
    async with broker(tmp_path, 0) as one:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await create(one.rig, index, shards)
        error = from_rpc_error(refused.value)
        assert isinstance(error, InvalidArgument)
        assert error.field == field


async def test_shards_without_a_partition_are_refused(tmp_path: Path) -> None:
    async with broker(tmp_path, 0) as one:
        queue = queue_pb2.Queue(queue_id="q")
        call = one.rig.queues.CreateQueue(
            queue_pb2.CreateQueueRequest(queue=queue, broker_shards=[0])
        )
        assert (await refusal(call))[2] == "broker_shards"


async def test_a_partition_is_there_after_a_restart_and_names_itself_in_handles(
    tmp_path: Path,
) -> None:
    async with broker(tmp_path, 0) as one:
        await create(one.rig, 0, [0], "customer")
        await lift(one.rig)
        await one.rig.assign([7])
    async with broker(tmp_path, 0) as one:
        partition = (await get(one.rig)).partition
        assert (partition.index, partition.count, partition.ordering_header) == (0, 1, "customer")
        (message,) = await one.rig.claim()
        names = queue_name_pb2_grpc.QueueNameServiceStub(one.rig.channel)
        answer = await names.GetNameUse(queue_name_pb2.GetNameUseRequest(queue_id="q"))
        assert (answer.use, answer.partitions_count) == (queue_name_pb2.NAME_USE_QUEUE, 1)
        assert await one.rig.ack(message.lease_token) == [0]


async def test_a_transfer_keeps_to_the_partition_that_a_header_decides(tmp_path: Path) -> None:
    async with broker(tmp_path, 0) as one:
        await create(one.rig, 0, [0, 1], "customer")
        await one.rig.create("source")
        await one.rig.assign([7], "source")
        (message,) = await one.rig.claim("source")
        transfer = consumer_pb2.TransferCommand(
            lease_token=message.lease_token, target_queue_id="q"
        )
        call = one.rig.consumers.Execute(
            consumer_pb2.ExecuteRequest(commands=[consumer_pb2.Command(transfer=transfer)])
        )
        assert (await refusal(call))[1] == "OTHER_PARTITION"
