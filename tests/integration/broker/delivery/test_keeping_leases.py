"""Streams that keep the leases of what they delivered, and how streams are stopped."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
import pytest

from services.broker.core.lease_table import LeaseTable
from services.broker.core.leases import Lease
from services.broker.delivery import lease_keeper
from services.broker.delivery.lease_keeper import LeaseKeeper
from services.broker.delivery.waiters import Stream
from slatemq.v1 import consumer_pb2
from tests.claimed_runs import messages_of
from tests.integration.broker.rig import Disk, Rig, memory_root, refusal, running
from tests.integration.waiting import eventually
from tests.manual_clock import ManualClock
from tests.turns import Turns

LEASE_MS = 30_000
Request = consumer_pb2.ConsumeRequest


class Consumer:
    """A stream of the queue `q`."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.call: Any = rig.consumers.Consume()
        self.tokens: list[str] = []

    @classmethod
    async def with_messages(cls, rig: Rig, count: int, *, keep_leases: bool = True) -> Consumer:
        """One that has been given the messages 1 to `count`."""
        await rig.assign(range(1, count + 1))
        self = cls(rig)
        start = consumer_pb2.ConsumeStart(
            queue_id="q",
            lease_ms=LEASE_MS,
            keep_leases=keep_leases,
            credit=consumer_pb2.ConsumeCredit(messages_count=count),
        )
        await self.say(start=start)
        while len(self.tokens) < count:
            answer = await self.call.read()
            self.tokens += [message.lease_token for message in messages_of(answer)]
        return self

    async def say(self, **action: Any) -> None:
        await self.call.write(Request(**action))

    async def is_heard(self, **action: Any) -> None:
        """Says something, and waits until the broker has it."""
        await self.say(**action)
        (stream,) = streams(self.rig)
        async with asyncio.timeout(60):
            while stream._heard_ms != self.rig.clock.now_ms():
                await asyncio.sleep(0.002)

    async def ended(self) -> None:
        """Reads to the end of the stream; raises what ended it."""
        async with asyncio.timeout(60):
            while await self.call.read() is not grpc.aio.EOF:
                pass


def streams(rig: Rig) -> list[Stream]:
    return [one for one in rig.delivery.streams if isinstance(one, Stream)]


def keeper(rig: Rig) -> LeaseKeeper:
    return rig.broker.keeper


async def go_on(rig: Rig, by_ms: int) -> None:
    """Time goes on in steps in which the broker looks at leases, as it does by itself."""
    while by_ms > 0:
        step_ms = min(by_ms, 1000)
        by_ms -= step_ms
        rig.clock.advance(step_ms)
        await keeper(rig).look()
        await rig.owner.end_leases_once()
    await rig.owner.durable()


async def in_flight(rig: Rig) -> int:
    return (await rig.counts()).get("in_flight", 0)


HEARTBEAT = {"heartbeat": consumer_pb2.ConsumeHeartbeat()}
CREDIT = {"credit": consumer_pb2.ConsumeCredit(messages_count=1)}


@pytest.mark.parametrize("sign", [HEARTBEAT, CREDIT])
async def test_leases_go_on_while_the_consumer_is_heard_of(sign: dict[str, Any]) -> None:
    async with running() as rig:
        await rig.create()
        consumer = await Consumer.with_messages(rig, 3)
        for _ in range(10):
            await go_on(rig, LEASE_MS // 2)
            await consumer.is_heard(**sign)
        assert await in_flight(rig) == 3
        assert await rig.ack(*consumer.tokens) == [0, 0, 0]


async def test_what_a_consumer_extends_for_longer_is_not_shortened() -> None:
    async with running() as rig:
        await rig.create()
        # Given two kept leases, one of which the consumer has extended to ten times its length
        consumer = await Consumer.with_messages(rig, 2)
        request = consumer_pb2.ExtendLeaseRequest(
            lease_tokens=consumer.tokens[:1], lease_ms=10 * LEASE_MS
        )
        await rig.consumers.ExtendLease(request)
        # When the broker has extended leases, and the stream is gone
        await go_on(rig, LEASE_MS // 2)
        await consumer.is_heard(**HEARTBEAT)
        await go_on(rig, LEASE_MS // 2)
        await consumer.say(stop=consumer_pb2.ConsumeStop())
        await consumer.ended()
        await go_on(rig, 2 * LEASE_MS)
        # Then that lease goes on, and the other one has ended
        assert await in_flight(rig) == 1
        assert await rig.ack(consumer.tokens[0]) == [0]


async def test_a_consumer_that_hangs_loses_its_leases() -> None:
    async with running() as rig:
        await rig.create()
        consumer = await Consumer.with_messages(rig, 3)
        await go_on(rig, LEASE_MS)
        assert await in_flight(rig) == 3, "extended while the first request was not too old"
        await go_on(rig, LEASE_MS // 2)
        assert await in_flight(rig) == 0
        assert (await rig.counts())["available"] == 3
        consumer.call.cancel()


async def test_a_stream_that_breaks_keeps_nothing() -> None:
    async with running() as rig:
        await rig.create()
        consumer = await Consumer.with_messages(rig, 3)
        consumer.call.cancel()
        async with asyncio.timeout(60):
            while streams(rig):
                await asyncio.sleep(0.002)
        await go_on(rig, LEASE_MS - 1)
        assert await in_flight(rig) == 3
        await go_on(rig, 1)
        assert await in_flight(rig) == 0
        assert keeper(rig).leases_count == 0


async def test_a_stream_that_did_not_ask_for_it_keeps_nothing() -> None:
    async with running() as rig:
        await rig.create()
        consumer = await Consumer.with_messages(rig, 1, keep_leases=False)
        await go_on(rig, LEASE_MS // 2)
        await consumer.is_heard(**HEARTBEAT)
        await go_on(rig, LEASE_MS // 2)
        assert await in_flight(rig) == 0


async def test_leases_are_kept_for_no_longer_than_their_total() -> None:
    async with running() as rig:
        await rig.create(max_lease_ms=60_000, max_total_lease_ms=100_000)
        consumer = await Consumer.with_messages(rig, 1)
        for _ in range(9):
            await go_on(rig, 10_000)
            await consumer.is_heard(**HEARTBEAT)
        await go_on(rig, 9999)
        assert await in_flight(rig) == 1
        await go_on(rig, 1)
        assert await in_flight(rig) == 0


async def test_a_lower_longest_lease_does_not_stop_the_keeping() -> None:
    async with running() as rig:
        await rig.create()
        consumer = await Consumer.with_messages(rig, 1)
        queue = rig.owner.shard.queues["q"]
        rig.owner.shard.update_queue(queue, queue.settings.changed(max_lease_ms=2000))
        for _ in range(10):
            await go_on(rig, LEASE_MS // 2)
            await consumer.is_heard(**HEARTBEAT)
        assert await in_flight(rig) == 1


async def test_finished_leases_are_let_go_of_and_those_that_run_cost_nothing_in_between() -> None:
    async with running() as rig:
        await rig.create()
        consumer = await Consumer.with_messages(rig, 100)
        assert await rig.ack(*consumer.tokens[:90]) == [0] * 90
        for _ in range(14):
            await go_on(rig, 1000)
            assert not rig.owner.shard.has_changes
        rig.clock.advance(1000)
        await keeper(rig).look()
        assert rig.owner.shard.has_changes
        assert keeper(rig).leases_count == 10


async def test_many_finished_leases_are_let_go_of_before_their_time_in_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_keeper, "EXTEND_AT_ONCE", 10)
    async with running() as rig:
        await rig.create()
        consumer = await Consumer.with_messages(rig, 100)
        assert await rig.ack(*consumer.tokens[:90]) == [0] * 90
        assert keeper(rig).leases_count == 100
        turns, looks = Turns(), Counter[int]()
        find = LeaseTable.running

        def counted(leases: LeaseTable, token: int) -> Lease | None:
            looks[turns.count] += 1
            return find(leases, token)

        monkeypatch.setattr(LeaseTable, "running", counted)

        # When one more is kept than there may be
        keeper(rig)._compact_at = 100
        with turns:
            await consumer.say(**CREDIT)
            await rig.assign([101])
            await consumer.call.read()

            # Then those that run are left, and another task had a turn after each step
            await eventually(lambda: keeper(rig).leases_count == 11)
        assert sum(looks.values()) > 100
        assert max(looks.values()) <= 2 * lease_keeper.EXTEND_AT_ONCE
        for _ in range(3):
            await consumer.is_heard(**HEARTBEAT)
            await go_on(rig, LEASE_MS // 2)
        assert await in_flight(rig) == 11


async def test_kept_leases_are_alive_after_a_restart() -> None:
    disk = Disk()
    root, clock = memory_root(disk), ManualClock()
    async with running(root, clock, disk=disk) as rig:
        await rig.create()
        consumer = await Consumer.with_messages(rig, 1)
        for _ in range(3):
            await go_on(rig, LEASE_MS // 2)
            await consumer.is_heard(**HEARTBEAT)
    async with running(root, clock, disk=disk) as rig:
        assert await in_flight(rig) == 1
        assert await rig.ack(*consumer.tokens) == [0]


async def test_a_stop_ends_the_stream_in_order_and_leaves_its_leases() -> None:
    async with running() as rig:
        await rig.create()
        consumer = await Consumer.with_messages(rig, 2)
        await consumer.say(**CREDIT)
        await consumer.say(stop=consumer_pb2.ConsumeStop())
        await consumer.ended()
        assert await consumer.call.code() == grpc.StatusCode.OK
        await rig.assign([3])
        assert await rig.counts() == {"available": 1, "in_flight": 2}


async def test_what_follows_a_stop_is_refused() -> None:
    disk = Disk()
    async with running(disk=disk) as rig:
        await rig.create()
        consumer = await Consumer.with_messages(rig, 1)
        disk.free.clear()  # a commit that lasts keeps the stream open
        creating = asyncio.create_task(rig.create("other"))
        async with asyncio.timeout(60):
            while "other" not in rig.owner.shard.queues:
                await asyncio.sleep(0.002)
        await consumer.say(stop=consumer_pb2.ConsumeStop())
        await consumer.say(**HEARTBEAT)
        (stream,) = streams(rig)
        async with asyncio.timeout(60):
            while stream.error is None:
                await asyncio.sleep(0.002)
        disk.free.set()
        code, _, field = await refusal(consumer.ended())
        assert (code, field) == (grpc.StatusCode.INVALID_ARGUMENT, "heartbeat")
        await creating


async def test_leases_that_end_while_their_claim_is_committed_are_not_kept() -> None:
    disk = Disk()
    async with running(disk=disk) as rig:
        await rig.create()
        await rig.assign(list(range(1, 101)))
        disk.free.clear()
        call = rig.consumers.Consume()
        start = consumer_pb2.ConsumeStart(
            queue_id="q",
            keep_leases=True,
            credit=consumer_pb2.ConsumeCredit(messages_count=100),
        )
        await call.write(consumer_pb2.ConsumeRequest(start=start))
        await call.read()
        queue = rig.owner.shard.queues["q"]
        while queue.leases.count < 100:
            await asyncio.sleep(0.001)
        await rig.owner.run(lambda _: rig.owner.shard.leases.purge(queue))
        disk.free.set()

        answer = await call.read()
        assert isinstance(answer, consumer_pb2.ConsumeResponse)
        assert len(messages_of(answer)) == 100
        assert rig.broker.keeper.leases_count == 0
        call.cancel()
