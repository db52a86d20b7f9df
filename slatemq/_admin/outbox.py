"""Pushes that have not arrived: what waits, and what was refused for good; a part of the client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slatemq._checks import check_text, message_of
from slatemq._rpc.peers import Peers
from slatemq._rpc.queue_locations import Answers, QueueLocations
from slatemq.errors import NotFound
from slatemq.v1 import outbox_pb2, outbox_pb2_grpc

RESOURCE = "refused push"


@dataclass(frozen=True, slots=True)
class OutboxLine:
    """The pushes of one broker shard to one ingest shard.

    Attributes:
        waiting_bytes: Payloads over 65,535 bytes are not counted.
        oldest_pushed_at_ms: 0 when none waits, or that is not known yet.
        halted_reason: Why nothing is sent until somebody sees to it; empty when all is well.
    """

    broker_shard: int
    ingest_shard: int
    waiting_count: int
    waiting_bytes: int
    oldest_pushed_at_ms: int
    halted_reason: str


@dataclass(frozen=True, slots=True)
class RefusedPush:
    """A push that was put aside, since its ingest refused it for good.

    Attributes:
        queue_id: Which should have got it; empty when its row is damaged.
        payload: Its content, from `get_refused_push` alone.
        headers: The same.
    """

    push_id: str
    queue_id: str
    reason: str
    pushed_at_ms: int
    refused_at_ms: int
    payload_bytes: int
    broker_shard: int
    ingest_shard: int
    payload: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


class OutboxCalls:
    """Looking at outboxes, and repairing them; a part of the client."""

    _peers: Peers
    _locations: QueueLocations

    async def outbox_lines(self) -> AsyncIterator[OutboxLine]:
        """How the outboxes of all brokers stand: a line for each ingest that anything went to.

        Raises Unavailable (INCOMPLETE) at the end when brokers did not answer:
        `metadata["broker_shards"]` names them.
        """
        answers = await self._outboxes()
        for shard, outbox in sorted(answers.by_shard.items()):
            for line in outbox.lines:
                yield OutboxLine(
                    broker_shard=shard,
                    ingest_shard=line.ingest_shard,
                    waiting_count=line.waiting_count,
                    waiting_bytes=line.waiting_bytes,
                    oldest_pushed_at_ms=line.oldest_pushed_at_ms,
                    halted_reason=line.halted_reason,
                )
        answers.check_complete()

    async def refused_pushes(self) -> AsyncIterator[RefusedPush]:
        """The pushes set aside, at most 1,000 of each broker; their contents are left out.

        Raises as `outbox_lines`.
        """
        answers = await self._outboxes()
        for shard, outbox in sorted(answers.by_shard.items()):
            for push in outbox.refused_pushes:
                yield _push_of(push, shard)
        answers.check_complete()

    async def get_refused_push(self, push: RefusedPush | str) -> RefusedPush:
        """A push that was put aside, with its content. A bare ID is asked for at every broker.

        Raises NotFound (it was retried or discarded), DataLoss.
        """
        result, shard = await self._about_push(
            push, "GetRefusedPush", outbox_pb2.GetRefusedPushRequest
        )
        return _push_of(result.push, shard, result.payload, dict(result.headers))

    async def retry_refused_push(self, push: RefusedPush | str) -> None:
        """Sends it once more, behind those that wait: when the cause is removed.

        Raises NotFound (it was retried or discarded), ResourceExhausted, DataLoss.
        """
        await self._about_push(push, "RetryRefusedPush", outbox_pb2.RetryRefusedPushRequest)

    async def discard_refused_push(self, push: RefusedPush | str) -> None:
        """Throws it away, for good. Raises NotFound (it was retried or discarded)."""
        await self._about_push(push, "DiscardRefusedPush", outbox_pb2.DiscardRefusedPushRequest)

    async def resume_outbox(self, broker_shard: int, ingest_shard: int) -> None:
        """Lets a halted outbox go on from the number that its ingest has.

        What the ingest has lost stays lost, and what it had before its broker was restored from a
        copy comes twice. Raises FailedPrecondition (OUTBOX_NOT_HALTED), NotFound (no such broker).
        """
        request = message_of(outbox_pb2.ResumeOutboxRequest, ingest_shard=ingest_shard)
        if broker_shard not in await self._peers.broker_shards():
            raise NotFound("broker shard", str(broker_shard))
        await self._ask_outbox(broker_shard, "ResumeOutbox", request)

    async def _outboxes(self) -> Answers[outbox_pb2.GetOutboxResponse]:
        request = outbox_pb2.GetOutboxRequest()
        return await self._locations.ask_all(
            outbox_pb2_grpc.OutboxServiceStub, "GetOutbox", request
        )

    async def _about_push(
        self, push: RefusedPush | str, method: str, request_type: Any
    ) -> tuple[Any, int]:
        if isinstance(push, RefusedPush):
            request = request_type(push_id=push.push_id)
            return await self._ask_outbox(push.broker_shard, method, request), push.broker_shard
        check_text("push_id", push)
        request = request_type(push_id=push)
        return await self._locations.ask_owner_of(
            RESOURCE, push, lambda shard: self._ask_outbox(shard, method, request)
        )

    async def _ask_outbox(self, shard: int, method: str, request: Any) -> Any:
        stub_of = outbox_pb2_grpc.OutboxServiceStub
        return await self._peers.ask_broker(shard, stub_of, method, request)


def _push_of(
    refused_push: outbox_pb2.RefusedPush,
    shard: int,
    payload: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> RefusedPush:
    return RefusedPush(
        push_id=refused_push.push_id,
        queue_id=refused_push.queue_id,
        reason=refused_push.reason,
        pushed_at_ms=refused_push.pushed_at_ms,
        refused_at_ms=refused_push.refused_at_ms,
        payload_bytes=refused_push.payload_bytes,
        broker_shard=shard,
        ingest_shard=refused_push.ingest_shard,
        payload=payload,
        headers=headers or {},
    )
