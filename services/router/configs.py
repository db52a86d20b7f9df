"""A broker's queue configs: bringing rules up to them, and having one queue left out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import grpc
import grpc.aio

from libs.filters import TooSlow
from libs.serving.peers.calls import PeerFailed
from services.router.routing import STEP_NS, BrokerRules
from services.router.wire import queue_rules
from slatemq.v1 import assignment_pb2, assignment_pb2_grpc, queue_pb2

__all__ = ["apply_changes", "ask_for_quarantine", "read_state"]

log = logging.getLogger(__name__)


class RoutingState(NamedTuple):
    """What a broker shard says of itself.

    Attributes:
        config_revision: Up to which the changes are.
        changes: Of queues; of one that changed meanwhile there may be two, the newer one last.
        cursors: Of the logs, by shard.
    """

    config_revision: int
    changes: Sequence[queue_pb2.QueueChange]
    cursors: dict[int, int]


async def read_state(
    channel: grpc.aio.Channel, shard: int, known: int, timeout_seconds: float | None = None
) -> RoutingState:
    """The cursors of a broker shard, and what changed after a revision, read page by page.

    The timeout is that of a page. Raises PeerFailed for an answer of another shard, and what the
    call raises.
    """
    stub = assignment_pb2_grpc.AssignmentServiceStub(channel)
    request = assignment_pb2.GetRoutingStateRequest(known_revision=known)
    changes: list[queue_pb2.QueueChange] = []
    while True:
        page = await stub.GetRoutingState(request, timeout=timeout_seconds)
        if not isinstance(page, assignment_pb2.GetRoutingStateResponse):
            raise PeerFailed("an answer that cannot be read")
        if page.broker_shard != shard:
            raise PeerFailed(f"broker shard {page.broker_shard} answers there")
        changes += page.changes
        if not page.next_page_token:
            cursors = {cursor.ingest_shard: cursor.sequence for cursor in page.cursors}
            return RoutingState(page.config_revision, changes, cursors)
        request.page_token = page.next_page_token


async def apply_changes(
    rules: BrokerRules, changes: Sequence[queue_pb2.QueueChange], revision: int
) -> None:
    """Bring rules to a revision, in steps: compiling ten thousand filters takes seconds."""
    until_ns = time.perf_counter_ns() + STEP_NS
    for change in changes:
        rules.change(queue_rules([change]), revision)
        if time.perf_counter_ns() > until_ns:
            await asyncio.sleep(0)
            until_ns = time.perf_counter_ns() + STEP_NS
    rules.revision = revision


async def ask_for_quarantine(
    channel: grpc.aio.Channel, slow: TooSlow, revision: int, timeout_seconds: float
) -> None:
    """Have the broker leave a queue out that takes too long, as it was at this revision.

    Raises what the call raises, but for the queue being gone.
    """
    log.warning("queue %s holds up others: %s", slow.queue_id, slow.reason)
    request = assignment_pb2.QuarantineQueueRequest(
        queue_id=slow.queue_id, queue_revision=revision, reason=slow.reason
    )
    try:
        stub = assignment_pb2_grpc.AssignmentServiceStub(channel)
        await stub.QuarantineQueue(request, timeout=timeout_seconds)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:
            raise
