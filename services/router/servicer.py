"""RouterService: from protobuf to the router and back, and what would happen to a message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final

from libs.access.current import hold_to, may
from libs.filters import (
    DEFAULT_FILTER,
    DEFAULT_PRIORITY,
    PRIORITY_MAX,
    Facts,
    Filter,
    Priority,
    QueueOutcome,
    explain_draft,
    facts,
)
from libs.serving.limits import RETENTION_S_MAX
from libs.serving.requests.expressions import checking_expression
from libs.serving.requests.headers import encoded_headers
from services.router.router import Router
from slatemq.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from slatemq.models import now_ms
from slatemq.v1 import queue_pb2, router_pb2, router_pb2_grpc

QUEUES_STEP: Final = 4
"""Queues that judge in one step of the event loop: each may take some milliseconds."""

ROUTES_STEP: Final = 1_000
"""Routes that one step of the event loop lists: a log has one to each broker shard."""


EXPLANATIONS_MAX: Final = 16
"""Calls that judge stored queues at once: each steps through all of them in the event loop."""

RETRY_MS: Final = 100
"""When a call that was refused for others may come again."""


class Explainer:
    """Judges messages by the current queues of all broker shards; nothing is stored."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._count = 0
        self._refreshing: asyncio.Task[list[int]] | None = None
        self._next: asyncio.Task[list[int]] | None = None

    async def explain(self, message: Facts, queue_ids: Sequence[str]) -> list[QueueOutcome]:
        """The judgement of these queues, or of all that the caller may inspect.

        Matches come first, each part by queue ID. Queues created before this is called are seen;
        those of a broker that does not answer now are judged as they were last known.

        Raises:
            NotFound: A queue asked for does not exist.
            ResourceExhausted: Too many calls are in work.
            Unavailable: No broker's queues are known, or one asked for, or the partition of it that
                would get the message, may be at a silent broker.
        """
        if self._count >= EXPLANATIONS_MAX:
            raise ResourceExhausted(
                f"{EXPLANATIONS_MAX} messages are being judged already",
                reason="TOO_MANY_EXPLANATIONS",
                retry_after_ms=RETRY_MS,
            )
        self._count += 1
        try:
            return await self._explain(message, queue_ids)
        finally:
            self._count -= 1

    async def _explain(self, message: Facts, queue_ids: Sequence[str]) -> list[QueueOutcome]:
        silent = await self._refresh()
        all_rules = [link.rules for link in self._router.links.values()]
        known = frozenset[str]().union(*(rules.queue_ids for rules in all_rules))
        for queue_id in queue_ids:
            if queue_id not in known:
                if silent:
                    raise Unavailable(
                        f"queue {queue_id!r} is not known, and broker {silent[0]} does not answer",
                        reason="QUEUES_UNKNOWN",
                    )
                raise NotFound("queue", queue_id)
        outcomes: list[QueueOutcome] = []
        for rules in all_rules:
            # Before they are judged, which takes time that routing needs.
            asked = [one for one in queue_ids or rules.queue_ids if may("inspect", one)]
            for begin in range(0, len(asked), QUEUES_STEP):
                outcomes += rules.explain(message, asked[begin : begin + QUEUES_STEP])
                await asyncio.sleep(0)
        judged = {one.queue_id for one in outcomes}
        for queue_id in queue_ids:
            if queue_id not in judged:
                raise Unavailable(
                    f"the partition of queue {queue_id!r} that would get it is not known",
                    reason="QUEUES_UNKNOWN",
                )
        return sorted(outcomes, key=lambda outcome: (not outcome.matched, outcome.queue_id))

    async def _refresh(self) -> list[int]:
        """As `Router.refresh_rules`: one refresh for all calls that came before it began."""
        if self._next is None:
            self._next = asyncio.create_task(self._refresh_after(self._refreshing))
            # Where all its calls were cancelled, nothing else asks for its error.
            self._next.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(self._next)

    async def _refresh_after(self, running: asyncio.Task[list[int]] | None) -> list[int]:
        if running is not None:
            await asyncio.wait([running])
        self._refreshing, self._next = self._next, None
        return await self._router.refresh_rules()


QUEUES_MAX = 10_000
"""Named in one request."""

DRAFTS_MAX: Final = 4
"""Drafts in work at once: each may take a thread 50 ms of the processor, which routing needs."""

_OF_A_MESSAGE = ("visible_at_ms", "delay_ms", "retention_s", "message_id")


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    def __init__(
        self,
        router: Router,
        explainer: Explainer,
        now_ms: Callable[[], int] = now_ms,
    ) -> None:
        """Answer for this router; the clock (ms since 1970) stands in for times not given."""
        self._router = router
        self._explainer = explainer
        self._now_ms = now_ms
        self._drafts_count = 0

    async def Explain(
        self, request: router_pb2.ExplainRequest, context: Any
    ) -> router_pb2.ExplainResponse:
        """Judge a message. Raises InvalidArgument, NotFound, ResourceExhausted, Unavailable."""
        if len(request.queue_ids) > QUEUES_MAX:
            raise InvalidArgument(
                "queue_ids", f"has {len(request.queue_ids)} items, the limit is {QUEUES_MAX}"
            )
        message = _message(request, self._now_ms())
        if request.HasField("draft"):
            if request.queue_ids:
                raise InvalidArgument(
                    "queue_ids", "cannot be combined with draft: leave one of them out"
                )
            outcome = await self._judge_by_draft(request.draft, message)
            return router_pb2.ExplainResponse(
                queues=[router_pb2.QueueExplanation(**asdict(outcome))]
            )
        outcomes = await self._explainer.explain(message, request.queue_ids)
        return router_pb2.ExplainResponse(
            queues=[router_pb2.QueueExplanation(**asdict(outcome)) for outcome in outcomes]
        )

    async def _judge_by_draft(self, draft: queue_pb2.Queue, message: Facts) -> QueueOutcome:
        """Raises InvalidArgument, and ResourceExhausted where too many are in work."""
        if self._drafts_count >= DRAFTS_MAX:
            raise ResourceExhausted(
                f"{DRAFTS_MAX} drafts are being judged already",
                reason="TOO_MANY_DRAFTS",
                retry_after_ms=RETRY_MS,
            )
        self._drafts_count += 1
        judging = asyncio.ensure_future(asyncio.to_thread(_judged_by_draft, draft, message))
        judging.add_done_callback(self._draft_done)
        # Shielded from the caller: the thread works on when the call is cancelled.
        return await asyncio.shield(judging)

    def _draft_done(self, judging: asyncio.Future[QueueOutcome]) -> None:
        self._drafts_count -= 1
        if not judging.cancelled():
            judging.exception()  # Where the call was cancelled, nothing else asks for it.

    async def GetRoutingStatus(
        self, request: router_pb2.GetRoutingStatusRequest, context: Any
    ) -> router_pb2.GetRoutingStatusResponse:
        """How far each log is routed. Raises Unavailable before any log or broker is known."""
        if not (self._router.logs and self._router.links):
            raise Unavailable("no log or no broker is known yet", reason="TOPOLOGY_UNKNOWN")
        response = router_pb2.GetRoutingStatusResponse()
        for progress in self._router.progress():
            response.routes.add(**progress._asdict())
            if len(response.routes) % ROUTES_STEP == 0:
                await asyncio.sleep(0)
        return response


def _judged_by_draft(draft: queue_pb2.Queue, message: Facts) -> QueueOutcome:
    """Checking an expression may take 50 ms: call it in a thread. Raises InvalidArgument."""
    queue_id = draft.queue_id
    fallback = draft.fallback_priority if draft.HasField("fallback_priority") else DEFAULT_PRIORITY
    if not 0 <= fallback <= PRIORITY_MAX:
        raise InvalidArgument(
            "draft.fallback_priority", f"must be 0..{PRIORITY_MAX}", reason="OUT_OF_RANGE"
        )
    with checking_expression("draft.filter"):
        chosen = Filter(draft.filter if draft.HasField("filter") else DEFAULT_FILTER(queue_id))
    with checking_expression("draft.priority"):
        priority = Priority(draft.priority) if draft.priority else None
    hold_to("filter_cost", chosen.checked.cost + (priority.checked.cost if priority else 0))
    return explain_draft(queue_id, chosen, priority, fallback, message)


def _message(request: router_pb2.ExplainRequest, now_ms: int) -> Facts:
    headers = dict(request.headers)
    encoded_headers("headers", 0, headers)
    for field in ("created_at_ms", "received_at_ms", "payload_bytes", *_OF_A_MESSAGE):
        if getattr(request, field) < 0:
            raise InvalidArgument(field, "must not be negative")
    if request.retention_s > RETENTION_S_MAX:
        raise InvalidArgument("retention_s", f"must be within 0..{RETENTION_S_MAX}")
    if request.visible_at_ms and request.HasField("delay_ms"):
        raise InvalidArgument(
            "delay_ms", "cannot be combined with visible_at_ms: leave one of them out"
        )
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
