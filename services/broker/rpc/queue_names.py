"""QueueNameService: whether this shard needs a queue's name that another one wants."""

from __future__ import annotations

from typing import Any

from services.broker.requests.queues import checked_id
from services.broker.shard.unique_names import UniqueNames
from slatemq.v1 import queue_name_pb2, queue_name_pb2_grpc


class QueueNameServicer(queue_name_pb2_grpc.QueueNameServiceServicer):
    """Answers other brokers."""

    def __init__(self, shard: int, names: UniqueNames) -> None:
        self._shard = shard
        self._names = names

    async def GetNameUse(  # noqa: N802 - the RPC's name
        self, request: queue_name_pb2.GetNameUseRequest, context: Any
    ) -> queue_name_pb2.GetNameUseResponse:
        use = await self._names.use(checked_id(request.queue_id, "queue_id"))
        return queue_name_pb2.GetNameUseResponse(use=use, broker_shard=self._shard)
