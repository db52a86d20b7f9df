"""ArrivalService: queues that arrive from other shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from libs.storage.layout.ids import MAX_MESSAGE_ID, MAX_SHARD
from libs.storage.records.move_records import MoveRecord, MoveStage
from services.broker.moves.arrivals import Arrivals
from services.broker.requests.limits import within
from services.broker.requests.queues import checked_id
from slatemq.errors import InvalidArgument, Unavailable
from slatemq.v1 import move_pb2, move_pb2_grpc

NUMBER_MAX: Final = (1 << 63) - 1


@dataclass(eq=False)
class ArrivalServicer(move_pb2_grpc.ArrivalServiceServicer):
    _shard: int
    _arrivals: Arrivals

    async def CheckArrival(
        self, request: move_pb2.CheckArrivalRequest, context: Any
    ) -> move_pb2.CheckArrivalResponse:
        self._check_meant(request.to_broker_shard)
        queue_id = checked_id(request.queue_id, "queue_id")
        cursors: dict[int, int] = {}
        if len(request.cursors) > MAX_SHARD + 1:
            problem = f"at most {MAX_SHARD + 1}, one of each log, not {len(request.cursors)}"
            raise InvalidArgument("cursors", problem)
        for place, cursor in enumerate(request.cursors):
            field = f"cursors[{place}]"
            log = within(f"{field}.ingest_shard", cursor.ingest_shard, 0, MAX_SHARD)
            cursors[log] = within(f"{field}.sequence", cursor.sequence, 0, MAX_MESSAGE_ID)
        await self._arrivals.check(queue_id, cursors, request.format)
        return move_pb2.CheckArrivalResponse()

    async def ReceiveRows(
        self, request: move_pb2.ReceiveRowsRequest, context: Any
    ) -> move_pb2.ReceiveRowsResponse:
        self._check_meant(request.to_broker_shard)
        header = request.header
        begun = MoveRecord(
            MoveStage.COPYING,
            within("move_number", request.move_number, 1, NUMBER_MAX),
            within("from_broker_shard", request.from_broker_shard, 0, MAX_SHARD),
            0,
            header.config,
            header.state,
            header.replay,
        )
        await self._arrivals.receive(
            checked_id(request.queue_id, "queue_id"),
            begun,
            request.rows,
            has_header=request.HasField("header"),
            is_last=request.is_last,
        )
        return move_pb2.ReceiveRowsResponse()

    async def Arrive(
        self, request: move_pb2.ArriveRequest, context: Any
    ) -> move_pb2.ArriveResponse:
        self._check_meant(request.to_broker_shard)
        queue_id = checked_id(request.queue_id, "queue_id")
        number = within("move_number", request.move_number, 1, NUMBER_MAX)
        source = within("from_broker_shard", request.from_broker_shard, 0, MAX_SHARD)
        found = await self._arrivals.arrive(queue_id, number, source)
        return move_pb2.ArriveResponse(arrived=found.has_arrived, lost=found.is_lost)

    def _check_meant(self, shard: int) -> None:
        """Raises Unavailable for a call that is for another shard: its broker was here before."""
        if shard != self._shard:
            raise Unavailable(
                f"broker {self._shard} answers at the address of broker {shard}",
                reason="OTHER_BROKER",
            )
