"""EventsService, which every process that publishes events serves in the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slatemq.v1 import events_pb2, events_pb2_grpc

if TYPE_CHECKING:
    from libs.serving.events.relay import ProcessRelay


class EventsServicer(events_pb2_grpc.EventsServiceServicer):
    def __init__(self, relay: ProcessRelay | None) -> None:
        """`relay` is None where the process publishes no events."""
        self._relay = relay

    async def GetEventsStatus(
        self, request: events_pb2.GetEventsStatusRequest, context: Any
    ) -> events_pb2.GetEventsStatusResponse:
        if self._relay is None:
            return events_pb2.GetEventsStatusResponse()
        return await self._relay.status()
