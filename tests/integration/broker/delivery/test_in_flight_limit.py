"""The bound on messages in flight of all queues: claims beyond it wait, and have turns."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio
import pytest

import slatemq
from libs.storage.objects import instance_records
from slatemq.v1 import consumer_pb2, queue_pb2
from slatemq.v1.instance_pb2 import GetInstanceRequest
from slatemq.v1.instance_pb2_grpc import InstanceServiceStub
from tests.claimed_runs import ClaimedMessage, messages_of
from tests.forms import seeds
from tests.integration.broker.rig import Disk, Rig, memory_root, running
from tests.integration.waiting import eventually
from tests.made_instances import make_instance
from tests.manual_clock import ManualClock


@contextmanager
def undone() -> Iterator[None]:
    """A claim is undone, and its stream ends, where the clock goes on before it is stored."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise


def in_flight(rig: Rig) -> int:
    return rig.owner.shard.leases.in_flight_count


def waiting(rig: Rig, queue_id: str, count: int = 1) -> asyncio.Task[list[ClaimedMessage]]:
    return asyncio.create_task(rig.claim(queue_id, max_messages=count, wait_ms=60_000))


async def fill(rig: Rig, queues: int, messages: int, **settings: object) -> list[str]:
    ids = [f"q{number}" for number in range(queues)]
    for place, queue_id in enumerate(ids):
        await rig.create(queue_id, **settings)
        first = 1 + place * messages
        await rig.assign(range(first, first + messages), queue_id)
    return ids


async def test_claims_beyond_the_bound_wait_for_acks_of_whichever_queue() -> None:
    async with running(settings={"in_flight_max": 3}) as rig:
        await fill(rig, 3, 10)

        # Given a claim that takes all that may be in flight, and others that wait
        held = await rig.claim("q0", max_messages=10)
        assert len(held) == 3
        one, two = waiting(rig, "q1"), waiting(rig, "q2", 2)
        await eventually(lambda: rig.delivery.in_flight.waiting_count == 2)
        assert await rig.claim("q0") == [], "as a claim on a queue that is full"

        # When messages are acked, then the others have theirs in turn, and no more are in flight
        await rig.ack(held[0].lease_token)
        assert [got.message.message_id for got in await one] == [11]
        assert not two.done()
        await rig.ack(held[1].lease_token)
        assert [got.message.message_id for got in await two] == [21]
        assert (in_flight(rig), rig.delivery.in_flight.waiting_count) == (3, 0)


async def test_who_acks_all_the_time_does_not_keep_others_from_claiming() -> None:
    async with running(settings={"in_flight_max": 2}) as rig:
        await fill(rig, 2, 100)
        held = await rig.claim("q0", max_messages=2)
        other = waiting(rig, "q1")
        await eventually(lambda: rig.delivery.in_flight.waiting_count == 1)

        rounds = 0
        while not other.done():
            again = waiting(rig, "q0", 2)
            await rig.ack(*(one.lease_token for one in held))
            done, _ = await asyncio.wait([again, other], return_when=asyncio.FIRST_COMPLETED)
            held = again.result() if again in done else await again
            rounds += 1

        assert rounds == 1
        assert [got.message.message_id for got in await other] == [101]


@pytest.mark.parametrize("how", ["nack", "lease end", "purge", "delete"])
async def test_a_claim_goes_on_however_the_messages_of_another_queue_leave(how: str) -> None:
    clock = ManualClock()
    async with running(clock=clock, settings={"in_flight_max": 2}) as rig:
        await fill(rig, 2, 2, max_attempts=1)
        held = await rig.claim("q0", max_messages=2, lease_ms=1_000)
        other = waiting(rig, "q1", 2)
        await eventually(lambda: rig.delivery.in_flight.waiting_count == 1)

        match how:
            case "nack":
                await rig.nack(*(one.lease_token for one in held))
            case "lease end":
                await rig.pass_time(1_001)
            case "purge":
                await rig.queues.PurgeQueue(
                    queue_pb2.PurgeQueueRequest(
                        queue_id="q0", states=[queue_pb2.ENTRY_STATE_IN_FLIGHT]
                    )
                )
            case "delete":
                await rig.queues.DeleteQueue(queue_pb2.DeleteQueueRequest(queue_id="q0"))

        assert len(await other) in (1, 2)
        assert rig.delivery.in_flight.waiting_count == 0


async def test_leases_from_before_a_start_count_even_beyond_the_bound() -> None:
    disk = Disk()
    root = memory_root(disk)
    clock = ManualClock()
    async with running(root, clock, disk=disk) as rig:
        await fill(rig, 2, 5)
        held = await rig.claim("q0", max_messages=5)

    async with running(root, clock, disk=disk, settings={"in_flight_max": 3}) as rig:
        other = waiting(rig, "q1")
        await eventually(lambda: rig.delivery.in_flight.waiting_count == 1)
        await rig.ack(*(one.lease_token for one in held[:2]))
        assert (in_flight(rig), other.done()) == (3, False)
        await rig.ack(held[2].lease_token)
        assert len(await other) == 1


async def test_an_operator_learns_that_claims_wait(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    root = memory_root(disk)
    await make_instance(root)
    async with running(root, disk=disk, settings={"in_flight_max": 8}) as rig:
        await fill(rig, 3, 10)
        instance = InstanceServiceStub(rig.channel)

        async def note() -> str:
            return (await instance.GetInstance(GetInstanceRequest())).note

        held = await rig.claim("q0", max_messages=10)
        assert await note() == ""
        others = [waiting(rig, "q1", 10), waiting(rig, "q2", 10)]
        await eventually(lambda: rig.delivery.in_flight.waiting_count == 2)

        said = "8 messages are in flight, in_flight_max is 8: claims on 2 queues wait for acks"
        assert await note() == said
        assert [one.message for one in caplog.records if "in_flight_max" in one.message] == [
            "8 messages are in flight, in_flight_max is 8: claims on 1 queue wait for acks; "
            "raise it, or ack sooner"
        ]
        await rig.ack(*(one.lease_token for one in held))
        got = await others[0]
        await rig.ack(*(one.lease_token for one in got))
        await others[1]
        assert await note() == ""


async def test_an_operator_learns_it_while_the_store_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk()
    root = memory_root(disk)
    await make_instance(root)
    async with running(root, disk=disk, settings={"in_flight_max": 1}) as rig:
        await fill(rig, 2, 1)
        (held,) = await rig.claim("q0")
        other = waiting(rig, "q1")
        await eventually(lambda: rig.delivery.in_flight.waiting_count == 1)

        free, listed = asyncio.Event(), rig.root.objects.list

        async def hang(folder: str) -> list[str]:
            if folder == instance_records.FOLDER:
                await free.wait()
            return await listed(folder)

        monkeypatch.setattr(rig.root.objects, "list", hang)
        async with slatemq.connect(rig.running.address) as client:
            for settings in (True, False):
                status = await client.status(settings=settings, queues=False)
                assert "claims on 1 queue wait for acks" in status.services[0].detail
                assert bool(status.settings_problem) == settings
        free.set()
        await rig.ack(held.lease_token)
        await other


@pytest.mark.parametrize("seed", seeds(3))
async def test_the_bound_holds_under_the_worst_mix_and_all_messages_come_through(seed: int) -> None:
    """Claims, streams, acks, nacks, lease ends, purges and new messages of many queues."""
    chance, clock, queues, messages, most = random.Random(seed), ManualClock(), 12, 40, 9
    async with running(clock=clock, settings={"in_flight_max": most}) as rig:
        ids = await fill(rig, queues, messages, max_attempts=1_000)
        peak, finished = 0, asyncio.Event()

        async def watch() -> None:
            nonlocal peak
            while not finished.is_set():
                peak = max(peak, in_flight(rig))
                await asyncio.sleep(0)

        async def is_done(queue_id: str) -> bool:
            return (await rig.counts(queue_id)).get("done", 0) == messages

        async def claims(queue_id: str) -> None:
            while not await is_done(queue_id):
                count, wait_ms = chance.randint(1, 5), chance.choice([0, 5, 60_000])
                with undone():
                    got = await rig.claim(queue_id, max_messages=count, wait_ms=wait_ms)
                    tokens = [one.lease_token for one in got]
                    match chance.randrange(5) if tokens else None:
                        case 0:
                            await rig.nack(*tokens)
                        case 1:
                            await rig.pass_time(31_000)
                        case int():
                            await rig.ack(*tokens)

        async def streams(queue_id: str) -> None:
            while not await is_done(queue_id):
                stream = rig.consumers.Consume()
                start = consumer_pb2.ConsumeStart(queue_id=queue_id)
                start.credit.messages_count = 1_000
                with undone():
                    await stream.write(consumer_pb2.ConsumeRequest(start=start))
                    while not await is_done(queue_id):
                        answer = await stream.read()
                        assert isinstance(answer, consumer_pb2.ConsumeResponse)
                        if tokens := [one.lease_token for one in messages_of(answer)]:
                            await rig.ack(*tokens)
                stream.cancel()

        watching = asyncio.create_task(watch())
        async with asyncio.timeout(120):
            await asyncio.gather(*(claims(one) for one in ids[::2]), *map(streams, ids[1::2]))
        finished.set()
        await watching

        assert 0 < peak <= most
        assert rig.delivery.in_flight.note == ""
