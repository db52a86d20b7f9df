"""Claims that are answered in runs, and acks of tokens in a row."""

from __future__ import annotations

import asyncio

from slatemq.v1 import consumer_pb2
from tests.claimed_runs import each_of, messages_of
from tests.integration.broker.rig import Rig, running

OK, NOT_FOUND, FAILED_PRECONDITION = 0, 5, 9
IDS = list(range(1, 501))


async def claim(rig: Rig, count: int) -> consumer_pb2.ClaimResponse:
    request = consumer_pb2.ClaimRequest(queue_id="q", max_messages=count)
    return await rig.consumers.Claim(request)


async def ack(rig: Rig, runs: list[tuple[str, int]], *lone: str) -> list[int]:
    wire = [consumer_pb2.LeaseRun(lease_token=token, count=count) for token, count in runs]
    request = consumer_pb2.AckRequest(lease_tokens=lone, runs=wire)
    return [result.code for result in (await rig.consumers.Ack(request)).results]


async def test_each_message_of_a_run_can_be_finished_by_its_own_token() -> None:
    async with running() as rig:
        await rig.create()
        # Given messages of two priorities, some of which were claimed before
        await rig.assign(IDS, priorities=[5 if one <= 100 else 9 for one in IDS])
        before = messages_of(await claim(rig, 150))
        assert await rig.nack(*(one.lease_token for one in before)) == [OK] * 150

        answer = await claim(rig, 500)

        assert len(answer.runs) < 8
        messages = messages_of(answer)
        assert sorted(one.message.message_id for one in messages) == IDS
        assert len({one.lease_token for one in messages}) == 500
        for one in messages:
            number = one.message.message_id
            assert one.message.payload == b"%010d" % number
            assert one.attempts_count == (2 if number <= 150 else 1)
            assert one.priority == (5 if number <= 100 else 9)
            assert one.lease_deadline_ms == rig.clock.now_ms() + 30_000
            assert one.lease_ms == 30_000
        # Then each token proves the claim of its message
        for one in (messages[0], messages[77], messages[-1]):
            await rig.nack(one.lease_token)
            (again,) = messages_of(await claim(rig, 1))
            assert again.message.message_id == one.message.message_id
            assert again.attempts_count == one.attempts_count + 1
            assert await rig.ack(again.lease_token) == [OK]


async def test_tokens_in_a_row_are_acked_as_such() -> None:
    async with running() as rig:
        await rig.create()
        await rig.assign(IDS)
        answer = await claim(rig, 500)
        first, *others = answer.runs
        lone = [one.lease_token for run in others for one in each_of(run)]
        assert await rig.nack(each_of(first)[3].lease_token) == [OK]

        count = len(first.message_ids)
        results = await ack(rig, [(first.lease_token, count)], lone[-1], "0-00000000000000ff")

        assert results == [OK, NOT_FOUND, *[OK] * 3, FAILED_PRECONDITION, *[OK] * (count - 4)]
        assert await rig.counts() == {"available": 1, "in_flight": 500 - count - 1, "done": count}
        rest = [(run.lease_token, len(run.message_ids)) for run in others]
        assert await ack(rig, rest) == [OK] * (500 - count)
        assert await ack(rig, rest) == [OK] * (500 - count), "again"
        assert await rig.counts() == {"available": 1, "done": 499}


async def test_few_messages_and_those_that_differ_come_in_runs_of_one() -> None:
    async with running() as rig:
        await rig.create()
        await rig.assign(IDS, priorities=[one % 100 for one in IDS])
        assert len((await claim(rig, 3)).runs) == 3
        assert len((await claim(rig, 200)).runs) == 200


async def test_a_stream_delivers_runs() -> None:
    async with running() as rig:
        await rig.create()
        await rig.assign(IDS)
        call = rig.consumers.Consume()
        credit = consumer_pb2.ConsumeCredit(messages_count=100)
        start = consumer_pb2.ConsumeStart(queue_id="q", credit=credit)
        await call.write(consumer_pb2.ConsumeRequest(start=start))
        await call.read()
        tokens: list[str] = []
        async with asyncio.timeout(60):
            while len(tokens) < 100:
                answer = await call.read()
                assert isinstance(answer, consumer_pb2.ConsumeResponse)
                assert len(answer.runs) < len(messages_of(answer))
                assert answer.consumer_id
                tokens += [one.lease_token for one in messages_of(answer)]
        assert await rig.ack(*tokens) == [OK] * 100
        call.cancel()
        assert await rig.counts() == {"available": 400, "done": 100}
