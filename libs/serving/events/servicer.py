"""EventsService, which every process that publishes events serves in the same way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from slatemq.errors import Unavailable
from slatemq.v1 import events_pb2, events_pb2_grpc

SERVICE_NAME: Final = events_pb2.DESCRIPTOR.services_by_name["EventsService"].full_name
"""For `Service.grpc_services`."""

Status = Callable[[], Awaitable[events_pb2.GetEventsStatusResponse]]


async def direct_mode() -> events_pb2.GetEventsStatusResponse:
    """The status of a process that publishes no events."""
    return events_pb2.GetEventsStatusResponse()


class EventsServicer(events_pb2_grpc.EventsServiceServicer):
    """Answers once the process has started.

    Attributes:
        status: Tells where its events stand; None until it has started.
    """

    def __init__(self) -> None:
        """Answer UNAVAILABLE until `status` is set."""
        self.status: Status | None = None

    async def GetEventsStatus(  # noqa: N802 - the RPC's name
        self, request: events_pb2.GetEventsStatusRequest, context: Any
    ) -> events_pb2.GetEventsStatusResponse:
        """See the proto."""
        if self.status is None:
            raise Unavailable("the service is starting", reason="STARTING")
        return await self.status()
