"""EventsService, which every process that publishes events serves in the same way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from slatemq.v1 import events_pb2, events_pb2_grpc

SERVICE_NAME: Final = events_pb2.DESCRIPTOR.services_by_name["EventsService"].full_name
"""For `Service.grpc_services`."""

Status = Callable[[], Awaitable[events_pb2.GetEventsStatusResponse]]


async def direct_mode() -> events_pb2.GetEventsStatusResponse:
    """The status of a process that publishes no events."""
    return events_pb2.GetEventsStatusResponse()


class EventsServicer(events_pb2_grpc.EventsServiceServicer):
    """Answers from the relay of its process."""

    def __init__(self, status: Status = direct_mode) -> None:
        """`status` says how far the events of the process are published."""
        self._status = status

    async def GetEventsStatus(  # noqa: N802 - the RPC's name
        self, request: events_pb2.GetEventsStatusRequest, context: Any
    ) -> events_pb2.GetEventsStatusResponse:
        """See the proto."""
        return await self._status()
