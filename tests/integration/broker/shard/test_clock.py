"""A wall clock that went back, and bytes that no call can take."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from libs.serving.process.exits import ExitCause
from tests.integration.broker.rig import Disk, Ingest, Rig, memory_root, refusal, running
from tests.manual_clock import ManualClock


def refused_reason(rig: Rig) -> str:
    """Why calls are not let in now; empty when they are."""
    closed = rig.running.gate._closed
    return closed[0] if closed else ""


async def test_a_wall_clock_behind_the_last_commit_is_waited_for() -> None:
    disk = Disk()
    root, clock = memory_root(disk), ManualClock()
    async with running(root, clock, disk=disk) as rig:
        await rig.create()
    wall = [time.time() - 3600.0]
    late = Rig(root, clock, Ingest(), disk, wall=lambda: wall[0])
    ended: asyncio.Task[ExitCause] = asyncio.create_task(late.running.run(late.signals))
    await asyncio.sleep(0.1)
    assert refused_reason(late) == "STARTING"
    assert not ended.done()

    wall[0] += 7200

    async with asyncio.timeout(60):
        while refused_reason(late):
            await asyncio.sleep(0.01)
    late.signals.first.set()
    assert (await ended).code == 0


@pytest.mark.parametrize(
    "method",
    [
        "ConsumerService/Claim",
        "ConsumerService/Ack",
        "QueueService/CreateQueue",
    ],
)
async def test_bytes_that_do_not_decode_are_refused(method: str) -> None:
    async with running() as rig:
        call: Any = rig.channel.unary_unary(f"/slatemq.v1.{method}")
        invalid = (grpc.StatusCode.INVALID_ARGUMENT, "UNDECODABLE")
        assert (await refusal(call(b"\xff\xff\xff")))[:2] == invalid


async def test_bytes_that_do_not_decode_are_refused_on_streams() -> None:
    async with running() as rig:
        invalid = (grpc.StatusCode.INVALID_ARGUMENT, "UNDECODABLE")
        watch: Any = rig.channel.unary_stream("/slatemq.v1.QueueService/WatchQueues")
        assert (await refusal(watch(b"\xff\xff").read()))[:2] == invalid
        consume: Any = rig.channel.stream_stream("/slatemq.v1.ConsumerService/Consume")
        call = consume()
        await call.write(b"\xff\xff")
        assert (await refusal(call.read()))[:2] == invalid


async def test_a_call_above_the_size_limit_is_refused() -> None:
    async with running() as rig:
        call: Any = rig.channel.unary_unary("/slatemq.v1.ConsumerService/Ack")
        code, _, _ = await refusal(call(bytes(120 << 20)))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        await rig.create()


async def test_draining_many_messages_leaves_nothing_in_memory() -> None:
    async with running() as rig:
        await rig.create()
        done = 0
        for begin in range(1, 60_001, 5000):
            await rig.assign(list(range(begin, begin + 5000)))
            claimed = await rig.claim(max_messages=5000)
            await rig.ack(*(m.lease_token for m in claimed))
            done += len(claimed)
        assert done == 60_000
        delivery, shard = rig.delivery, rig.owner.shard
        assert delivery is not None
        await rig.owner.durable()
        assert (delivery.places.count, delivery._waiter_lines, delivery.streams) == (0, {}, {})
        assert (len(shard.leases._running), rig.owner._pending) == (0, {})
        kept = delivery._payloads
        assert kept._young_bytes <= kept._half_bytes <= 16 << 20
