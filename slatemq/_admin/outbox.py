"""Pushes that have not arrived: those that wait, and those that were refused permanently."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from slatemq._checks import check_text, check_whole
from slatemq._requests import fields_of, message_of
from slatemq._rpc.peers import Method
from slatemq._rpc.queue_locations import Answers, Calls
from slatemq.errors import NotFound
from slatemq.v1 import outbox_pb2
from slatemq.v1.outbox_pb2_grpc import OutboxServiceStub

Q = TypeVar("Q")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class OutboxLine:
    """The pushes of one broker shard to one ingest shard.

    Attributes:
        waiting_bytes: Payloads over 65,535 bytes are not counted.
        oldest_pushed_at_ms: 0 when none waits, or its time is not known yet.
        halted_reason: Why nothing is sent until `resume_outbox`; empty while the outbox sends.
    """

    broker_shard: int
    ingest_shard: int
    waiting_count: int
    waiting_bytes: int
    oldest_pushed_at_ms: int
    halted_reason: str


@dataclass(frozen=True, slots=True)
class RefusedPush:
    """A push that was set aside because its ingest refused it permanently.

    Attributes:
        queue_id: Its target; empty when its row is damaged.
        payload: Set by `get_refused_push` only, as are the headers.
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


class OutboxCalls(Calls):
    """Reading outboxes, and repairing them; a part of the client."""

    async def outbox_lines(self) -> AsyncIterator[OutboxLine]:
        """The outboxes of all brokers: a line for each ingest that anything was sent to.

        Raises Unavailable (INCOMPLETE) at the end when brokers did not answer:
        `metadata["broker_shards"]` names them.
        """
        answers = await self._outboxes()
        for shard, outbox in sorted(answers.by_shard.items()):
            for line in outbox.lines:
                yield OutboxLine(**fields_of(line, OutboxLine), broker_shard=shard)
        answers.check_complete()

    async def refused_pushes(self) -> AsyncIterator[RefusedPush]:
        """The pushes set aside, at most 1,000 of each broker, without their contents.

        Raises as `outbox_lines`.
        """
        answers = await self._outboxes()
        for shard, outbox in sorted(answers.by_shard.items()):
            for push in outbox.refused_pushes:
                yield _push_of(push, shard)
        answers.check_complete()

    async def get_refused_push(self, push: RefusedPush | str) -> RefusedPush:
        """A push that was set aside, with its content. A bare ID is looked for on every broker.

        Raises NotFound (it was retried or discarded), DataLoss.
        """
        result, shard = await self._ask_push(
            push,
            lambda channel: OutboxServiceStub(channel).GetRefusedPush,
            outbox_pb2.GetRefusedPushRequest,
        )
        payload, headers = result.payload, dict(result.headers)
        if self._encryption is not None:
            payload = self._encryption.open(payload, headers, f"push {result.push.push_id}")
        return _push_of(result.push, shard, payload, headers)

    async def retry_refused_push(self, push: RefusedPush | str) -> None:
        """Sends it again, after those that wait. Remove the cause first.

        Raises NotFound (it was retried or discarded), ResourceExhausted, DataLoss.
        """
        await self._ask_push(
            push,
            lambda channel: OutboxServiceStub(channel).RetryRefusedPush,
            outbox_pb2.RetryRefusedPushRequest,
        )

    async def discard_refused_push(self, push: RefusedPush | str) -> None:
        """Deletes it permanently. Raises NotFound (it was retried or discarded)."""
        await self._ask_push(
            push,
            lambda channel: OutboxServiceStub(channel).DiscardRefusedPush,
            outbox_pb2.DiscardRefusedPushRequest,
        )

    async def resume_outbox(self, broker_shard: int, ingest_shard: int) -> None:
        """Resumes a halted outbox after the last push that its ingest has stored.

        Pushes that the ingest has lost stay lost; pushes that it stored before the broker was
        restored from a copy arrive twice. Raises FailedPrecondition (OUTBOX_NOT_HALTED), NotFound
        (no such broker).
        """
        request = message_of(outbox_pb2.ResumeOutboxRequest, ingest_shard=ingest_shard)
        check_whole("broker_shard", broker_shard, 0)
        if broker_shard not in await self._peers.broker_shards():
            raise NotFound("broker shard", str(broker_shard))
        await self._peers.ask_broker(
            broker_shard, lambda channel: OutboxServiceStub(channel).ResumeOutbox, request
        )

    async def _outboxes(self) -> Answers[outbox_pb2.GetOutboxResponse]:
        return await self._locations.ask_all(
            lambda channel: OutboxServiceStub(channel).GetOutbox, outbox_pb2.GetOutboxRequest()
        )

    async def _ask_push(
        self, push: RefusedPush | str, method: Method[Q, R], request_type: Callable[..., Q]
    ) -> tuple[R, int]:
        check_text("push", push.push_id if isinstance(push, RefusedPush) else push)
        return await self._locations.ask_owner_of(
            "refused push", "push_id", push, method, request_type
        )


def _push_of(
    push: outbox_pb2.RefusedPush,
    shard: int,
    payload: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> RefusedPush:
    values = {**fields_of(push, RefusedPush), "payload": payload}
    return RefusedPush(**values, broker_shard=shard, headers=headers or {})
