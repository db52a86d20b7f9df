"""Claim, ack, nack and extend, over the wire."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from slatemq.v1 import consumer_pb2, queue_pb2
from tests.integration.broker.rig import Disk, Ingest, Rig, memory_root, running
from tests.manual_clock import ManualClock

OK, INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION = 0, 3, 5, 9


async def test_a_claim_gives_messages_in_order_and_an_ack_finishes_them() -> None:
    async with running() as rig:
        await rig.create()
        await rig.assign([1, 2, 3])

        first, second = await rig.claim(max_messages=2, consumer_id="worker")

        assert [first.message.message_id, second.message.message_id] == [1, 2]
        assert first.message.payload == b"0000000001"
        assert first.attempts_count == 1
        assert first.priority == 128
        assert first.lease_deadline_ms == rig.clock.now_ms() + 30_000
        assert await rig.ack(first.lease_token, second.lease_token) == [OK, OK]
        assert await rig.counts() == {"available": 1, "done": 2}


async def test_a_more_urgent_message_is_claimed_before_one_that_came_earlier() -> None:
    async with running() as rig:
        await rig.create()
        await rig.assign([1, 2, 3], priorities=[200, 0, 200])

        claimed = await rig.claim(max_messages=3)

        assert [(m.message.message_id, m.priority) for m in claimed] == [(2, 0), (1, 200), (3, 200)]


async def test_repeating_a_finished_ack_or_nack_is_ok_also_after_a_restart() -> None:
    disk = Disk()
    root, clock = memory_root(disk), ManualClock()
    async with running(root, clock, disk=disk) as rig:
        await rig.create()
        await rig.assign([1, 2])
        acked, nacked = (m.lease_token for m in await rig.claim(max_messages=2))
        assert await rig.ack(acked, acked) == [OK, OK]
        assert await rig.nack(nacked, nacked) == [OK, OK]
        assert await rig.nack(acked) == [FAILED_PRECONDITION]

    async with running(root, clock, disk=disk) as rig:
        assert await rig.ack(acked) == [OK]
        assert await rig.nack(nacked) == [OK]
        assert await rig.ack(nacked) == [FAILED_PRECONDITION]
        assert await rig.counts() == {"available": 1, "done": 1}


async def test_a_token_is_refused_once_its_lease_has_ended_and_the_next_holder_may_ack() -> None:
    async with running() as rig:
        await rig.create(lease_ms=5000)
        await rig.assign([1])
        (stale,) = await rig.claim()
        await rig.pass_time(5000)
        (current,) = await rig.claim()

        assert current.attempts_count == 2
        assert await rig.ack(stale.lease_token) == [FAILED_PRECONDITION]
        assert await rig.nack(stale.lease_token) == [FAILED_PRECONDITION]
        assert await rig.ack(current.lease_token) == [OK]


async def test_a_message_without_attempts_left_is_failed() -> None:
    async with running() as rig:
        await rig.create(max_attempts=2, lease_ms=1000)
        await rig.assign([1])
        for _ in range(2):
            (claimed,) = await rig.claim()
            await rig.nack(claimed.lease_token, reason="boom")

        assert await rig.claim() == []
        assert await rig.counts() == {"failed": 1}


async def test_a_nack_with_a_delay_holds_the_message_back_until_then() -> None:
    async with running() as rig:
        await rig.create()
        await rig.assign([1])
        (claimed,) = await rig.claim()
        await rig.nack(claimed.lease_token, delay_ms=5000)

        assert await rig.claim() == []
        assert await rig.counts() == {"delayed": 1}
        rig.clock.advance(4999)
        assert await rig.claim() == []
        rig.clock.advance(1)
        (again,) = await rig.claim()
        assert again.attempts_count == 2


async def test_an_extension_moves_the_end_of_the_lease() -> None:
    async with running() as rig:
        await rig.create(lease_ms=5000)
        await rig.assign([1])
        (claimed,) = await rig.claim()
        rig.clock.advance(4000)

        request = consumer_pb2.ExtendLeaseRequest(
            lease_tokens=[claimed.lease_token, "0-00000000000000ff"], lease_ms=9000
        )
        extended, unknown = (await rig.consumers.ExtendLease(request)).results

        assert extended.lease_deadline_ms == rig.clock.now_ms() + 9000
        assert unknown.status.code == NOT_FOUND
        await rig.pass_time(8999)
        assert await rig.ack(claimed.lease_token) == [OK]


async def test_a_waiting_claim_gets_what_is_assigned_in_the_same_commit() -> None:
    async with running() as rig:
        await rig.create()
        waiting = asyncio.create_task(rig.claim(max_messages=2, wait_ms=30_000))
        while not rig.delivery.has_waiters("q"):
            await asyncio.sleep(0.001)
        commits: list[int] = []
        rig.owner.commits.on_durable(commits.append)

        await rig.assign([1, 2, 3])

        assert [m.message.message_id for m in await waiting] == [1, 2]
        assert len(commits) == 1, "assignment and claim shared one durable point"
        assert await rig.counts() == {"available": 1, "in_flight": 2}


async def test_a_claim_that_waits_in_vain_answers_with_nothing() -> None:
    async with running() as rig:
        await rig.create()
        assert await rig.claim(wait_ms=30) == []


async def test_a_stopped_claim_answers_with_what_there_is() -> None:
    async with running() as rig:
        await rig.create()
        await rig.create("other")
        waiting = [
            asyncio.create_task(rig.claim(queue, wait_ms=60_000, claim_id="same"))
            for queue in ("q", "other")
        ]
        while not (rig.delivery.has_waiters("q") and rig.delivery.has_waiters("other")):
            await asyncio.sleep(0.001)

        for _ in range(2):
            await stop(rig, "q", "same")
            await stop(rig, "q", "unknown")
        assert await waiting[0] == []
        await stop(rig, "q", "same")

        # That of another queue waits on.
        await rig.assign([1], "other")
        assert [one.message.message_id for one in await waiting[1]] == [1]


async def test_a_claim_that_was_made_at_once_is_not_lost_by_its_stop() -> None:
    disk = Disk()
    async with running(memory_root(disk), disk=disk) as rig:
        await rig.create()
        await rig.assign([1])
        disk.free.clear()
        claiming = asyncio.create_task(rig.claim(wait_ms=60_000, claim_id="mine"))
        while not rig.owner.shard.queues["q"].leases.count:
            await asyncio.sleep(0.001)

        await stop(rig, "q", "mine")

        disk.free.set()
        assert [one.message.message_id for one in await claiming] == [1]


@pytest.mark.parametrize("claim_id", ["", "x" * 65])
async def test_a_stop_names_a_bad_claim_id(claim_id: str) -> None:
    async with running() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stop(rig, "q", claim_id)
        assert (refused.value.details() or "").startswith("claim_id: ")


async def stop(rig: Rig, queue_id: str, claim_id: str) -> None:
    request = consumer_pb2.StopClaimRequest(queue_id=queue_id, claim_id=claim_id)
    await rig.consumers.StopClaim(request)


async def test_a_cancelled_claim_leaves_everything_as_it_was() -> None:
    disk = Disk()
    async with running(memory_root(disk), disk=disk) as rig:
        await rig.create()
        await rig.assign([1])
        disk.free.clear()
        claim = rig.consumers.Claim(consumer_pb2.ClaimRequest(queue_id="q", wait_ms=10_000))
        while not rig.owner.shard.queues["q"].leases.count:
            await asyncio.sleep(0.001)

        claim.cancel()
        while rig.owner.shard.queues["q"].leases.count:
            await asyncio.sleep(0.001)

        disk.free.set()
        (claimed,) = await rig.claim()
        assert claimed.attempts_count == 1, "the claim that no one heard of cost no attempt"


async def test_no_answer_is_ahead_of_the_disk() -> None:
    disk = Disk()
    async with running(memory_root(disk), disk=disk) as rig:
        await rig.create()
        await rig.assign([1, 2])
        (held,) = await rig.claim()
        disk.free.clear()
        first_ack = asyncio.create_task(rig.ack(held.lease_token))
        while not rig.owner.shard.queues["q"].done.count:
            await asyncio.sleep(0.001)
        answers: list[asyncio.Task[Any]] = [
            first_ack,
            asyncio.create_task(rig.ack(held.lease_token)),
            asyncio.create_task(rig.claim()),
            asyncio.create_task(rig.claim()),
            asyncio.create_task(rig.counts()),
        ]

        done, _ = await asyncio.wait(answers, timeout=0.3)

        assert not done, "a repeat, an empty claim and a read wait for what they have seen too"
        disk.free.set()
        first, repeat, claimed, empty, counts = await asyncio.gather(*answers)
        assert (first, repeat) == ([OK], [OK])
        assert len(claimed) + len(empty) == 1
        assert counts["done"] == 1


async def test_a_claim_answered_after_half_of_its_lease_is_undone() -> None:
    disk = Disk()
    async with running(memory_root(disk), disk=disk) as rig:
        await rig.create(lease_ms=10_000)
        await rig.assign([1])
        disk.free.clear()
        claim = asyncio.create_task(rig.claim())
        while not rig.owner.shard.queues["q"].leases.count:
            await asyncio.sleep(0.001)
        rig.clock.advance(5001)
        disk.free.set()

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await claim

        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        (again,) = await rig.claim()
        assert again.attempts_count == 1


async def test_no_lease_ends_while_a_commit_is_overdue() -> None:
    disk = Disk()
    async with running(memory_root(disk), disk=disk) as rig:
        await rig.create(lease_ms=1000)
        await rig.assign([1, 2])
        first, second = await rig.claim(max_messages=2)
        disk.free.clear()
        ack = asyncio.create_task(rig.ack(first.lease_token))
        while rig.owner.commits.overdue_ms() < 1000:
            await asyncio.sleep(0.05)
        rig.clock.advance(60_000)
        await rig.owner.end_leases_once()
        late = asyncio.create_task(rig.ack(second.lease_token))
        while rig.owner.shard.queues["q"].leases.count:
            await asyncio.sleep(0.001)
        disk.free.set()
        assert await ack == [OK]
        assert await late == [OK]


async def test_an_ingest_that_is_down_costs_no_attempt() -> None:
    ingest = Ingest()
    async with running(ingest=ingest) as rig:
        await rig.create(max_attempts=1)
        await rig.assign([1])
        ingest.down = True
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rig.claim()
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        waiting = asyncio.create_task(rig.claim(wait_ms=30_000))
        await asyncio.sleep(0.05)
        assert await rig.counts() == {"available": 1}

        ingest.down = False

        (claimed,) = await waiting
        assert claimed.attempts_count == 1


async def test_a_payload_that_is_permanently_gone_makes_a_dead_letter() -> None:
    ingest = Ingest()
    ingest.gone = {2}
    async with running(ingest=ingest) as rig:
        await rig.create()
        await rig.assign([1, 2, 3])

        claimed = [*await rig.claim(max_messages=3), *await rig.claim(max_messages=3)]

        assert [m.message.message_id for m in claimed] == [1, 3]
        assert await rig.counts() == {"in_flight": 2, "failed": 1}


async def test_a_claim_is_bounded_in_bytes_but_gives_one_message_however_large() -> None:
    ingest = Ingest()
    ingest.sizes = {1: 500, 2: 60, 3: 60}
    async with running(ingest=ingest) as rig:
        await rig.create()
        await rig.assign([1, 2, 3])

        assert len(await rig.claim(max_messages=3, max_bytes=100)) == 1
        assert len(await rig.claim(max_messages=3, max_bytes=100)) == 1
        assert len(await rig.claim(max_messages=3, max_bytes=100)) == 1


async def test_in_flight_is_bounded_and_an_ack_makes_room() -> None:
    async with running() as rig:
        await rig.create(max_in_flight=1)
        await rig.assign([1, 2])
        (first,) = await rig.claim(max_messages=2)
        waiting = asyncio.create_task(rig.claim(wait_ms=30_000))
        await asyncio.sleep(0.02)
        assert not waiting.done()

        await rig.ack(first.lease_token)

        assert [m.message.message_id for m in await waiting] == [2]


async def test_a_restart_gives_living_leases_their_grace_and_ends_the_others() -> None:
    disk = Disk()
    root, clock = memory_root(disk), ManualClock()
    async with running(root, clock, disk=disk) as rig:
        await rig.create()
        await rig.assign([1, 2, 3])
        (short,) = await rig.claim(lease_ms=2000)
        clock.advance(1000)
        (alive,) = await rig.claim(lease_ms=10_000)
        clock.advance(1000)
        await rig.assign([4])  # the last commit: the short lease has run out, unnoticed

    clock.advance(600_000)
    async with running(root, clock, disk=disk) as rig:
        await rig.pass_time(9999)
        assert await rig.ack(short.lease_token) == [FAILED_PRECONDITION]
        assert await rig.ack(alive.lease_token) == [OK]


async def test_a_deleted_queue_ends_its_leases_and_its_waiting_claims() -> None:
    async with running() as rig:
        await rig.create()
        await rig.assign([1])
        (claimed,) = await rig.claim()
        waiting = asyncio.create_task(rig.claim(wait_ms=30_000))
        await asyncio.sleep(0.02)

        await rig.queues.DeleteQueue(queue_pb2.DeleteQueueRequest(queue_id="q"))

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await waiting
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND
        assert await rig.ack(claimed.lease_token) == [NOT_FOUND]


@pytest.mark.parametrize(
    ("token", "code"),
    [
        ("", INVALID_ARGUMENT),
        ("zz", INVALID_ARGUMENT),
        ("0-0123", INVALID_ARGUMENT),
        ("0-0123456789ABCDEF", INVALID_ARGUMENT),
        ("0-0123456789abcdef", NOT_FOUND),
        ("1-0123456789abcdef", NOT_FOUND),
    ],
)
async def test_a_forged_token_is_refused_by_itself(token: str, code: int) -> None:
    async with running() as rig:
        await rig.create()
        await rig.assign([1])
        (claimed,) = await rig.claim()

        assert await rig.ack(token, claimed.lease_token) == [code, OK]
        assert await rig.nack(token, claimed.lease_token) == [code, FAILED_PRECONDITION]


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("max_messages", {"max_messages": -1}),
        ("max_messages", {"max_messages": 10_001}),
        ("max_bytes", {"max_bytes": -1}),
        ("lease_ms", {"lease_ms": -1}),
        ("lease_ms", {"lease_ms": 999}),
        ("wait_ms", {"wait_ms": -1}),
        ("wait_ms", {"wait_ms": 60_001}),
        ("consumer_id", {"consumer_id": "ä" * 128}),
        ("claim_id", {"claim_id": "x" * 65}),
    ],
)
async def test_a_bad_claim_names_its_field(field: str, options: dict[str, Any]) -> None:
    async with running() as rig:
        await rig.create()
        await rig.assign([1])

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.claim(**options)

        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (refused.value.details() or "").startswith(f"{field}: ")
        assert await rig.counts() == {"available": 1}


async def test_a_released_message_goes_back_without_its_attempt_being_counted() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await rig.assign([1])
        for _ in range(3):
            (claimed,) = await rig.claim()
            assert claimed.attempts_count == 1
            item = consumer_pb2.NackItem(lease_token=claimed.lease_token, release=True)
            request = consumer_pb2.NackRequest(items=[item, item])
            answer = await rig.consumers.Nack(request)
            assert [status.code for status in answer.results] == [OK, OK]
        assert await rig.counts() == {"available": 1}


async def test_small_claims_from_a_long_backlog_are_fetched_together() -> None:
    ingest = Ingest()
    async with running(ingest=ingest) as rig:
        await rig.create()
        await rig.assign(list(range(1, 2501)))
        claimed = []
        for _ in range(25):
            messages = await rig.claim(max_messages=100)
            claimed += [one.message.message_id for one in messages]
            await rig.ack(*(one.lease_token for one in messages))

        assert claimed == list(range(1, 2501))
        # The first tells of their size; then a thousand at a time.
        assert [len(ids) for ids in ingest.reads] == [100, 1000, 1000, 400]
