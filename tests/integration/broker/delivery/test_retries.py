"""Retries over the wire: backoff, delays, release, total leases, through restarts."""

from __future__ import annotations

from typing import Any

import grpc

from slatemq.v1 import consumer_pb2, queue_pb2
from tests.claimed_runs import ClaimedMessage
from tests.integration.broker.queue_calls import update
from tests.integration.broker.rig import NO_BACKOFF, Disk, Rig, memory_root, refusal, running
from tests.manual_clock import ManualClock

Backoff = queue_pb2.Backoff
EXPONENTIAL = Backoff(kind=Backoff.KIND_EXPONENTIAL, initial_ms=1000, max_ms=3000)


async def claim_one(rig: Rig) -> ClaimedMessage:
    (message,) = await rig.claim()
    return message


async def is_down_for(rig: Rig, wait_ms: int) -> None:
    await rig.pass_time(wait_ms - 1)
    assert await rig.claim() == []
    await rig.pass_time(1)


async def test_attempts_wait_longer_each_time_also_over_restarts() -> None:
    disk = Disk()
    root, clock = memory_root(disk), ManualClock()
    async with running(root, clock, disk=disk) as rig:
        await rig.create(backoff=EXPONENTIAL, max_attempts=5)
        await rig.assign([1])
    for attempt, wait_ms in enumerate((1000, 2000, 3000, 3000), start=1):
        async with running(root, clock, disk=disk) as rig:
            message = await claim_one(rig)
            assert message.attempts_count == attempt
            if attempt % 2:
                assert await rig.nack(message.lease_token) == [0]
            else:
                await rig.pass_time(message.lease_ms)
        async with running(root, clock, disk=disk) as rig:
            await is_down_for(rig, wait_ms)
    async with running(root, clock, disk=disk) as rig:
        message = await claim_one(rig)
        assert await rig.nack(message.lease_token) == [0]
        assert await rig.counts() == {"failed": 1}


async def test_absent_is_the_backoff_and_zero_is_at_once() -> None:
    async with running() as rig:
        await rig.create(backoff=EXPONENTIAL)
        await rig.assign([1])
        assert await rig.nack((await claim_one(rig)).lease_token, delay_ms=0) == [0]
        assert await rig.nack((await claim_one(rig)).lease_token, delay_ms=10) == [0]
        await is_down_for(rig, 10)
        assert await rig.nack((await claim_one(rig)).lease_token) == [0]
        await is_down_for(rig, 3000)
        release = consumer_pb2.NackItem(
            lease_token=(await claim_one(rig)).lease_token, release=True
        )
        await rig.consumers.Nack(consumer_pb2.NackRequest(items=[release]))
        assert (await claim_one(rig)).attempts_count == 4


async def test_a_new_backoff_holds_from_the_next_failed_attempt_on() -> None:
    async with running() as rig:
        await rig.create(backoff=EXPONENTIAL)
        await rig.assign([1])
        message = await claim_one(rig)
        fixed = Backoff(kind=Backoff.KIND_FIXED, initial_ms=7000)
        await update(rig, ["backoff"], backoff=fixed)
        assert await rig.nack(message.lease_token) == [0]
        await update(rig, ["backoff"], backoff=NO_BACKOFF)
        await is_down_for(rig, 7000)
        assert await rig.nack((await claim_one(rig)).lease_token) == [0]
        assert len(await rig.claim()) == 1


async def test_a_minute_in_which_all_attempts_fail_makes_no_dead_letter_by_default() -> None:
    async with running() as rig:
        # Given a backlog in a queue whose owner chose nothing
        await rig.create(backoff=None)
        await rig.assign(range(1, 101))

        # When consumers fail at whatever they get, as fast as they get it, for a minute
        nacks_count = 0
        for _ in range(120):
            messages = await rig.claim(max_messages=100)
            for message in messages:
                assert await rig.nack(message.lease_token) == [0]
            nacks_count += len(messages)
            await rig.pass_time(500)

        # Then each message was tried a few times, and all of them still wait
        assert nacks_count >= 300
        assert await rig.counts() == {"delayed": 100}
        attempts = []
        for _ in range(4):
            await rig.pass_time(60_000)
            attempts += [message.attempts_count for message in await rig.claim(max_messages=100)]
        assert len(attempts) == 100
        assert max(attempts) <= 5


async def test_the_default_comes_back_when_a_backoff_is_reset() -> None:
    async with running() as rig:
        await rig.create()
        changed = await update(rig, ["backoff"])
        assert changed.backoff.kind == Backoff.KIND_EXPONENTIAL
        assert changed.backoff.jitter == 0.5


async def test_an_extension_answers_the_end_that_holds() -> None:
    async with running() as rig:
        await rig.create(max_total_lease_ms=60_000)
        await rig.assign([1])
        message = await claim_one(rig)
        claimed_at_ms = rig.clock.now_ms()
        ends = []
        for _ in range(5):
            await rig.pass_time(11_000)
            answer = await rig.consumers.ExtendLease(
                consumer_pb2.ExtendLeaseRequest(lease_tokens=[message.lease_token])
            )
            (result,) = answer.results
            assert result.status.code == 0
            ends.append(result.lease_deadline_ms - claimed_at_ms)
        assert ends == [41_000, 52_000, 60_000, 60_000, 60_000]
        await rig.pass_time(5000)
        assert await rig.ack(message.lease_token) == [grpc.StatusCode.FAILED_PRECONDITION.value[0]]


BAD_NACKS: list[tuple[str, dict[str, Any]]] = [
    ("items[0].delay_ms", {"delay_ms": -1}),
    ("items[0].delay_ms", {"delay_ms": 43_200_001}),
    ("items[0].delay_ms", {"delay_ms": -1, "release": True}),
    ("items[0].reason", {"reason": "x" * 1025}),
]


async def test_a_bad_nack_is_named_and_changes_nothing() -> None:
    async with running() as rig:
        await rig.create(backoff=EXPONENTIAL)
        await rig.assign([1])
        token = (await claim_one(rig)).lease_token
        for field, item in BAD_NACKS:
            request = consumer_pb2.NackRequest(
                items=[consumer_pb2.NackItem(lease_token=token, **item)]
            )
            result = await refusal(rig.consumers.Nack(request))
            assert result[::2] == (grpc.StatusCode.INVALID_ARGUMENT, field)
        assert await rig.counts() == {"in_flight": 1}
