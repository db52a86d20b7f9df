"""A real broker and real routers between ingests that keep to the contract and nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc
import grpc.aio
import pytest

from libs.serving.peers.topology import TopologyDirectory
from services.broker.shard import replay_starts
from services.router.pieces import PieceLimits
from services.router.router import Router
from slatemq.v1 import queue_pb2
from tests.integration.broker import rig as broker_rig
from tests.integration.broker.queue_calls import get
from tests.integration.broker.rig import Disk, Rig, memory_root
from tests.integration.router.peers import LogMemory, MemoryIngest, Running
from tests.integration.router.stack import running_router
from tests.integration.waiting import eventually
from tests.manual_clock import ManualClock

SMALL = PieceLimits(messages_max=5, step_max=2, hold_ms=10)
"""Pieces so small that a replay has many."""


class World:
    """The shared store, the logs in it, and whoever runs on it."""

    def __init__(self, logs: int = 1, window_s: int = 0) -> None:
        self.settings = {"replay_window_s": window_s}
        self.disk = Disk()
        self.root = memory_root(self.disk)
        self.clock = ManualClock()
        self.directory = TopologyDirectory(self.root.objects)
        self.logs = [LogMemory(shard) for shard in range(logs)]
        self.ingests = [MemoryIngest(log) for log in self.logs]
        self.servers = [Running(self.directory, ingest) for ingest in self.ingests]

    @property
    def log(self) -> LogMemory:
        return self.logs[0]

    @asynccontextmanager
    async def broker(self) -> AsyncIterator[Rig]:
        """The broker; a new one each time, on what the last one has stored."""
        async with broker_rig.running(
            self.root, self.clock, disk=self.disk, settings=self.settings
        ) as rig:
            yield rig

    def router(self, limits: PieceLimits = SMALL) -> AbstractAsyncContextManager[Router]:
        return running_router(self.root, limits)

    async def routed(self, rig: Rig) -> None:
        """Waits until every log is routed to its end."""
        ends = {log.shard: log.end for log in self.logs if log.end}
        await eventually(lambda: rig.owner.durable_cursors == ends)


@asynccontextmanager
async def world(logs: int = 1, window_s: int = 0, try_s: float = 60.0) -> AsyncIterator[World]:
    """`try_s`: how long a creation waits for an ingest."""
    there = World(logs, window_s)
    for server in there.servers:
        await server.start()
    try:
        with pytest.MonkeyPatch.context() as patient:
            patient.setattr(replay_starts, "TRY_S", try_s)
            yield there
    finally:
        for server in there.servers:
            await server.stop()


async def create(
    rig: Rig,
    queue_id: str,
    *,
    since_ms: int | None = None,
    source: str = "true",
    **settings: object,
) -> queue_pb2.Queue:
    """Creates a queue that starts at a time, or (None) from the beginning."""
    queue = queue_pb2.Queue(queue_id=queue_id, filter=source, **settings)  # type: ignore[arg-type]
    request = queue_pb2.CreateQueueRequest(queue=queue)
    if since_ms is None:
        request.start_from_beginning = True
    else:
        request.start_from_ms = since_ms
    return (await rig.queues.CreateQueue(request)).queue


async def replayed(rig: Rig, queue_id: str) -> queue_pb2.Replay:
    """Waits until a queue's replay is done."""
    async with asyncio.timeout(60):
        while True:
            queue = await get(rig, queue_id)
            if queue.replay.done or not queue.HasField("replay"):
                return queue.replay
            await asyncio.sleep(0.005)


async def drained(rig: Rig, queue_id: str) -> list[int]:
    """Everything that can be claimed now, in order; acked."""
    ids: list[int] = []
    while claimed := await rig.claim(queue_id, max_messages=1_000):
        ids += [one.message.message_id for one in claimed]
        await rig.ack(*(one.lease_token for one in claimed))
    return ids


async def patiently(call: Callable[[], Awaitable[object]]) -> None:
    """Repeats a call for as long as it is UNAVAILABLE."""
    async with asyncio.timeout(60):
        while True:
            try:
                await call()
                return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(0.01)


def spans(replay: queue_pb2.Replay) -> list[tuple[int, int, int, int]]:
    return [(r.ingest_shard, r.start_sequence, r.cursor, r.end_sequence) for r in replay.ranges]
