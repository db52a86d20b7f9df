"""The health of a process, and why it does not serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from grpc_health.v1 import health, health_pb2

from slatemq.models import now_ms

REASON_KEY: Final = "slatemq-not-serving"
"""Trailing metadata of a health check that says NOT_SERVING: why, as text."""

CLOCK_KEY: Final = "slatemq-clock-ms"
"""Trailing metadata of a check of a shard's owner: its clock, in ms since the Unix epoch."""

STARTING: Final = "the service is starting"

STANDING_BY: Final = "a standby: it waits until the owner of its shard is silent or stops"

FAILED: Final = "the service has failed and ends"

STOPPING: Final = "the service is stopping"
"""The reason of a process that drains, and then closes its database."""

_OWNER: Final = "slatemq.owner/"

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING


def owner_health(database: str, owner_name: str) -> str:
    """The name of the health of a shard's owner, such as `slatemq.owner/broker/0/6b1f…`.

    Another process that answers at its address, or a later life of it, does not know the name. An
    owner answers without its name too, for those that find no whole claim.
    """
    return f"{_OWNER}{database}/{owner_name}"


class Health(health.aio.HealthServicer):
    """One health for the process and all its services.

    Attributes:
        is_serving: Whether it says SERVING.
        reason: Why it does not; empty where it does.
    """

    def __init__(self, services: Sequence[str]) -> None:
        """For these services, by their full names."""
        super().__init__()
        self._services = ("", *services)
        self.is_serving = False
        self.reason = ""

    def add(self, service: str) -> None:
        """Answer for this one too, from the next change on."""
        self._services = (*self._services, service)

    async def serving(self) -> None:
        self.is_serving, self.reason = True, ""
        await self._set_all(_SERVING)

    async def not_serving(self, reason: str) -> None:
        self.is_serving, self.reason = False, reason.encode("ascii", "replace").decode()
        await self._set_all(_NOT_SERVING)

    async def Check(  # noqa: N802 - the RPC's name
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> Any:
        """The health of one service, with the reason in REASON_KEY; of an owner, its clock too."""
        facts = ((REASON_KEY, self.reason),) if self.reason else ()
        if request.service.startswith(_OWNER):
            facts = (*facts, (CLOCK_KEY, str(now_ms())))
        if facts:
            context.set_trailing_metadata(facts)
        return await super().Check(request, context)

    async def _set_all(self, status: Any) -> None:
        for name in self._services:
            await self.set(name, status)
