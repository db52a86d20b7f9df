"""Brokers that must stop: another one has the shard, or a commit failed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.serving.peers.channels import open_channel
from slatemq.v1 import queue_pb2, queue_pb2_grpc
from tests.integration.broker.rig import Disk, Rig, memory_root, refusal, running


class Process:
    """`python -m services.broker` on a folder."""

    process: asyncio.subprocess.Process
    queues: Any
    health: Any

    async def start(self, folder: Path, name: str) -> None:
        ready = folder / f"{name}.ready"
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.broker", "--root", (folder / "data").as_uri()),
            *("--port", "0", "--ready-file", str(ready)),
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(60):
            while not ready.exists():
                assert self.process.returncode is None
                await asyncio.sleep(0.02)
        self.channel = open_channel(json.loads(ready.read_text())["peer_address"])
        self.queues = queue_pb2_grpc.QueueServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    async def create(self, queue_id: str) -> None:
        queue = queue_pb2.Queue(queue_id=queue_id)
        await self.queues.CreateQueue(queue_pb2.CreateQueueRequest(queue=queue))

    async def ids(self) -> list[str]:
        answer = await self.queues.ListQueues(queue_pb2.ListQueuesRequest(page_size=1000))
        return [queue.queue_id for queue in answer.queues]


@asynccontextmanager
async def brokers() -> AsyncIterator[tuple[Process, Process]]:
    both = Process(), Process()
    try:
        yield both
    finally:
        for one in both:
            if hasattr(one, "channel"):
                await one.channel.close()
            if one.process.returncode is None:
                one.process.terminate()
            await one.process.communicate()


@pytest.mark.slow  # three interpreters start, and a fenced writer looks once a second
async def test_a_second_broker_on_the_shard_makes_the_first_one_stop(tmp_path: Path) -> None:
    async with brokers() as (first, second):
        await first.start(tmp_path, "first")
        answered: list[str] = []

        async def create_queues() -> None:
            for number in range(100_000):
                await first.create(f"q{number:06}")
                answered.append(f"q{number:06}")

        creating = asyncio.create_task(create_queues())
        while len(answered) < 20:
            await asyncio.sleep(0.005)

        await second.start(tmp_path, "second")
        async with asyncio.timeout(60):
            _, stderr = await first.process.communicate()
            with pytest.raises(grpc.aio.AioRpcError):
                await creating

        assert first.process.returncode == 77
        assert b"another" in stderr
        assert b"fenced" in stderr
        there = await second.ids()
        assert answered[:1000] == there[: len(answered)], "no answered queue is lost"
        assert len(there) - len(answered) <= 1


@pytest.mark.slow
async def test_an_idle_broker_notices_by_itself_that_it_is_fenced(tmp_path: Path) -> None:
    async with brokers() as (first, second):
        await first.start(tmp_path, "first")
        watch = first.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await second.start(tmp_path, "second")
        async with asyncio.timeout(60):
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await first.process.wait() == 77


async def test_a_failed_commit_ends_the_process_and_answers_no_caller() -> None:
    disk = Disk()
    root = memory_root(disk)
    async with running(root, disk=disk) as rig:
        await rig.create()
        await rig.assign([1, 2])
        (held,) = await rig.claim()
        disk.free.clear()
        calls: list[asyncio.Task[Any]] = [
            asyncio.create_task(refusal(rig.ack(held.lease_token))),
            asyncio.create_task(refusal(rig.claim())),
            asyncio.create_task(refusal(rig.claim(wait_ms=30_000))),
        ]
        while rig.owner.shard.queues["q"].done.count + waiting(rig) < 2:
            await asyncio.sleep(0.001)
        disk.broken = True
        disk.free.set()

        for code, _, _ in await asyncio.gather(*calls):
            assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        released = rig.owner.shard.queues["q"].leases.count
    assert rig.exit is not None
    assert rig.exit.code == 1
    assert released == 1, "a claim whose commit failed is not given to another"


def waiting(rig: Rig) -> int:
    return len(rig.delivery._waiter_lines)
