"""A user with generated stubs and nothing else of ours: calls, and calls that outlive a restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio

from slatemq.v1 import (
    consumer_pb2_grpc,
    ingest_pb2_grpc,
    queue_pb2,
    queue_pb2_grpc,
    router_pb2_grpc,
    topology_pb2,
    topology_pb2_grpc,
)

T = TypeVar("T")

PATIENCE_SECONDS = 600.0
"""Longer than anything is down in these tests, the long forms included: a call that waits for half
a second may meet one kill after another on a busy machine, where each start takes many seconds."""

RETRY_SECONDS = 0.05
_REPEATABLE = (
    grpc.StatusCode.CANCELLED,  # by a server that ends
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 200),
)


class Stubs:
    """The services of an instance, found with GetTopology through one address."""

    def __init__(self, credentials: grpc.ChannelCredentials | None = None) -> None:
        """`credentials` are for an instance with TLS."""
        self._credentials = credentials
        self._channels: list[grpc.aio.Channel] = []
        self.ingest: Any = None
        self.queues: Any = None
        self.consumer: Any = None
        self.router: Any = None

    async def connect(self, address: str) -> Stubs:
        """Ask `address` where everybody is."""
        topology: Any = topology_pb2_grpc.TopologyServiceStub(self._open(address))
        async with asyncio.timeout(60):
            # It may have looked before the last of them had started.
            while True:
                found = await topology.GetTopology(topology_pb2.GetTopologyRequest(), timeout=60)
                if found.ingests and found.brokers and found.routers:
                    break
                await asyncio.sleep(0.05)
        broker = self._open(found.brokers[0].address)
        self.ingest = ingest_pb2_grpc.IngestServiceStub(self._open(found.ingests[0].address))
        self.queues = queue_pb2_grpc.QueueServiceStub(broker)
        self.consumer = consumer_pb2_grpc.ConsumerServiceStub(broker)
        self.router = router_pb2_grpc.RouterServiceStub(self._open(found.routers[0].address))
        return self

    async def list_queues(self) -> list[Any]:
        """All queues, with counts."""
        request = queue_pb2.ListQueuesRequest(page_size=1_000)
        answer = await persist(lambda: self.queues.ListQueues(request, timeout=60))
        return list(answer.queues)

    async def __aenter__(self) -> Stubs:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        else:
            channel = grpc.aio.secure_channel(address, self._credentials, options=_OPTIONS)
        self._channels.append(channel)
        return self._channels[-1]


async def persist(call: Callable[[], Coroutine[Any, Any, T]], retry_s: float = RETRY_SECONDS) -> T:
    """Repeat a call for as long as its outcome is unknown or it was not let in."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            if error.code() not in _REPEATABLE or time.monotonic() > end:
                raise
        await asyncio.sleep(retry_s)
