"""Large messages over links that are slow, or cut while an answer is on its way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from typing import Any, Final

import pytest

import slatemq
from slatemq._consume import batches, claims, credit
from slatemq._rpc.peers import ATTEMPT_S
from slatemq.errors import Unavailable
from tests.integration.client.links import Link
from tests.integration.client.peers import Broker, Ingest, Instance

WAIT_S: Final = 120.0


@asynccontextmanager
async def linked(instance: Instance) -> AsyncIterator[Link]:
    """The link by which the instance's broker is reached."""
    [broker] = instance.directory.response.brokers
    async with Link(broker.address) as link:
        instance.directory.put("brokers", 0, link.address)
        yield link


class ClaimedFrom(Broker):
    """Notes how long a claim may take, and answers when it is to.

    Attributes:
        left_s: How long the last claim may take.
        answers_claims: Answers to claims wait for it.
    """

    left_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.answers_claims = asyncio.Event()
        self.answers_claims.set()

    async def Claim(self, request: Any, context: Any) -> Any:  # noqa: N802
        left_s = context.time_remaining()
        self.left_s = inf if left_s is None else left_s
        answer = await super().Claim(request, context)
        await self.answers_claims.wait()
        return answer


async def test_a_try_of_a_claim_may_take_as_long_as_the_whole_call() -> None:
    make: Any = ClaimedFrom
    broker = make(available=deque([(b"work", 0)]))
    async with (
        Instance(broker=broker) as instance,
        slatemq.connect(instance.endpoint, call_timeout=600) as client,
    ):
        [message] = await client.claim("q", wait=1)
    assert message.payload == b"work"
    assert broker.left_s > 300


async def test_a_claim_of_a_partition_may_take_as_long_as_the_whole_call() -> None:
    make: Any = ClaimedFrom
    brokers = [make(shard=shard, partition_shards=[0, 1]) for shard in range(2)]
    async with Instance(broker=brokers[0]) as instance:
        await instance.serve(broker=brokers[1], broker_shard=1)
        async with slatemq.connect(instance.endpoint, call_timeout=600) as client:
            assert await client.claim("q") == []
    assert min(broker.left_s for broker in brokers) > 300


async def test_a_claim_of_a_batch_consumer_takes_as_long_as_its_answer() -> None:
    make: Any = ClaimedFrom
    broker = make(available=deque([(b"work", 0)]))
    async with (
        Instance(broker=broker) as instance,
        slatemq.connect(instance.endpoint) as client,
        client.consume_batches("q", 2) as batches,
    ):
        await (await anext(batches)).ack_all()
    assert broker.left_s == inf


@pytest.mark.parametrize("shards", [[0], [0, 1]])
async def test_a_claim_whose_answer_was_lost_does_not_say_that_there_was_nothing(
    shards: list[int],
) -> None:
    # Given a broker that has claimed a message, and whose answer is on its way
    make: Any = ClaimedFrom
    broker = make(available=deque([(b"work", 0)]), partition_shards=shards)
    broker.answers_claims.clear()
    async with Instance(broker=broker) as instance, linked(instance) as link:
        if len(shards) > 1:
            await instance.serve(broker=make(shard=1, partition_shards=shards), broker_shard=1)
        async with slatemq.connect(instance.endpoint, call_timeout=WAIT_S) as client:
            claiming = asyncio.create_task(client.claim("q"))
            await broker.until(lambda: broker.claims and broker.leases)
            # When the link is cut, and a repeat finds nothing
            link.cut()
            broker.answers_claims.set()
            # Then the claim says so
            with pytest.raises(Unavailable):
                await claiming
            await broker.until(lambda: len(broker.claims) > 1)


async def test_a_claim_whose_answer_was_lost_returns_what_its_repeat_brings() -> None:
    make: Any = ClaimedFrom
    broker = make(available=deque([(b"work", 0)]))
    broker.answers_claims.clear()
    async with (
        Instance(broker=broker) as instance,
        linked(instance) as link,
        slatemq.connect(instance.endpoint, call_timeout=WAIT_S) as client,
    ):
        claiming = asyncio.create_task(client.claim("q"))
        await broker.until(lambda: broker.claims and broker.leases)
        broker.available.append((b"more", 0))
        link.cut()
        broker.answers_claims.set()
        [message] = await claiming
    assert message.payload == b"more"


class PublishedTo(Ingest):
    """Notes how long the last publish may take."""

    left_s: float = 0.0

    async def Publish(self, request: Any, context: Any) -> Any:  # noqa: N802
        left_s = context.time_remaining()
        self.left_s = inf if left_s is None else left_s
        return await super().Publish(request, context)


@pytest.mark.parametrize("form", ["publish", "publish_many", "publish_batch"])
async def test_a_try_of_a_large_publish_may_take_as_long_as_the_whole_call(form: str) -> None:
    ingest = PublishedTo()
    message = slatemq.OutgoingMessage(bytes(2 << 20))
    async with (
        Instance(ingest=ingest) as instance,
        slatemq.connect(instance.endpoint, call_timeout=500) as client,
    ):
        if form == "publish":
            await client.publish(message.payload)
        elif form == "publish_many":
            await client.publish_many([message])
        else:
            await client.publish_batch([message])
    assert 300 < ingest.left_s < inf


async def test_a_consumer_has_little_on_its_way_until_it_comes_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a link over which all is late
    monkeypatch.setattr(credit, "TRANSIT_S", -1.0)
    size_bytes, count = credit.FIRST_BYTES // 4, 24
    async with Instance() as instance, slatemq.connect(instance.endpoint) as client:
        broker = instance.broker
        broker.available.extend((bytes(size_bytes), 0) for _ in range(count))
        async with client.consume("q") as messages:
            # When messages are worked on, then no more of them are leased than the first credit has
            for _ in range(count // 2):
                message = await anext(messages)
                assert len(broker.leases) <= 4 + 2
                await message.ack()
            # And once what was granted comes soon, all are, though nothing is taken
            monkeypatch.setattr(credit, "TRANSIT_S", WAIT_S)
            await (await anext(messages)).ack()
            await (await anext(messages)).ack()
            await broker.until(lambda: not broker.available)


async def test_a_broker_that_answers_pings_and_no_claims_is_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claims, "ATTEMPT_S", 0.1)
    monkeypatch.setattr(batches, "BATCH_WAIT_S", 0.1)
    make: Any = ClaimedFrom
    broker = make(available=deque([(b"work", 0)]))
    broker.answers_claims.clear()
    async with (
        Instance(broker=broker) as instance,
        slatemq.connect(instance.endpoint) as client,
        client.consume_batches("q", 1) as consumer,
    ):
        taking = asyncio.create_task(anext(consumer))
        async with asyncio.timeout(WAIT_S):
            while consumer.outage is None:
                await asyncio.sleep(0.01)
            assert "has not answered a claim" in str(consumer.outage.error)

            # Its answer still counts.
            broker.answers_claims.set()
            batch = await taking
        assert [message.payload for message in batch] == [b"work"]
        assert len(broker.claims) == 1


async def test_a_claim_from_a_partition_goes_on_for_longer_than_its_caller_waits() -> None:
    make: Any = ClaimedFrom
    brokers = [make(shard=shard, partition_shards=[0, 1]) for shard in range(2)]
    async with Instance(broker=brokers[0]) as instance:
        await instance.serve(broker=brokers[1], broker_shard=1)
        async with slatemq.connect(instance.endpoint, call_timeout=1) as client:
            assert await client.claim("q") == []
    assert all(one.left_s > ATTEMPT_S / 2 for one in brokers)
