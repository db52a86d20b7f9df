"""The router as a process: killed, stopped, asked."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.serving.peers.channels import open_channel
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.roots import open_root
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.errors import InvalidArgument, NotFound
from slatemq.v1 import queue_pb2, router_pb2, router_pb2_grpc, topology_pb2, topology_pb2_grpc
from tests.integration.router.peers import (
    LogMemory,
    MemoryBroker,
    MemoryIngest,
    Running,
    ShardMemory,
)
from tests.integration.stack.processes import patiently
from tests.ready_process import create_subprocess

START_SECONDS = 60


class Process:
    """`python -m services.router` on a root, with the peers that it finds there."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._process: Any = None
        self.directory = TopologyDirectory(open_root(root.as_uri()).objects)
        self.log = LogMemory()
        self.shard = ShardMemory()
        self.peers = [
            Running(self.directory, MemoryIngest(self.log)),
            Running(self.directory, MemoryBroker(self.shard)),
        ]

    async def start(self) -> str:
        """Start the router and wait until it serves; returns its address."""
        ready = self._root / "ready.json"
        ready.unlink(missing_ok=True)
        arguments = ("--root", self._root.as_uri(), "--ready-file", str(ready))
        self._process = await create_subprocess(
            *(sys.executable, "-m", "services.router", *arguments), stderr=DEVNULL
        )
        async with asyncio.timeout(START_SECONDS):
            while not ready.exists():
                await asyncio.sleep(0.01)
        return str(json.loads(ready.read_text())["address"])

    async def end(self, number: signal.Signals) -> int:
        """Send a signal; returns the exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        async with asyncio.timeout(START_SECONDS):
            return int(await process.wait())

    async def routed(self) -> None:
        """Wait until everything published is assigned."""
        async with asyncio.timeout(START_SECONDS):
            while self.shard.cursors.get(0) != self.log.end:
                await asyncio.sleep(0.005)


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Process]:
    process = Process(tmp_path)
    for peer in process.peers:
        await peer.start()
    yield process
    await process.end(signal.SIGKILL)
    for peer in process.peers:
        await peer.stop()


@pytest.mark.slow  # Each start of a process takes most of a second.
async def test_a_router_killed_under_load_leaves_nothing_out_and_routes_nothing_twice(
    router: Process,
) -> None:
    await router.shard.set_queue("all", "true")
    published: list[int] = []

    for _ in range(3):
        await router.start()
        for _ in range(100):
            published += await router.log.publish([{}, {}])
            await asyncio.sleep(0)
        assert await router.end(signal.SIGKILL) == -signal.SIGKILL
    await router.start()
    await router.routed()

    assert router.shard.assigned["all"] == published


@pytest.mark.slow  # It waits for a process to start.
async def test_it_serves_every_service_and_leaves_the_topology_when_it_is_stopped(
    router: Process,
) -> None:
    address = await router.start()

    async with open_channel(address) as channel:
        for name in ("slatemq.v1.RouterService", "slatemq.v1.TopologyService", ""):
            stub: Any = health_pb2_grpc.HealthStub(channel)
            health = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert health.status == health_pb2.HealthCheckResponse.SERVING
        topology = await topology_pb2_grpc.TopologyServiceStub(channel).GetTopology(
            topology_pb2.GetTopologyRequest()
        )
        assert [router.address for router in topology.routers] == [address]

    assert await router.end(signal.SIGTERM) == 0
    assert not (await router.directory.read(0)).shards("router")


@pytest.mark.slow  # It waits for a process to start.
async def test_explain_and_status_answer_as_their_contract_says(router: Process) -> None:
    await router.shard.set_queue("gold", 'headers["tier"] == "gold"', "5")
    await router.shard.set_queue("big", "size > 100")
    await router.log.publish([{"tier": "gold"}])
    async with open_channel(await router.start()) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        request = router_pb2.ExplainRequest(headers={"tier": "gold"}, payload_bytes=7)

        response = await patiently(lambda: stub.Explain(request))
        assert [(q.queue_id, q.matched, q.priority) for q in response.queues] == [
            ("gold", True, 5),
            ("big", False, 128),
        ]
        assert 'headers["tier"] == "gold"' in response.queues[0].reason

        draft = queue_pb2.Queue(filter="size == 7", priority='int(headers["tier"])')
        draft.fallback_priority = 9
        request.draft.CopyFrom(draft)
        (judged,) = (await stub.Explain(request)).queues
        assert (judged.queue_id, judged.matched, judged.priority) == ("", True, 9)
        assert "the fallback 9 holds" in judged.reason
        request.draft.CopyFrom(queue_pb2.Queue(queue_id="gold"))
        (judged,) = (await stub.Explain(request)).queues
        assert not judged.matched

        for field, wrong in {
            "payload_bytes": router_pb2.ExplainRequest(payload_bytes=-1),
            "created_at_ms": router_pb2.ExplainRequest(created_at_ms=-1),
            "received_at_ms": router_pb2.ExplainRequest(received_at_ms=-1),
            "retention_s": router_pb2.ExplainRequest(retention_s=2**63 - 1),
            'headers[""]': router_pb2.ExplainRequest(headers={"": "x"}),
            'headers["k"]': router_pb2.ExplainRequest(headers={"k": "x" * 65_536}),
            "queue_ids": router_pb2.ExplainRequest(draft=draft, queue_ids=["gold"]),
            "draft.filter": router_pb2.ExplainRequest(draft=queue_pb2.Queue(filter="size >")),
            "draft.priority": router_pb2.ExplainRequest(draft=queue_pb2.Queue(priority='"x"')),
            "draft.fallback_priority": router_pb2.ExplainRequest(
                draft=queue_pb2.Queue(fallback_priority=256)
            ),
        }.items():
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Explain(wrong)
            error = from_rpc_error(refused.value)
            assert isinstance(error, InvalidArgument)
            assert error.field == field
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await stub.Explain(router_pb2.ExplainRequest(queue_ids=["gold", "none"]))
        assert isinstance(from_rpc_error(missing.value), NotFound)

        await router.routed()
        async with asyncio.timeout(START_SECONDS):
            while True:
                status = await stub.GetRoutingStatus(router_pb2.GetRoutingStatusRequest())
                if not status.routes[0].pending_count:
                    break
        assert list(status.routes) == [
            router_pb2.RouteProgress(cursor=1, durable_sequence=1, pending_count=0, is_current=True)
        ]
