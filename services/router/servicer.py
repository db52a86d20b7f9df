"""RouterService: from protobuf to the router and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from libs.filters import Facts, facts
from libs.serving.limits import HEADER_TEXT_BYTES_MAX, HEADERS_COUNT_MAX
from services.router.explain import Explainer
from services.router.router import Router
from slatemq.errors import InvalidArgument, Unavailable
from slatemq.v1 import router_pb2, router_pb2_grpc

SERVICE_NAME = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name
"""For `Service.grpc_services`."""

QUEUES_MAX = 10_000
"""Named in one request."""

_OF_A_MESSAGE = ("visible_at_ms", "delay_ms", "retention_s", "message_id")


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Answers what the router does and would do."""

    def __init__(
        self,
        router: Router,
        explainer: Explainer,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """Answer for this router; the clock (ms since 1970) stands in for times not given."""
        self._router = router
        self._explainer = explainer
        self._now_ms = now_ms

    async def Explain(  # noqa: N802 - the RPC's name
        self, request: router_pb2.ExplainRequest, context: Any
    ) -> router_pb2.ExplainResponse:
        """Judge a message. Raises InvalidArgument, NotFound, Unavailable."""
        if len(request.queue_ids) > QUEUES_MAX:
            raise InvalidArgument(
                "queue_ids", f"has {len(request.queue_ids)} items, at most {QUEUES_MAX} fit"
            )
        message = _message(request, self._now_ms())
        outcomes = await self._explainer.explain(message, request.queue_ids)
        return router_pb2.ExplainResponse(
            queues=[
                router_pb2.QueueExplanation(
                    queue_id=outcome.queue_id,
                    matched=outcome.matched,
                    priority=outcome.priority,
                    reason=outcome.reason,
                )
                for outcome in outcomes
            ]
        )

    async def GetRoutingStatus(  # noqa: N802 - the RPC's name
        self, request: router_pb2.GetRoutingStatusRequest, context: Any
    ) -> router_pb2.GetRoutingStatusResponse:
        """How far each log is routed. Raises Unavailable before any log or broker is known."""
        if not (self._router.logs and self._router.links):
            raise Unavailable("no log or no broker is known yet", reason="TOPOLOGY_UNKNOWN")
        return router_pb2.GetRoutingStatusResponse(
            routes=[
                router_pb2.RouteProgress(
                    ingest_shard=progress.ingest_shard,
                    broker_shard=progress.broker_shard,
                    cursor=progress.cursor,
                    durable_sequence=progress.durable_sequence,
                    pending_count=progress.pending_count,
                )
                for progress in self._router.progress()
            ]
        )


def _message(request: router_pb2.ExplainRequest, now_ms: int) -> Facts:
    headers = dict(request.headers)
    if len(headers) > HEADERS_COUNT_MAX:
        raise InvalidArgument("headers", f"{len(headers)} headers; at most {HEADERS_COUNT_MAX}")
    for key, value in headers.items():
        if not 1 <= len(key.encode()) <= HEADER_TEXT_BYTES_MAX:
            raise InvalidArgument("headers", f"a key must have 1-{HEADER_TEXT_BYTES_MAX} bytes")
        if len(value.encode()) > HEADER_TEXT_BYTES_MAX:
            raise InvalidArgument(
                f'headers["{key[:64]}"]', f"a value has at most {HEADER_TEXT_BYTES_MAX} bytes"
            )
    for field in ("created_at_ms", "received_at_ms", "payload_bytes", *_OF_A_MESSAGE):
        if getattr(request, field) < 0:
            raise InvalidArgument(field, "may not be negative")
    if request.visible_at_ms and request.HasField("delay_ms"):
        raise InvalidArgument("delay_ms", "stands beside visible_at_ms: set one of the two")
    created_at_ms = request.created_at_ms if request.HasField("created_at_ms") else now_ms
    received_at_ms = request.received_at_ms if request.HasField("received_at_ms") else now_ms
    fields = (
        request.message_id,
        created_at_ms,
        received_at_ms,
        request.visible_at_ms,
        request.retention_s,
    )
    return facts(headers, fields, request.delay_ms, request.payload_bytes)
