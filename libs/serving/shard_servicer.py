"""ShardService, which every process that owns a shard serves in the same way."""

from __future__ import annotations

from typing import Any

from libs.serving.process.removal import ShardDrain
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.objects.small_objects import Objects
from slatemq.errors import InvalidArgument
from slatemq.v1 import shard_pb2, shard_pb2_grpc


class ShardServicer(shard_pb2_grpc.ShardServiceServicer):
    def __init__(self, drain: ShardDrain, objects: Objects) -> None:
        self._drain = drain
        self._objects = objects

    async def GetShard(
        self, request: shard_pb2.GetShardRequest, context: Any
    ) -> shard_pb2.GetShardResponse:
        removed = await RemovedShards(self._objects).numbers(self._drain.service)
        return shard_pb2.GetShardResponse(shard=await self._describe(), removed_shards=removed)

    async def DrainShard(
        self, request: shard_pb2.DrainShardRequest, context: Any
    ) -> shard_pb2.DrainShardResponse:
        await (self._drain.cancel() if request.cancel else self._drain.begin())
        return shard_pb2.DrainShardResponse(shard=await self._describe())

    async def RemoveShard(
        self, request: shard_pb2.RemoveShardRequest, context: Any
    ) -> shard_pb2.RemoveShardResponse:
        if request.database != self._drain.name:
            raise InvalidArgument("database", f"must be {self._drain.name!r}, the one to delete")
        await self._drain.remove()
        return shard_pb2.RemoveShardResponse()

    async def _describe(self) -> shard_pb2.Shard:
        drain = self._drain
        await drain.durable()
        is_draining, remaining = drain.is_draining, await drain.shown()
        state = shard_pb2.Shard.STATE_SERVING
        if is_draining:
            state = shard_pb2.Shard.STATE_DRAINING if remaining else shard_pb2.Shard.STATE_DRAINED
        files = await self._objects.describe(drain.name)
        counts = drain.counts()
        return shard_pb2.Shard(
            service=drain.service,
            shard=drain.number,
            state=state,
            database_bytes=sum(one.size_bytes for one in files),
            remaining=remaining,
            **(counts._asdict() if counts is not None else {}),
        )
