"""How the client publishes single messages over a stream, and what it does when one fails."""

import asyncio
from collections import Counter

import pytest

import slatemq
from slatemq import BatchSettings
from slatemq._publish import streams as publish_streams
from slatemq.errors import DeadlineExceeded, ResourceExhausted
from tests.integration.client.peers import Ingest, Instance


async def test_single_messages_go_over_one_stream(instance: Instance) -> None:
    ingest = instance.ingest
    async with slatemq.connect(instance.endpoint) as client:
        for n in range(50):
            await client.publish(b"%d" % n)
    assert ingest.stored == [b"%d" % n for n in range(50)]
    assert ingest.streamed == len(ingest.calls) == 50
    # And each is a request of its own, with an ID of its own
    assert len({request_id for _, request_id, _ in ingest.calls}) == 50


async def test_what_is_published_until_an_answer_goes_together(instance: Instance) -> None:
    ingest = instance.ingest
    ingest.gate.clear()
    async with slatemq.connect(instance.endpoint) as client:
        first = asyncio.create_task(client.publish(b"first"))
        await ingest.asked.wait()
        later = []
        for n in range(100):
            later.append(asyncio.create_task(client.publish(b"%d" % n)))
            await asyncio.sleep(0)
        ingest.gate.set()
        await asyncio.gather(first, *later)
    assert [count for _, _, count in ingest.calls] == [1, 100]


async def test_a_lone_message_waits_for_no_other(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with slatemq.connect(instance.endpoint, batches=BatchSettings(linger_s=0.3)) as client:
        await client.publish(b"lingers")
    async with slatemq.connect(instance.endpoint) as client:
        await client.publish(b"opens the stream")
        # When the clock stands still, so that what waits for a time waits for ever
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        with monkeypatch.context() as still:
            still.setattr(loop, "time", lambda: now_s)
            for _ in range(10):
                await client.publish(b"x")
    assert instance.ingest.stored == [b"lingers", b"opens the stream", *[b"x"] * 10]


@pytest.mark.parametrize("breaks", [1, 3])
async def test_a_stream_that_breaks_loses_and_doubles_nothing(
    instance: Instance, breaks: int
) -> None:
    # Given streams that break after a request is stored
    ingest = instance.ingest
    ingest.breaks = breaks
    async with slatemq.connect(instance.endpoint, batches=BatchSettings(messages_max=7)) as client:
        ids = await asyncio.gather(*(client.publish(b"%d" % n) for n in range(100)))
        assert [ingest.stored[one - 1] for one in ids] == [b"%d" % n for n in range(100)]

        # Then each was stored once, those without an answer were sent again under their IDs
        assert sorted(ingest.stored) == sorted(b"%d" % n for n in range(100))
        assert max(Counter(request_id for _, request_id, _ in ingest.calls).values()) == 2

        # And after a while there is another stream
        ingest.breaks = 0
        before = ingest.streamed
        await asyncio.sleep(publish_streams.AVOID_S)
        for _ in range(2):  # The first may still have to ask where ingest is.
            await client.publish(b"x")
        assert ingest.streamed > before


async def test_a_repeat_after_a_broken_stream_stays_on_its_shard(instance: Instance) -> None:
    other = Ingest(shard=1)
    await instance.serve(ingest=other)
    for ingest in (instance.ingest, other):
        ingest.breaks = 1
    async with slatemq.connect(instance.endpoint) as client:
        for n in range(20):
            await client.publish(b"%d" % n)
    shards = [{call[1] for call in ingest.calls} for ingest in (instance.ingest, other)]
    assert all(shards)
    assert not shards[0] & shards[1]
    assert sorted(instance.ingest.stored + other.stored) == sorted(b"%d" % n for n in range(20))


async def test_refused_for_now_is_sent_again_after_the_time_asked(instance: Instance) -> None:
    ingest = instance.ingest
    async with slatemq.connect(instance.endpoint) as client:
        await client.publish(b"opens the stream")
        ingest.before.append(ResourceExhausted("too much waits", retry_after_ms=300))
        await client.publish(b"x")
    assert ingest.streamed == 2
    (_, first, _), (_, second, _) = ingest.calls[1:]
    assert first == second
    assert ingest.calls[2][0] - ingest.calls[1][0] >= 0.3


async def test_an_answer_that_does_not_come_in_time_is_no_success(instance: Instance) -> None:
    ingest = instance.ingest
    async with slatemq.connect(instance.endpoint, call_timeout=2) as client:
        await client.publish(b"opens the stream")
        ingest.gate.clear()
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(client.publish(b"x"), 60)
        ingest.gate.set()
        # And the stream goes on, whatever comes late on it.
        assert await client.publish(b"y")
    assert ingest.stored.count(b"x") == 1


async def test_what_is_not_written_before_its_time_is_over_is_not_sent(
    instance: Instance,
) -> None:
    ingest = instance.ingest
    batches = BatchSettings(messages_max=1, requests_max=50)
    async with slatemq.connect(instance.endpoint, call_timeout=2, batches=batches) as client:
        await client.publish(b"opens the stream")
        # Given an ingest that reads no further requests, and more of them than the connection takes
        ingest.gate.clear()
        sent = [b"%d" % n + bytes(900_000) for n in range(30)]
        outcomes = await asyncio.gather(*map(client.publish, sent), return_exceptions=True)
        assert {type(one) for one in outcomes} == {DeadlineExceeded}

        # Then it gets those behind no more when it reads on
        ingest.gate.set()
        await client.publish(b"y")
    assert b"y" in ingest.stored
    sent_count = len(set(ingest.stored) & set(sent))
    assert 0 < sent_count < len(sent)


async def test_large_requests_are_calls_and_block_no_caller(instance: Instance) -> None:
    async with slatemq.connect(instance.endpoint) as client:
        await client.publish(b"opens the stream")
        await asyncio.gather(client.publish(bytes(2 << 20)), client.publish(b"small"))
        before = instance.ingest.streamed
        await client.publish(bytes(2 << 20))
        assert instance.ingest.streamed == before
    assert len(instance.ingest.stored) == 4


async def test_a_stream_at_rest_ends_and_another_begins(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_streams, "IDLE_S", 1.0)
    async with slatemq.connect(instance.endpoint) as client:
        await client.publish(b"one")
        streams = client._publisher._sender.streams
        assert len(streams._alive) == 1
        async with asyncio.timeout(60):
            while streams._alive:
                await asyncio.sleep(0.01)
        assert not streams._streams
        await client.publish(b"two")
    assert instance.ingest.stored == [b"one", b"two"]
    assert instance.ingest.streamed == 2


async def test_many_shards_get_few_streams(instance: Instance) -> None:
    others = [Ingest(shard=shard) for shard in range(1, 12)]
    for other in others:
        await instance.serve(ingest=other)
    async with slatemq.connect(instance.endpoint) as client:
        for n in range(60):
            await client.publish(b"%d" % n)
        streams = client._publisher._sender.streams
        assert len(streams._alive) == publish_streams.STREAMS_MAX
    used = [len(ingest.stored) for ingest in (instance.ingest, *others) if ingest.stored]
    assert sum(used) == 60
    assert len(used) == publish_streams.STREAMS_MAX
