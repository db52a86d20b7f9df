"""Whether the queues that a run names exist: a wrong name would find nothing to do, and say so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from services.janitor.asking import asking
from services.janitor.runs.history import RunRequest
from slatemq.errors import NotFound
from slatemq.v1 import queue_pb2
from slatemq.v1 import queue_pb2_grpc as queue_grpc

__all__ = ["NamedQueues"]

CALLS_AT_ONCE: Final = 32


class NamedQueues:
    """Asks the brokers for queues."""

    def __init__(self, directory: TopologyDirectory, channels: Channels) -> None:
        """Ask those of this directory."""
        self._directory = directory
        self._channels = channels

    async def check(self, ask: RunRequest) -> None:
        """Raises NotFound for a queue that no broker has, Unavailable, StoreUnavailable."""
        named = [*ask.queue_ids, *filter(None, [ask.target_queue_id])]
        left = list(dict.fromkeys(named))
        if not left:
            return
        # A broker, or a queue on it, may have come since the last look.
        for shard in (await self._directory.read(max_age_ms=0)).brokers:
            left = await self._missing(shard, left)
        if left:
            raise NotFound("queue", left[0])

    async def _missing(self, shard: int, queues: Sequence[str]) -> list[str]:
        missing: list[str] = []
        for begin in range(0, len(queues), CALLS_AT_ONCE):
            some = queues[begin : begin + CALLS_AT_ONCE]
            there = await asyncio.gather(*(self._is_there(shard, queue) for queue in some))
            missing += [queue for queue, found in zip(some, there, strict=True) if not found]
        return missing

    async def _is_there(self, shard: int, queue: str) -> bool:
        try:
            with asking("broker", shard):
                stub = queue_grpc.QueueServiceStub(await self._channels.to("broker", shard))
                await stub.GetQueue(queue_pb2.GetQueueRequest(queue_id=queue))
        except NotFound:
            return False
        return True
