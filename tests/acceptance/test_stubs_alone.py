"""All of the straight way through, with generated stubs and nothing else of ours."""

import asyncio
from collections.abc import Iterator

import pytest

from slatemq.v1 import consumer_pb2, ingest_pb2, queue_pb2, router_pb2
from tests.acceptance.local_stack import LocalStack
from tests.acceptance.stubs import Stubs, persist
from tests.acceptance.workload import LEASE_MS, LONG_LEASE_MS, Run, find_faults, make_lines
from tests.claimed_runs import messages_of
from tests.integration.waiting import WAIT_SECONDS

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """One for all of them: each has queues of its own."""
    with LocalStack(tmp_path_factory.mktemp("stack"), ready=True) as running:
        yield running


async def test_each_queue_gets_exactly_the_messages_that_its_filter_lets_in(stubs: Stubs) -> None:
    # Given ten queues with overlapping filters
    run = Run(make_lines(3_000), LONG_LEASE_MS)
    await run.create_queues(stubs)

    # When lines are published while consumers compete for them
    await asyncio.gather(run.publish(stubs), run.consume(stubs, consumers_per_queue=2))
    await run.find_nothing_more(stubs)

    # Then every entry came once, and was acked
    assert run.faults() == []
    assert run.redelivered_count == 0
    assert run.acked_count == run.entries_count > 0


async def test_what_a_consumer_left_under_its_lease_is_found_afterwards(stubs: Stubs) -> None:
    """The look on which the judge of all these runs rests."""
    # Given a message that a consumer has claimed, and neither acked nor nacked
    queue = queue_pb2.Queue(queue_id="left", max_attempts=20)
    queue.backoff.kind = queue_pb2.Backoff.KIND_NONE
    await stubs.queues.CreateQueue(queue_pb2.CreateQueueRequest(queue=queue))
    publish = ingest_pb2.PublishRequest()
    publish.runs.add(payloads=[b"one"], headers={"queue": "left"})
    await stubs.ingest.Publish(publish)
    claim = consumer_pb2.ClaimRequest(queue_id="left", wait_ms=60_000, lease_ms=LEASE_MS)
    assert len(messages_of(await persist(lambda: stubs.consumer.Claim(claim)))) == 1

    # When the queue is looked into once more, and again where its broker stood still, which gives
    # leases more time then, or an ack came too late
    run = Run([])
    async with asyncio.timeout(WAIT_SECONDS):
        while not run.acked_count:
            await run.find_nothing_more(stubs, ["left"])

    # Then the message is noted
    notes = run.notes["left", b"one"]
    assert notes[0].attempt == 2
    assert sum(note.acked for note in notes) == 1
    assert find_faults(notes, LEASE_MS) == []


async def test_a_message_is_published_explained_claimed_nacked_extended_and_acked(
    stubs: Stubs,
) -> None:
    # Given a queue without a filter of its own
    queue = queue_pb2.Queue(queue_id="letters", max_attempts=2)
    queue.backoff.kind = queue_pb2.Backoff.KIND_NONE
    await stubs.queues.CreateQueue(queue_pb2.CreateQueueRequest(queue=queue))
    headers = {"queue": "letters", "lang": "fi"}

    # When a message for it is explained, and published
    explained = await stubs.router.Explain(
        router_pb2.ExplainRequest(headers=headers, queue_ids=["letters"])
    )
    publish = ingest_pb2.PublishRequest()
    publish.runs.add(payloads=["päivää".encode()], headers=headers)
    (message_id,) = (await stubs.ingest.Publish(publish)).message_ids

    # Then it comes, comes again after a nack, and is gone after an ack
    assert [queue.matched for queue in explained.queues] == [True]
    claim = consumer_pb2.ClaimRequest(queue_id="letters", wait_ms=60_000, consumer_id="me")
    (first,) = messages_of(await stubs.consumer.Claim(claim))
    assert (first.message.message_id, first.message.payload) == (message_id, "päivää".encode())
    assert first.message.headers["lang"] == "fi"
    assert first.attempts_count == 1

    nack = consumer_pb2.NackRequest()
    nack.items.add(lease_token=first.lease_token, reason="not now")
    assert [r.code for r in (await stubs.consumer.Nack(nack)).results] == [0]
    (second,) = messages_of(await stubs.consumer.Claim(claim))
    assert (second.message.message_id, second.attempts_count) == (message_id, 2)

    tokens = [second.lease_token]
    extended = await stubs.consumer.ExtendLease(
        consumer_pb2.ExtendLeaseRequest(lease_tokens=tokens, lease_ms=60_000)
    )
    assert extended.results[0].lease_deadline_ms > second.lease_deadline_ms
    assert [
        r.code
        for r in (await stubs.consumer.Ack(consumer_pb2.AckRequest(lease_tokens=tokens))).results
    ] == [0]

    got = await stubs.queues.GetQueue(queue_pb2.GetQueueRequest(queue_id="letters"))
    assert (got.queue.counts.done_count, got.queue.counts.in_flight_count) == (1, 0)


async def test_a_stream_with_credits_sends_what_there_is_room_for(stubs: Stubs) -> None:
    # Given five messages, and a stream with room for three
    await stubs.queues.CreateQueue(
        queue_pb2.CreateQueueRequest(queue=queue_pb2.Queue(queue_id="stream"))
    )
    publish = ingest_pb2.PublishRequest()
    for n in range(5):
        publish.runs.add(payloads=[b"%d" % n], headers={"queue": "stream"})
    await stubs.ingest.Publish(publish)
    call = stubs.consumer.Consume()
    start = consumer_pb2.ConsumeStart(queue_id="stream")
    start.credit.messages_count = 3
    await call.write(consumer_pb2.ConsumeRequest(start=start))
    got: list[bytes] = []

    async def read(count: int) -> None:
        while len(got) < count:
            answer = await asyncio.wait_for(call.read(), 60)
            got.extend(claimed.message.payload for claimed in messages_of(answer))

    # When it reads, and only then grants room for two more
    await read(3)
    assert got == [b"0", b"1", b"2"]
    more = consumer_pb2.ConsumeCredit(messages_count=2)
    await call.write(consumer_pb2.ConsumeRequest(credit=more))
    await read(5)

    # Then the others come, in order
    assert got == [b"0", b"1", b"2", b"3", b"4"]
    call.cancel()
