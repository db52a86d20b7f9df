"""ShardService: what operators see of a shard, and do with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from libs.storage.layout.ids import MAX_SHARD
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.objects.small_objects import Objects
from services.broker.moves.departures import Departures, Progress
from services.broker.requests.limits import within
from services.broker.requests.queues import checked_id
from services.broker.shard.drain import Drain
from services.broker.shard.load import ShardLoad
from services.broker.shard.owner import ShardOwner
from slatemq.errors import InvalidArgument
from slatemq.v1 import shard_pb2, shard_pb2_grpc


@dataclass(eq=False)
class ShardServicer(shard_pb2_grpc.ShardServiceServicer):
    _shard: int
    _owner: ShardOwner
    _drain: Drain
    _load: ShardLoad
    _objects: Objects
    _departures: Departures

    async def GetShard(
        self, request: shard_pb2.GetShardRequest, context: Any
    ) -> shard_pb2.GetShardResponse:
        return shard_pb2.GetShardResponse(
            shard=await self._describe(),
            removed_broker_shards=await RemovedShards(self._objects).numbers("broker"),
        )

    async def DrainShard(
        self, request: shard_pb2.DrainShardRequest, context: Any
    ) -> shard_pb2.DrainShardResponse:
        await (self._drain.cancel() if request.cancel else self._drain.begin())
        return shard_pb2.DrainShardResponse(shard=await self._describe())

    async def RemoveShard(
        self, request: shard_pb2.RemoveShardRequest, context: Any
    ) -> shard_pb2.RemoveShardResponse:
        if request.database != (own := f"broker/{self._shard}"):
            raise InvalidArgument("database", f"must be {own!r}, the one to delete")
        await self._drain.remove()
        return shard_pb2.RemoveShardResponse()

    async def MoveQueue(
        self, request: shard_pb2.MoveQueueRequest, context: Any
    ) -> shard_pb2.MoveQueueResponse:
        queue_id = checked_id(request.queue_id, "queue_id")
        target = within("to_broker_shard", request.to_broker_shard, 0, MAX_SHARD)
        progress = await self._departures.begin(queue_id, target)
        return shard_pb2.MoveQueueResponse(move=self._move(queue_id, progress))

    async def ListMoves(
        self, request: shard_pb2.ListMovesRequest, context: Any
    ) -> shard_pb2.ListMovesResponse:
        moves = [self._move(*one) for one in self._departures.progress().items()]
        await self._owner.durable()
        return shard_pb2.ListMovesResponse(moves=moves)

    def _move(self, queue_id: str, progress: Progress) -> shard_pb2.QueueMove:
        state = shard_pb2.QueueMove.STATE_COPYING
        if progress.is_cancelled:
            state = shard_pb2.QueueMove.STATE_CANCELLED
        elif progress.is_claimed:
            state = shard_pb2.QueueMove.STATE_ARRIVING
        return shard_pb2.QueueMove(
            queue_id=queue_id,
            from_broker_shard=self._shard,
            to_broker_shard=progress.shard,
            state=state,
            copied_rows_count=progress.copied_rows_count,
            problem=progress.problem,
            partition=progress.partition,
        )

    async def _describe(self) -> shard_pb2.BrokerShard:
        await self._owner.durable()
        remaining = await self._drain.remaining()
        state = shard_pb2.BrokerShard.STATE_SERVING
        if self._drain.is_draining:
            state = (
                shard_pb2.BrokerShard.STATE_DRAINING
                if remaining
                else shard_pb2.BrokerShard.STATE_DRAINED
            )
        files = await self._objects.describe(f"broker/{self._shard}")
        return shard_pb2.BrokerShard(
            broker_shard=self._shard,
            state=state,
            queues_count=self._load.queues_count,
            messages_count=self._load.messages_count,
            database_bytes=sum(one.size_bytes for one in files),
            remaining=remaining,
            load=self._load.load(),
        )
