"""IngestShardService: what operators see of an ingest shard, and do with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from libs.serving.peers.topology import TopologyDirectory
from libs.storage.objects.small_objects import Objects
from services.ingest.write.draining import Drain
from slatemq.errors import FailedPrecondition
from slatemq.v1 import shard_pb2, shard_pb2_grpc


@dataclass(eq=False)
class IngestShardServicer(shard_pb2_grpc.IngestShardServiceServicer):
    """`_announce` puts into the topology whether the shard drains, which may have changed."""

    _shard: int
    _drain: Drain
    _directory: TopologyDirectory
    _objects: Objects
    _announce: Callable[[], Awaitable[None]]
    _has_tasks: bool

    async def GetIngestShard(  # noqa: N802 - the RPC's name
        self, request: shard_pb2.GetIngestShardRequest, context: Any
    ) -> shard_pb2.GetIngestShardResponse:
        return shard_pb2.GetIngestShardResponse(shard=await self._describe())

    async def DrainIngestShard(  # noqa: N802 - the RPC's name
        self, request: shard_pb2.DrainIngestShardRequest, context: Any
    ) -> shard_pb2.DrainIngestShardResponse:
        if request.cancel:
            await self._drain.cancel()
        else:
            await self._check_may_drain()
            await self._drain.begin()
        # Also where nothing has changed: an earlier call may have failed here.
        await self._announce()
        return shard_pb2.DrainIngestShardResponse(shard=await self._describe())

    async def _check_may_drain(self) -> None:
        if self._has_tasks:
            raise FailedPrecondition(
                "PUBLISHES_ARE_TASKS",
                f"ingest shard {self._shard} has its publishes as tasks of a queue backend: wait "
                "until no task is pending, start the ingest without the queue settings, and drain "
                "it then (docs/how-to/async.md, Switch it off)",
                subject=f"ingest/{self._shard}",
            )
        topology = await self._directory.read(max_age_ms=0)
        if not set(topology.open_ingests) - {self._shard}:
            raise FailedPrecondition(
                "LAST_INGEST",
                f"no ingest but shard {self._shard} takes publishes: start another one first "
                "(`slatemq shard add` says how), or end the drain of one",
                subject=f"ingest/{self._shard}",
            )

    async def _describe(self) -> shard_pb2.IngestShard:
        state, remaining = shard_pb2.IngestShard.STATE_SERVING, list[str]()
        if self._drain.is_draining:
            remaining += await self._drain.remaining()
            state = (
                shard_pb2.IngestShard.STATE_DRAINING
                if remaining
                else shard_pb2.IngestShard.STATE_DRAINED
            )
        files = await self._objects.describe(f"ingest/{self._shard}")
        return shard_pb2.IngestShard(
            ingest_shard=self._shard,
            state=state,
            database_bytes=sum(one.size_bytes for one in files),
            remaining=remaining,
        )
