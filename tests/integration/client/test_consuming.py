"""Consuming from a broker that misbehaves: leases are kept, no attempt is burnt, no one hangs."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import slatemq
from slatemq._consume import consumer as consuming
from slatemq.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SlateMQError,
    Unauthenticated,
    Unavailable,
)
from tests.integration.client.peers import Broker, Instance, refuse
from tests.integration.waiting import eventually


@pytest.fixture
async def client(instance: Instance) -> AsyncIterator[slatemq.Client]:
    async with slatemq.connect(instance.endpoint) as connected:
        yield connected


def fill(broker: Broker, count: int) -> list[bytes]:
    payloads = [b"%d" % n for n in range(count)]
    broker.available.extend((payload, 0) for payload in payloads)
    return payloads


async def test_streams_that_break_lose_nothing_and_credit_stays_right(
    instance: Instance, client: slatemq.Client
) -> None:
    # Given a broker whose streams break after 30 messages, which checks the credit
    broker = instance.broker
    broker.break_after, broker.prefetch_max = 30, 20
    payloads = fill(broker, 200)

    # When several tasks iterate over one consumer
    got: list[bytes] = []

    async def work(messages: slatemq.Consumer) -> None:
        async for message in messages:
            async with message:
                got.append(message.payload)
            if len(got) == 200:
                await messages.close()

    async with client.consume("q", prefetch=20) as messages, asyncio.timeout(60):
        await asyncio.gather(*(work(messages) for _ in range(5)))

    # Then everything came once
    assert sorted(got) == sorted(payloads)
    assert sorted(broker.acked) == sorted(payloads)
    assert broker.streams >= 7


@pytest.mark.parametrize(("buffered", "later"), [([150], 1), ([50, 50], 1), ([1] * 10, 9)], ids=str)
async def test_a_stream_that_opens_again_beside_a_full_buffer_gets_all_its_credit(
    instance: Instance, client: slatemq.Client, buffered: list[int], later: int
) -> None:
    # Given a consumer of 10 messages and 100 bytes, and a stream that breaks as it holds as much
    broker, taken_first = instance.broker, 5
    sizes = [1] * taken_first + buffered
    broker.available.extend((bytes(size), 0) for size in sizes)
    broker.break_after = len(sizes)
    consuming_all = client.consume("q", prefetch=10, prefetch_bytes=100)
    async with consuming_all as messages, asyncio.timeout(60):
        for _ in range(taken_first):
            await (await anext(messages)).ack()
        await broker.until(lambda: broker.starts == 2)
        broker.break_after = 1 << 30

        # When it is taken, and messages of another size follow
        broker.available.extend((bytes(later), 0) for _ in range(50))
        await broker.report()
        for _ in range(len(buffered) + 50):
            await (await anext(messages)).ack()

    # Then all of them have come
    assert len(broker.acked) == len(sizes) + 50
    assert broker.streams == 2


async def test_closing_gives_back_what_was_not_begun(
    instance: Instance, client: slatemq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consuming, "CLOSE_S", 60.0)
    fill(instance.broker, 50)
    async with client.consume("q", prefetch=20) as messages:
        mine = [await anext(messages) for _ in range(3)]
        await mine[0].ack()

    # All that was claimed is given back, but for the one acked and the two in work
    broker = instance.broker
    assert all(release for _, _, release in broker.nacked)
    assert {payload for payload, _ in broker.leases.values()} == {b"1", b"2"}
    assert not mine[1].lost
    # and those can still be finished
    await mine[1].ack()
    await mine[2].nack("no", delay=1)
    assert broker.nacked[-1] == (b"2", "no", False)


@pytest.mark.parametrize("kind", ["messages", "batches"])
async def test_closing_does_not_wait_for_a_broker_that_says_nothing(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    monkeypatch.setattr(consuming, "CLOSE_S", 0.1)
    fill(instance.broker, 50)
    client = slatemq.connect(instance.endpoint)
    await client.__aenter__()
    consumer: Any = client.consume("q") if kind == "messages" else client.consume_batches("q", 10)
    await anext(consumer)
    instance.broker.silent = True

    async with asyncio.timeout(60):
        await client.close()
    if kind == "messages":
        assert "could not give back" in caplog.text
        assert "come again once their leases have ended: no answer within 0.1 s" in caplog.text


@pytest.mark.slow  # Leases that outlast a standstill of the machine.
async def test_leases_are_kept_in_the_buffer_and_in_work(
    instance: Instance, client: slatemq.Client
) -> None:
    broker = instance.broker
    broker.lease_ms = 1500
    fill(broker, 4)
    async with client.consume("q", prefetch=4) as messages:
        first = await anext(messages)
        await broker.until(lambda: all(broker.extended.count(t) >= 3 for t in broker.leases))
        # What is finished is extended no longer
        await first.ack()
        del broker.extended[:]
        await broker.until(lambda: len(broker.extended) >= 9)
        assert first.lease_token not in broker.extended[3:]


async def test_a_message_whose_lease_ended_in_the_buffer_is_not_handed_out(
    instance: Instance, client: slatemq.Client
) -> None:
    broker = instance.broker
    broker.lease_ms = 1500
    fill(broker, 4)
    async with client.consume("q", prefetch=4) as messages:
        first = await anext(messages)
        await broker.until(lambda: len(broker.leases) == 4)
        gone = next(token for token, held in broker.leases.items() if held[0] == b"2")
        broker.ended |= {gone, first.lease_token}
        await eventually(lambda: first.lost and any(lease.lost for _, lease, _ in messages._buffer))

        assert [(await anext(messages)).payload for _ in range(2)] == [b"1", b"3"]
        with pytest.raises(FailedPrecondition) as refused:
            await first.ack()
        assert refused.value.reason == "LEASE_ENDED"


@pytest.mark.slow  # Leases that outlast a standstill of the machine.
async def test_what_is_buffered_for_longer_than_the_hold_goes_back_uncounted(
    instance: Instance, client: slatemq.Client
) -> None:
    broker = instance.broker
    broker.lease_ms = 1500
    fill(broker, 2)
    async with client.consume("q", prefetch=2, hold=2) as messages:
        await anext(messages)
        await broker.until(lambda: broker.nacked)
        assert broker.nacked == [(b"1", "", True)]


async def test_iterating_goes_on_raising_what_ended_it(
    instance: Instance, client: slatemq.Client
) -> None:
    async with client.consume("q") as messages:
        waiting = asyncio.create_task(anext(messages))
        await asyncio.sleep(0.05)
        instance.broker.exists = False
        await instance.broker.report()
        for _ in range(2):
            with pytest.raises(NotFound):
                await waiting
            waiting = asyncio.ensure_future(messages.__anext__())
        with pytest.raises(NotFound):
            await waiting


async def test_a_claim_that_waits_hears_that_its_queue_is_gone(
    instance: Instance, client: slatemq.Client
) -> None:
    waiting = asyncio.create_task(client.claim("q", wait=30))
    await asyncio.sleep(0.05)
    instance.broker.exists = False
    await instance.broker.report()
    with pytest.raises(NotFound):
        await waiting


async def test_leaving_acks_failing_nacks_cancelling_releases(
    instance: Instance, client: slatemq.Client
) -> None:
    broker = instance.broker
    fill(broker, 4)
    async with client.consume("q", prefetch=10) as messages:
        with pytest.raises(ValueError, match="no good"):
            async with await anext(messages):
                raise ValueError("no good")

        begun = asyncio.Event()

        async def cancelled() -> None:
            async with await anext(messages):
                begun.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(cancelled())
        await begun.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

        # A cancel that no one asked this task for is a failure of its work
        with pytest.raises(asyncio.CancelledError):
            async with await anext(messages):
                raise asyncio.CancelledError

        message = await anext(messages)
        async with message:
            pass
        assert message.finished
        with pytest.raises(FailedPrecondition, match="already"):
            await message.ack()
    await broker.until(lambda: len(broker.nacked) == 3)
    assert sorted(broker.nacked) == [
        (b"0", "ValueError: no good", False),
        (b"1", "", True),
        (b"2", "CancelledError", False),
    ]
    assert broker.acked == [b"3"]


async def test_reasons_are_cut_and_delays_are_checked_before_they_reach_others(
    instance: Instance, client: slatemq.Client
) -> None:
    fill(instance.broker, 1)
    (message,) = await client.claim("q")
    with pytest.raises(InvalidArgument) as refused:
        await message.nack("x", delay=-1)
    assert refused.value.field == "delay"
    await message.nack("é" * 1000)
    assert instance.broker.nacked == [(b"0", "é" * 512, False)]


async def test_an_ack_whose_answer_got_lost_is_repeated(
    instance: Instance, client: slatemq.Client
) -> None:
    fill(instance.broker, 3)
    instance.broker.lose = 2
    messages = await client.claim("q", 3)
    await asyncio.gather(*(message.ack() for message in messages))
    assert sorted(instance.broker.acked) == [b"0", b"1", b"2"]


async def test_each_token_is_answered_for_itself(
    instance: Instance, client: slatemq.Client
) -> None:
    fill(instance.broker, 1)
    (message,) = await client.claim("q")
    async with asyncio.timeout(20):  # A forged shard is not waited for: calls wait 30 s.
        results = await client.ack(["nonsense", "ffff-0123456789abcdef", message.lease_token])
    assert isinstance(results[0], InvalidArgument)
    assert isinstance(results[1], NotFound)
    assert results[2] is None
    assert instance.broker.acked == [b"0"]


async def test_processing_survives_failing_handlers_and_stops_cleanly(
    instance: Instance, client: slatemq.Client
) -> None:
    broker = instance.broker
    payloads = fill(broker, 40)
    begun: list[bytes] = []

    async def handler(message: slatemq.Received) -> None:
        begun.append(message.payload)
        if len(begun) == 3:
            raise KeyError("three")
        if len(begun) == 5:
            raise asyncio.CancelledError
        if len(begun) > 20:
            await asyncio.Event().wait()

    processing = asyncio.create_task(client.process("q", handler, concurrency=4))
    await broker.until(lambda: len(broker.acked) == 18)
    processing.cancel()
    await asyncio.wait([processing])

    assert processing.cancelled()
    await broker.until(lambda: not broker.leases)
    failed = [reason for _, reason, release in broker.nacked if not release]
    assert sorted(failed) == ["CancelledError", "KeyError: 'three'"]
    assert {p for p, _, release in broker.nacked if release} <= set(payloads)


async def test_processing_a_queue_that_is_not_there_says_so(
    instance: Instance, client: slatemq.Client
) -> None:
    instance.broker.exists = False

    async def handler(message: slatemq.Received) -> None:
        raise AssertionError("there is no message")

    with pytest.raises(NotFound):
        await client.process("q", handler)


async def test_a_fault_of_the_client_itself_reaches_the_caller(
    client: slatemq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(queue_id: str, partition: int = 0) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(client._locations, "shard_of", fault)
    for consumer in (client.consume("q"), client.consume_batches("q")):
        with pytest.raises(SlateMQError, match="ZeroDivisionError"):
            async with asyncio.timeout(60):
                await anext(consumer)


async def test_batches_are_claimed_ahead_and_acked_together(
    instance: Instance, client: slatemq.Client
) -> None:
    broker = instance.broker
    payloads = fill(broker, 25)
    async with client.consume_batches("q", 10) as batches:
        first = await anext(batches)
        # The next is claimed while this one is worked on
        await broker.until(lambda: len(broker.leases) == 20)
        assert await first.ack_all() == [None] * 10
        async with await anext(batches) as second:
            await second[0].nack("not this one")
        with pytest.raises(ValueError, match="bad"):
            async with await anext(batches):
                raise ValueError("bad")
    assert broker.acked == [p for p in payloads[:20] if p != second[0].payload]
    reasons = [reason for _, reason, _ in broker.nacked]
    assert reasons == ["not this one"] + ["ValueError: bad"] * 5


@pytest.mark.slow  # Leases that outlast a standstill of the machine.
async def test_leases_of_batches_are_kept_and_what_was_not_begun_goes_back(
    instance: Instance, client: slatemq.Client
) -> None:
    broker = instance.broker
    broker.lease_ms = 1500
    fill(broker, 20)
    async with client.consume_batches("q", 10) as batches:
        batch = await anext(batches)
        await broker.until(
            lambda: (
                len(broker.leases) == 20
                and all(broker.extended.count(token) >= 2 for token in broker.leases)
            )
        )
        lost = batch[0].lease_token
        broker.ended.add(lost)
        results = await batch.ack_all()
        assert [isinstance(result, FailedPrecondition) for result in results] == [True] + [
            False
        ] * 9
    assert [release for _, _, release in broker.nacked] == [True] * 10
    assert set(broker.leases) == {lost}


async def test_batches_go_on_after_an_outage(instance: Instance, client: slatemq.Client) -> None:
    fill(instance.broker, 10)
    async with client.consume_batches("q", 10) as batches:
        async with await anext(batches):
            pass
        # The broker stops, and comes back elsewhere
        await instance.servers[2].stop(None)
        await instance.serve(broker=instance.broker)
        fill(instance.broker, 10)
        await instance.broker.report()
        async with asyncio.timeout(60):
            async with await anext(batches) as batch:
                assert len(batch) == 10
    assert len(instance.broker.acked) == 20


async def test_a_claimed_batch_is_offered_though_the_next_look_up_fails(
    instance: Instance,
) -> None:
    broker = instance.broker
    payloads = fill(broker, 10)
    await instance.serve(broker=broker, broker_shard=1)
    broker.partitions_count = 2  # What the client knows is outdated, and it asks again.
    broker.claims_max = 1

    async with (
        slatemq.connect(instance.endpoint) as client,
        client.consume_batches("q", 10) as batches,
    ):
        async with await anext(batches) as batch:
            assert [message.payload for message in batch] == payloads
        with pytest.raises(NotFound):
            await anext(batches)

    assert broker.acked == payloads


async def test_after_closing_there_is_a_clear_end(instance: Instance) -> None:
    async with slatemq.connect(instance.endpoint) as client:
        messages = client.consume("q")
        waiting = asyncio.create_task(anext(messages))
        await asyncio.sleep(0.05)
    with pytest.raises(StopAsyncIteration):
        await anext(messages)
    (ended,) = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(ended, StopAsyncIteration)
    with pytest.raises(Unavailable) as refused:
        await anext(client.consume("q"))
    assert refused.value.reason == "CLIENT_CLOSED"


@pytest.mark.parametrize(
    "options", [{"prefetch": 0}, {"prefetch": 100_001}, {"prefetch_bytes": 0}, {"hold": -1}]
)
async def test_wishes_that_could_not_work_are_refused(
    client: slatemq.Client, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument):
        client.consume("q", **options)


class Locating(Broker):
    """Refuses to say where a queue is.

    Attributes:
        refusals: With what, one after the other.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refusals: deque[SlateMQError] = deque()

    async def LocateQueue(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.refusals:
            await refuse(context, self.refusals.popleft())
        return await super().LocateQueue(request, context)


@asynccontextmanager
async def locating() -> AsyncIterator[tuple[Instance, Locating]]:
    """An instance of two brokers, that refuse to say where a queue is; one has it."""
    make: Any = Locating
    async with Instance(broker=make()) as instance:
        other: Any = make(shard=1)
        await instance.serve(broker=other, broker_shard=1)
        broker: Any = instance.broker
        other.refusals = broker.refusals
        yield instance, broker


async def test_a_consumer_that_may_not_ask_whether_its_queue_has_moved_says_so() -> None:
    async with (
        locating() as (instance, broker),
        slatemq.connect(instance.endpoint) as client,
        client.consume("q") as messages,
        asyncio.timeout(60),
    ):
        # Given a consumer that waits, whose token ends
        waiting = asyncio.create_task(anext(messages))
        await broker.until(lambda: broker.streams)
        broker.refusals.extend(Unauthenticated("the token has expired") for _ in range(2))
        # When its queue is deleted
        broker.exists = False
        await broker.report()
        # Then iterating ends with that
        with pytest.raises(Unauthenticated):
            await waiting


async def test_a_consumer_asks_again_whether_its_queue_has_moved_where_a_limit_is_reached() -> None:
    async with (
        locating() as (instance, broker),
        slatemq.connect(instance.endpoint) as client,
        client.consume("q") as messages,
        asyncio.timeout(60),
    ):
        waiting = asyncio.create_task(anext(messages))
        await broker.until(lambda: broker.streams)
        full = ResourceExhausted("too many calls", retry_after_ms=1)
        broker.refusals.extend(full for _ in range(2))
        broker.exists = False
        await broker.report()
        with pytest.raises(NotFound):
            await waiting
        assert not broker.refusals
