"""Queues paused and resumed, purged, and created with one another, over the wire."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from slatemq.v1 import consumer_pb2, queue_pb2
from tests.integration.broker.queue_calls import get
from tests.integration.broker.rig import Disk, Rig, memory_root, refusal, running
from tests.manual_clock import ManualClock

PAUSED = (grpc.StatusCode.FAILED_PRECONDITION, "QUEUE_PAUSED")
INVALID = grpc.StatusCode.INVALID_ARGUMENT
AVAILABLE = queue_pb2.ENTRY_STATE_AVAILABLE
DELAYED = queue_pb2.ENTRY_STATE_DELAYED
IN_FLIGHT = queue_pb2.ENTRY_STATE_IN_FLIGHT
DONE = queue_pb2.ENTRY_STATE_DONE
FAILED = queue_pb2.ENTRY_STATE_FAILED


async def pause(rig: Rig, queue_id: str = "q") -> queue_pb2.Queue:
    return (await rig.queues.PauseQueue(queue_pb2.PauseQueueRequest(queue_id=queue_id))).queue


async def resume(rig: Rig, queue_id: str = "q") -> queue_pb2.Queue:
    return (await rig.queues.ResumeQueue(queue_pb2.ResumeQueueRequest(queue_id=queue_id))).queue


async def purge(rig: Rig, *states: queue_pb2.EntryState.ValueType, queue_id: str = "q") -> int:
    request = queue_pb2.PurgeQueueRequest(queue_id=queue_id, states=states)
    return (await rig.queues.PurgeQueue(request)).purged_count


async def open_stream(rig: Rig, credit: int) -> grpc.aio.StreamStreamCall:  # type: ignore[type-arg]
    call = rig.consumers.Consume()
    start = consumer_pb2.ConsumeStart(queue_id="q")
    if credit:
        start.credit.messages_count = credit
    await call.write(consumer_pb2.ConsumeRequest(start=start))
    return call


async def ended(stream: grpc.aio.StreamStreamCall) -> None:  # type: ignore[type-arg]
    async with asyncio.timeout(60):
        while await stream.read() is not grpc.aio.EOF:
            pass


async def test_a_pause_sends_away_who_waits_and_keeps_the_messages() -> None:
    async with running() as rig:
        before = await rig.create()
        waiting = asyncio.create_task(rig.claim(wait_ms=60_000))
        streams = [await open_stream(rig, credit) for credit in (0, 5)]
        for stream in streams:
            await stream.read()
        while rig.delivery.places.count < 3:
            await asyncio.sleep(0.005)

        paused = await pause(rig)

        assert paused.paused
        assert paused.revision > before.revision
        assert (await refusal(waiting))[:2] == PAUSED
        for stream in streams:
            assert (await refusal(stream.read()))[:2] == PAUSED
        await rig.assign([1, 2])
        assert (await refusal(rig.claim()))[:2] == PAUSED
        for credit in (0, 5):
            assert (await refusal(ended(await open_stream(rig, credit))))[:2] == PAUSED
        assert (await rig.counts())["available"] == 2

        assert not (await resume(rig)).paused
        assert len(await rig.claim(max_messages=5)) == 2


async def test_leases_of_a_paused_queue_can_be_finished() -> None:
    async with running() as rig:
        await rig.create()
        await rig.assign([1, 2, 3])
        one, two, three = await rig.claim(max_messages=3)
        await pause(rig)
        assert await rig.ack(one.lease_token) == [0]
        assert await rig.nack(two.lease_token) == [0]
        extended = await rig.consumers.ExtendLease(
            consumer_pb2.ExtendLeaseRequest(lease_tokens=[three.lease_token])
        )
        assert extended.results[0].status.code == 0
        assert await rig.counts() == {"available": 1, "in_flight": 1, "done": 1}


async def test_a_pause_survives_a_restart_and_pausing_again_changes_nothing() -> None:
    disk = Disk()
    root, clock = memory_root(disk), ManualClock()
    async with running(root, clock, disk=disk) as rig:
        await rig.create()
        first = await pause(rig)
        assert await pause(rig) == first
    async with running(root, clock, disk=disk) as rig:
        assert (await get(rig)).paused
        assert (await refusal(rig.claim()))[:2] == PAUSED
        resumed = await resume(rig)
        assert await resume(rig) == resumed


async def one_in_each_state(rig: Rig) -> str:
    """Gives the token of the one in flight; there are two done, and three available."""
    await rig.create(max_attempts=1)
    await rig.assign([1, 2, 3, 4])
    done, also_done, failed, held = await rig.claim(max_messages=4)
    assert await rig.ack(done.lease_token, also_done.lease_token) == [0, 0]
    assert await rig.nack(failed.lease_token) == [0]
    await rig.assign([5, 6, 7])
    later = rig.clock.now_ms() + 60_000
    await rig.assign([8], visible_at_ms=[later])
    return held.lease_token


async def test_a_purge_empties_the_states_it_names_also_after_a_restart() -> None:
    disk = Disk()
    root, clock = memory_root(disk), ManualClock()
    async with running(root, clock, disk=disk) as rig:
        token = await one_in_each_state(rig)
        assert await purge(rig) == 4, "available and delayed, when nothing is named"
        assert await rig.counts() == {"in_flight": 1, "done": 2, "failed": 1}
        assert await purge(rig, DONE) == 2
        assert await purge(rig, IN_FLIGHT, FAILED) == 2
        assert await rig.counts() == {}
        assert await rig.ack(token) == [grpc.StatusCode.FAILED_PRECONDITION.value[0]]
        assert await purge(rig, AVAILABLE, DELAYED, IN_FLIGHT, DONE, FAILED) == 0
        await rig.assign([9])
    async with running(root, clock, disk=disk) as rig:
        assert await rig.counts() == {"available": 1}
        assert [m.message.message_id for m in await rig.claim(max_messages=9)] == [9]


@pytest.mark.parametrize("state", [AVAILABLE, DELAYED])
async def test_available_and_delayed_go_together(state: queue_pb2.EntryState.ValueType) -> None:
    async with running() as rig:
        await one_in_each_state(rig)
        assert await purge(rig, state) == 4


async def test_bad_input_changes_nothing() -> None:
    async with running() as rig:
        await one_in_each_state(rig)
        before = await get(rig)
        for field, call in [
            ("queue_id", pause(rig, "")),
            ("queue_id", pause(rig, "a b")),
            ("queue_id", resume(rig, "a b")),
            ("queue_id", purge(rig, queue_id="a b")),
            ("states[0]", purge(rig, queue_pb2.ENTRY_STATE_UNSPECIFIED)),
            ("states[1]", purge(rig, DONE, 99)),  # type: ignore[arg-type]
        ]:
            assert (await refusal(call))[::2] == (INVALID, field)
        for missing in (pause(rig, "no"), resume(rig, "no"), purge(rig, queue_id="no")):
            code, reason, _ = await refusal(missing)
            assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "QUEUE_NOT_FOUND")
        assert await get(rig) == before


async def create_with(rig: Rig, queue_id: str, beside: str) -> queue_pb2.Queue:
    request = queue_pb2.CreateQueueRequest(
        queue=queue_pb2.Queue(queue_id=queue_id), with_queue_id=beside
    )
    return (await rig.queues.CreateQueue(request)).queue


async def test_a_queue_is_created_with_one_of_the_shard_or_not_at_all() -> None:
    async with running(shard=3) as rig:
        await rig.create()
        assert (await create_with(rig, "a", "q")).broker_shard == 3
        code, reason, _ = await refusal(create_with(rig, "b", "elsewhere"))
        assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "QUEUE_NOT_FOUND")
        assert (await refusal(create_with(rig, "b", "b")))[0] == grpc.StatusCode.NOT_FOUND
        assert (await refusal(create_with(rig, "b", "a b")))[::2] == (INVALID, "with_queue_id")
        assert set(rig.owner.shard.queues) == {"q", "a"}


async def test_counts_show_priorities_and_how_long_the_oldest_has_been_claimable() -> None:
    async with running() as rig:
        await rig.create()
        assert not (await get(rig)).counts.HasField("oldest_claimable_age_ms")
        later = rig.clock.now_ms() + 60_000
        await rig.assign([1, 2, 3], priorities=[7, 7, 9], visible_at_ms=[0, later, later])
        rig.clock.advance(500)
        counts = (await get(rig)).counts
        assert [(c.priority, c.available_count, c.delayed_count) for c in counts.by_priority] == [
            (7, 1, 1),
            (9, 0, 1),
        ]
        assert counts.oldest_claimable_age_ms == 500
