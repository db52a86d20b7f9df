"""Moving dead letters back, in the background of their broker: a part of the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import uuid4

from slatemq._checks import check_text, message_of
from slatemq._rpc.peers import Peers
from slatemq._rpc.queue_locations import Answers, QueueLocations
from slatemq.models import Duration, seconds
from slatemq.v1 import entry_pb2, entry_pb2_grpc


class RedriveState(StrEnum):
    """What a redrive is doing."""

    RUNNING = "running"
    CANCELLED = "cancelled"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Redrive:
    """A redrive and how far it is; `broker_shard` knows it by `redrive_id`.

    Attributes:
        ended_at_ms: When it ended or was cancelled; 0 while it runs.
        total_count: Dead letters that were there at the beginning.
        examined_count: Those looked at so far.
        redriven_count: Those moved so far.
        error: Why it cannot go on, when it failed; resuming tries again.
    """

    redrive_id: str
    queue_id: str
    target_queue_id: str
    filter: str
    rate: int
    state: RedriveState
    created_at_ms: int
    ended_at_ms: int
    total_count: int
    examined_count: int
    redriven_count: int
    error: str
    broker_shard: int


class RedriveCalls:
    """Starting, watching and steering redrives; a part of the client."""

    _peers: Peers
    _locations: QueueLocations

    async def start_redrive(
        self,
        queue_id: str,
        *,
        into: str = "",
        filter: str = "",  # noqa: A002 - the RFC's word
        message_ids: Iterable[int] = (),
        rate: int = 0,
        request_id: str = "",
    ) -> Redrive:
        """Begins to move a queue's dead letters back to available, or `into` another queue.

        `filter`: CEL, also over `reason`, `attempts` and `failed_at`. `rate`: messages per second
        at most, up to 100,000; 0 = as fast as it goes. Goes on through restarts, each message once.
        Raises NotFound, InvalidArgument, ResourceExhausted (too many are running).
        """
        request = message_of(
            entry_pb2.StartRedriveRequest,
            queue_id=queue_id,
            target_queue_id=into,
            filter=filter,
            message_ids=message_ids,
            rate=rate,
            request_id=request_id or str(uuid4()),
        )

        async def attempt(shard: int, timeout: float) -> Redrive:
            stub: Any = entry_pb2_grpc.DeadLetterServiceStub(await self._peers.broker(shard))
            return _redrive_of((await stub.StartRedrive(request, timeout=timeout)).redrive, shard)

        return await self._locations.call(queue_id, attempt)

    async def get_redrive(self, redrive: Redrive | str) -> Redrive:
        """How far a redrive is. A bare ID is asked for at every broker. Raises NotFound."""
        return await self._about(redrive, "GetRedrive", entry_pb2.GetRedriveRequest)

    async def cancel_redrive(self, redrive: Redrive | str) -> Redrive:
        """Stops it after the message at which it is; it can be resumed.

        Raises NotFound, FailedPrecondition (REDRIVE_DONE).
        """
        return await self._about(redrive, "CancelRedrive", entry_pb2.CancelRedriveRequest)

    async def resume_redrive(self, redrive: Redrive | str) -> Redrive:
        """Goes on with a cancelled or failed one. Raises as `cancel_redrive`."""
        return await self._about(redrive, "ResumeRedrive", entry_pb2.ResumeRedriveRequest)

    async def list_redrives(self, queue_id: str = "") -> AsyncIterator[Redrive]:
        """The redrives of a queue, or of all; of each broker the newest first.

        Without a queue, raises Unavailable (INCOMPLETE) at the end when brokers did not answer:
        `metadata["broker_shards"]` names them.
        """
        request = message_of(entry_pb2.ListRedrivesRequest, queue_id=queue_id, page_size=1000)
        stub_of = entry_pb2_grpc.DeadLetterServiceStub
        if queue_id:
            shard = await self._locations.shard_of(queue_id)
            answers = Answers({shard: await self._ask_redrives(shard, "ListRedrives", request)}, {})
        else:
            answers = await self._locations.ask_all(stub_of, "ListRedrives", request)
        for shard, first in sorted(answers.by_shard.items()):
            page = first
            while True:
                for wire in page.redrives:
                    yield _redrive_of(wire, shard)
                if not page.next_page_token:
                    break
                request.page_token = page.next_page_token
                page = await self._ask_redrives(shard, "ListRedrives", request)
        answers.check_complete()

    async def wait_redrive(
        self,
        redrive: Redrive | str,
        *,
        on_progress: Callable[[Redrive], None] | None = None,
        every: Duration = 1.0,
    ) -> Redrive:
        """Waits until it runs no more; look at its `state` for why.

        Asks `every` so often, and tells `on_progress` each time.
        """
        while True:
            now = await self.get_redrive(redrive)
            if on_progress is not None:
                on_progress(now)
            if now.state is not RedriveState.RUNNING:
                return now
            redrive = now
            await asyncio.sleep(seconds(every, "every"))

    async def _about(
        self, redrive: Redrive | str, method: str, request_type: Callable[..., Any]
    ) -> Redrive:
        if isinstance(redrive, Redrive):
            request = request_type(redrive_id=redrive.redrive_id)
            response = await self._ask_redrives(redrive.broker_shard, method, request)
            return _redrive_of(response.redrive, redrive.broker_shard)
        check_text("redrive_id", redrive)
        request = request_type(redrive_id=redrive)
        response, shard = await self._locations.ask_owner_of(
            "redrive", redrive, lambda shard: self._ask_redrives(shard, method, request)
        )
        return _redrive_of(response.redrive, shard)

    async def _ask_redrives(self, shard: int, method: str, request: Any) -> Any:
        stub_of = entry_pb2_grpc.DeadLetterServiceStub
        return await self._peers.ask_broker(shard, stub_of, method, request)


_STATES = {
    entry_pb2.Redrive.STATE_RUNNING: RedriveState.RUNNING,
    entry_pb2.Redrive.STATE_CANCELLED: RedriveState.CANCELLED,
    entry_pb2.Redrive.STATE_DONE: RedriveState.DONE,
    entry_pb2.Redrive.STATE_FAILED: RedriveState.FAILED,
}


def _redrive_of(redrive: entry_pb2.Redrive, shard: int) -> Redrive:
    return Redrive(
        redrive_id=redrive.redrive_id,
        queue_id=redrive.queue_id,
        target_queue_id=redrive.target_queue_id,
        filter=redrive.filter,
        rate=redrive.rate,
        state=_STATES[redrive.state],
        created_at_ms=redrive.created_at_ms,
        ended_at_ms=redrive.ended_at_ms,
        total_count=redrive.total_count,
        examined_count=redrive.examined_count,
        redriven_count=redrive.redriven_count,
        error=redrive.error,
        broker_shard=shard,
    )
