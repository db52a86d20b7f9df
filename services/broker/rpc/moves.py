"""MoveService: queues that operators move to other shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from libs.storage.layout.ids import MAX_SHARD
from services.broker.moves.departures import Departures, Progress
from services.broker.requests.limits import within
from services.broker.requests.queues import checked_id
from services.broker.shard.owner import ShardOwner
from slatemq.v1 import move_pb2, move_pb2_grpc


@dataclass(eq=False)
class MoveServicer(move_pb2_grpc.MoveServiceServicer):
    _shard: int
    _owner: ShardOwner
    _departures: Departures

    async def MoveQueue(
        self, request: move_pb2.MoveQueueRequest, context: Any
    ) -> move_pb2.MoveQueueResponse:
        queue_id = checked_id(request.queue_id, "queue_id")
        target = within("to_broker_shard", request.to_broker_shard, 0, MAX_SHARD)
        progress = await self._departures.begin(queue_id, target)
        return move_pb2.MoveQueueResponse(move=self._move(queue_id, progress))

    async def ListMoves(
        self, request: move_pb2.ListMovesRequest, context: Any
    ) -> move_pb2.ListMovesResponse:
        moves = [self._move(*one) for one in self._departures.progress().items()]
        await self._owner.durable()
        return move_pb2.ListMovesResponse(moves=moves)

    def _move(self, queue_id: str, progress: Progress) -> move_pb2.QueueMove:
        state = move_pb2.QueueMove.STATE_COPYING
        if progress.is_cancelled:
            state = move_pb2.QueueMove.STATE_CANCELLED
        elif progress.is_claimed:
            state = move_pb2.QueueMove.STATE_ARRIVING
        return move_pb2.QueueMove(
            queue_id=queue_id,
            from_broker_shard=self._shard,
            to_broker_shard=progress.shard,
            state=state,
            copied_rows_count=progress.copied_rows_count,
            problem=progress.problem,
            partition=progress.partition,
        )
