"""Consume: credit, ends, and what becomes of messages that were not sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from slatemq.v1 import consumer_pb2, queue_pb2
from tests.claimed_runs import ClaimedMessage, messages_of
from tests.integration.broker.rig import Disk, Ingest, Rig, memory_root, refusal, running
from tests.integration.waiting import eventually

INVALID = grpc.StatusCode.INVALID_ARGUMENT
Request = consumer_pb2.ConsumeRequest
Credit = consumer_pb2.ConsumeCredit


class Consumer:
    """One stream."""

    def __init__(self, rig: Rig) -> None:
        self.call: Any = rig.consumers.Consume()

    async def start(self, messages: int = 0, size: int = 0, **start: object) -> str:
        credit = Credit(messages_count=messages, payload_bytes=size) if messages or size else None
        begun = consumer_pb2.ConsumeStart(**{"queue_id": "q", "credit": credit, **start})  # type: ignore[arg-type]
        await self.call.write(Request(start=begun))
        first = await self.call.read()
        assert not first.runs
        return str(first.consumer_id)

    async def grant(self, messages: int = 0, size: int = 0) -> None:
        credit = Credit(messages_count=messages, payload_bytes=size)
        await self.call.write(Request(credit=credit))

    async def receive(self, count: int) -> list[ClaimedMessage]:
        got: list[ClaimedMessage] = []
        while len(got) < count:
            answer = await self.call.read()
            assert answer.runs, "never empty but for the first"
            got += messages_of(answer)
        return got

    async def nothing_more(self, rig: Rig) -> None:
        """No message is on its way, nor claimed for this stream alone."""
        reading = asyncio.ensure_future(self.call.read())
        done, _ = await asyncio.wait([reading], timeout=0.1)
        assert not done, reading.result()


@asynccontextmanager
async def consuming(rig: Rig) -> AsyncIterator[Consumer]:
    consumer = Consumer(rig)
    yield consumer
    consumer.call.cancel()


def ids(messages: list[ClaimedMessage]) -> list[int]:
    return [claimed.message.message_id for claimed in messages]


async def test_no_more_messages_are_sent_than_there_is_credit_for() -> None:
    async with running() as rig, consuming(rig) as consumer:
        await rig.create()
        await rig.assign(list(range(1, 11)))
        assert await consumer.start(messages=3, consumer_id="me") == "me"
        assert ids(await consumer.receive(3)) == [1, 2, 3]
        assert await rig.counts() == {"available": 7, "in_flight": 3}
        await consumer.grant(messages=2)
        assert ids(await consumer.receive(2)) == [4, 5]
        await consumer.nothing_more(rig)
        assert await rig.counts() == {"available": 5, "in_flight": 5}


async def test_no_more_bytes_are_sent_than_there_is_credit_for() -> None:
    async with running() as rig, consuming(rig) as consumer:
        await rig.create()
        await rig.assign(list(range(1, 11)))  # of 10 bytes each
        await consumer.start(messages=100, size=35)
        assert ids(await consumer.receive(4)) == [1, 2, 3, 4], "one passes while credit is left"
        await consumer.grant(size=15)
        assert ids(await consumer.receive(1)) == [5]
        await consumer.nothing_more(rig)


async def test_one_message_is_sent_however_large_and_then_owed_for() -> None:
    ingest = Ingest()
    ingest.sizes = {1: 1000}
    async with running(ingest=ingest) as rig, consuming(rig) as consumer:
        await rig.create()
        await rig.assign([1, 2])
        await consumer.start(messages=9, size=1)
        assert ids(await consumer.receive(1)) == [1]
        await consumer.grant(size=990)
        await asyncio.sleep(0.05)
        assert await rig.counts() == {"available": 1, "in_flight": 1}
        await consumer.grant(size=10)
        assert ids(await consumer.receive(1)) == [2]


async def test_a_stream_without_credit_gets_nothing_until_it_grants_some() -> None:
    async with running() as rig, consuming(rig) as consumer:
        await rig.create()
        await rig.assign([1])
        await consumer.start()
        await asyncio.sleep(0.02)
        assert await rig.counts() == {"available": 1}
        await consumer.grant(messages=1)
        assert ids(await consumer.receive(1)) == [1]


async def test_when_the_consumer_closes_its_side_the_credit_is_used_up_first() -> None:
    async with running() as rig, consuming(rig) as consumer:
        await rig.create()
        await rig.assign([1])
        await consumer.start(messages=2)
        await consumer.call.done_writing()
        assert ids(await consumer.receive(1)) == [1]
        await rig.assign([2, 3])
        assert ids(await consumer.receive(1)) == [2]
        assert await consumer.call.read() is grpc.aio.EOF
        assert await consumer.call.code() == grpc.StatusCode.OK
        assert await rig.counts() == {"available": 1, "in_flight": 2}


async def test_a_stream_closed_without_credit_ends_at_once() -> None:
    async with running() as rig, consuming(rig) as consumer:
        await rig.create()
        await consumer.start()
        await consumer.call.done_writing()
        assert await consumer.call.read() is grpc.aio.EOF


async def test_a_bad_first_request_is_refused() -> None:
    start = consumer_pb2.ConsumeStart
    bad = [
        ("start", Request()),
        ("start", Request(credit=Credit(messages_count=1))),
        ("start.queue_id", Request(start=start())),
        ("start.queue_id", Request(start=start(queue_id="a b"))),
        ("start.lease_ms", Request(start=start(queue_id="q", lease_ms=999))),
        ("start.lease_ms", Request(start=start(queue_id="q", lease_ms=-1))),
        ("start.consumer_id", Request(start=start(queue_id="q", consumer_id="x" * 256))),
        ("start.credit.messages_count", Request(start=start(queue_id="q", credit=Credit()))),
    ]
    async with running() as rig:
        await rig.create()
        for field, request in bad:
            call = rig.consumers.Consume()
            await call.write(request)
            assert (await refusal(call.read()))[::2] == (INVALID, field)
        call = rig.consumers.Consume()
        await call.done_writing()
        assert (await refusal(call.read()))[::2] == (INVALID, "start")
        call = rig.consumers.Consume()
        await call.write(Request(start=start(queue_id="nobody")))
        assert (await refusal(call.read()))[0] == grpc.StatusCode.NOT_FOUND


async def test_bad_credit_and_a_second_start_end_the_stream() -> None:
    bad = [
        ("credit.messages_count", Request(credit=Credit())),
        ("credit.messages_count", Request(credit=Credit(messages_count=-1))),
        ("credit.payload_bytes", Request(credit=Credit(messages_count=1, payload_bytes=-1))),
        ("credit.messages_count", Request(credit=Credit(messages_count=100_001))),
        ("start", Request(start=consumer_pb2.ConsumeStart(queue_id="q"))),
        ("credit", Request()),
    ]
    async with running() as rig:
        await rig.create()
        for field, request in bad:
            consumer = Consumer(rig)
            await consumer.start()
            await consumer.call.write(request)
            assert (await refusal(consumer.call.read()))[::2] == (INVALID, field)
        await idle(rig)


async def idle(rig: Rig) -> None:
    """Waits until nothing is left of claims and streams."""
    delivery = rig.delivery
    await eventually(
        lambda: not (delivery.places.count or delivery._waiter_lines or delivery.streams)
    )


async def test_a_broken_stream_leaves_what_was_sent_claimed_and_gives_back_the_rest() -> None:
    disk = Disk()
    async with running(memory_root(disk), disk=disk) as rig:
        await rig.create()
        await rig.assign([1])
        consumer = Consumer(rig)
        await consumer.start(messages=10)
        await consumer.receive(1)
        disk.free.clear()
        assigning = asyncio.create_task(rig.assign([2, 3]))
        while rig.owner.shard.queues["q"].leases.count < 3:
            await asyncio.sleep(0.001)

        consumer.call.cancel()
        while rig.owner.shard.queues["q"].leases.count > 1:
            await asyncio.sleep(0.001)

        disk.free.set()
        await assigning
        await idle(rig)
        assert await rig.counts() == {"available": 2, "in_flight": 1}
        assert [m.attempts_count for m in await rig.claim(max_messages=9)] == [1, 1]


async def test_what_could_be_sent_only_after_half_its_lease_is_given_back_with_its_credit() -> None:
    disk = Disk()
    async with running(memory_root(disk), disk=disk) as rig, consuming(rig) as consumer:
        await rig.create()
        await consumer.start(messages=2, size=20, lease_ms=10_000)
        await consumer.call.done_writing()
        await asyncio.sleep(0.02)
        disk.free.clear()
        assigning = asyncio.create_task(rig.assign([1, 2]))
        await eventually(lambda: rig.owner.shard.queues["q"].leases.count == 2)
        rig.clock.advance(5001)
        disk.free.set()

        received = await consumer.receive(2)

        await assigning
        assert ids(received) == [1, 2]
        assert [m.attempts_count for m in received] == [1, 1]
        assert received[0].lease_deadline_ms == rig.clock.now_ms() + 10_000
        assert await consumer.call.read() is grpc.aio.EOF, "and then the credit is used up"


async def test_a_stream_ends_when_its_queue_is_deleted_with_credit_or_without() -> None:
    async with running() as rig, consuming(rig) as waiting, consuming(rig) as idling:
        await rig.create()
        await waiting.start(messages=1)
        await idling.start()
        await rig.queues.DeleteQueue(queue_pb2.DeleteQueueRequest(queue_id="q"))
        not_found = (grpc.StatusCode.NOT_FOUND, "QUEUE_NOT_FOUND")
        assert (await refusal(waiting.call.read()))[:2] == not_found
        assert (await refusal(idling.call.read()))[:2] == not_found


async def test_a_drain_ends_every_stream_and_claim_and_says_why() -> None:
    async with running(settings={"drain_ms": 60_000}) as rig:
        await rig.create()
        unbegun = rig.consumers.Consume()
        await unbegun.wait_for_connection()
        with_credit, without = Consumer(rig), Consumer(rig)
        await with_credit.start(messages=5)
        await without.start()
        claim = asyncio.create_task(refusal(rig.claim(wait_ms=30_000)))
        while rig.delivery.places.count < 4:
            await asyncio.sleep(0.001)

        rig.signals.first.set()
        reads = (unbegun.read(), with_credit.call.read(), without.call.read())
        results = await asyncio.gather(claim, *map(refusal, reads))

        # What the end of the drain's time had ended would not say so.
        assert {one[:2] for one in results} == {(grpc.StatusCode.UNAVAILABLE, "DRAINING")}


async def test_streams_share_what_comes() -> None:
    async with running() as rig:
        await rig.create()
        consumers = [Consumer(rig) for _ in range(4)]
        for consumer in consumers:
            await consumer.start(messages=10_000)
        for begin in range(1, 4001, 1000):
            await rig.assign(list(range(begin, begin + 1000)))
        got = await asyncio.gather(*(consumer.receive(500) for consumer in consumers))
        assert [len(one) for one in got] >= [500] * 4
        for consumer in consumers:
            consumer.call.cancel()
        await idle(rig)


async def test_an_answer_is_bounded_with_the_headers_of_its_messages() -> None:
    ingest = Ingest()
    ingest.header_bytes = 60_000
    async with running(ingest=ingest) as rig, consuming(rig) as consumer:
        await rig.create()
        await rig.assign(list(range(1, 2001)))  # 120 MB of headers: more than gRPC may carry
        claimed = await rig.claim(max_messages=2000)
        assert 500 < len(claimed) < 1200
        await consumer.start(messages=2000)
        rest = await consumer.receive(2000 - len(claimed))
        assert ids([*claimed, *rest]) == list(range(1, 2001))
