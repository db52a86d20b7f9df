"""Redrives: moving dead letters back, in the background of their broker."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeVar
from uuid import uuid4

import grpc.aio

from slatemq._checks import check_on_progress, check_text
from slatemq._requests import fields_of, message_of
from slatemq._rpc.peers import Method
from slatemq._rpc.queue_locations import Calls
from slatemq.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    SlateMQError,
    Unavailable,
    incomplete,
)
from slatemq.models import Duration, seconds
from slatemq.v1 import entry_pb2
from slatemq.v1.entry_pb2_grpc import DeadLetterServiceStub

Q = TypeVar("Q")


class RedriveState(StrEnum):
    """CANCELLED and FAILED redrives can be resumed."""

    RUNNING = "running"
    CANCELLED = "cancelled"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Redrive:
    """A redrive and its progress; `broker_shard` runs it.

    That of a partitioned queue runs on the shard of each partition: it is shown as one, and its ID
    names all of them.

    Attributes:
        ended_at_ms: The time of its end or cancellation; 0 while it runs.
        total_count: The queue's dead letters at the beginning.
        examined_count: Those examined so far.
        redriven_count: Those moved so far.
        error: Why it failed; resuming tries again.
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


class _PartRedrive(NamedTuple):
    """The redrive of a partition; `broker_shard` as its ID names it, None where it names none."""

    redrive_id: str
    broker_shard: int | None


class RedriveCalls(Calls):
    """Starting, watching and steering redrives; a part of the client."""

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

        `filter`: CEL, also over `reason`, `attempts` and `failed_at`. `rate`: at most this many
        messages per second, up to 100,000; 0 = unlimited. Survives restarts, and moves each message
        once.
        Raises NotFound, InvalidArgument, ResourceExhausted (too many are running), and Unavailable
        (INCOMPLETE) where only some partitions have begun: `metadata["redrive_id"]` names theirs.
        """
        check_text("into", into)
        check_text("request_id", request_id)
        request = message_of(
            entry_pb2.StartRedriveRequest,
            queue_id=queue_id,
            target_queue_id=into,
            filter=filter,
            message_ids=message_ids,
            rate=rate,
            request_id=request_id or str(uuid4()),
        )

        async def attempt(index: int, shard: int, timeout: float) -> Redrive:
            stub = DeadLetterServiceStub(await self._peers.broker(shard))
            metadata = self._locations.naming(queue_id, index)
            call = stub.StartRedrive(request, timeout=timeout, metadata=metadata)
            return _redrive_of((await call).redrive, shard)

        # Each partition gets its share of the rate, one a second at least.
        request.rate = -(-request.rate // len(await self._locations.located(queue_id)))
        return _joined(
            await self._locations.each(
                queue_id, attempt, lambda begun: {"redrive_id": _joined(begun).redrive_id}
            )
        )

    async def get_redrive(self, redrive: Redrive | str) -> Redrive:
        """The redrive as it is now. A bare ID is looked for on every broker. Raises NotFound."""
        return await self._ask_redrive(redrive, _get_redrive, entry_pb2.GetRedriveRequest)

    async def cancel_redrive(self, redrive: Redrive | str) -> Redrive:
        """Stops it after the current message; it can be resumed.

        Raises NotFound, FailedPrecondition (REDRIVE_DONE), and Unavailable (INCOMPLETE) where only
        the brokers of some partitions answer.
        """
        return await self._ask_redrive(
            redrive,
            lambda channel: DeadLetterServiceStub(channel).CancelRedrive,
            entry_pb2.CancelRedriveRequest,
        )

    async def resume_redrive(self, redrive: Redrive | str) -> Redrive:
        """Resumes a cancelled or failed one. Raises as `cancel_redrive`."""
        return await self._ask_redrive(
            redrive,
            lambda channel: DeadLetterServiceStub(channel).ResumeRedrive,
            entry_pb2.ResumeRedriveRequest,
        )

    async def list_redrives(self, queue_id: str = "") -> AsyncIterator[Redrive]:
        """The redrives of a queue, or of all; those of each broker the newest first.

        Raises Unavailable (INCOMPLETE) at the end when brokers did not answer, or not to their last
        page: `metadata["broker_shards"]` names them.
        """
        request = message_of(entry_pb2.ListRedrivesRequest, queue_id=queue_id, page_size=1000)
        if queue_id:
            attempt = self._locations.asking(queue_id, _list_redrives, request)
            answers = await self._locations.answers(queue_id, attempt)
        else:
            answers = await self._locations.ask_all(_list_redrives, request)
        found: dict[tuple[str, str, str], list[Redrive]] = {}
        for shard in sorted(answers.by_shard):
            async for page in self._locations.pages(shard, _list_redrives, request, answers):
                for wire in page.redrives:
                    one = _redrive_of(wire, shard)
                    name = wire.request_id or one.redrive_id
                    found.setdefault((name, one.queue_id, one.target_queue_id), []).append(one)
        for each in found.values():
            yield _joined(each)
        answers.check_complete()

    async def wait_redrive(
        self,
        redrive: Redrive | str,
        *,
        on_progress: Callable[[Redrive], None] | None = None,
        every: Duration = 1.0,
    ) -> Redrive:
        """Waits until it no longer runs; its `state` says why.

        Asks every `every` seconds, and calls `on_progress` each time.
        """
        if on_progress is not None:
            check_on_progress(on_progress)
        every_s = seconds(every, "every")
        while True:
            now = await self.get_redrive(redrive)
            if on_progress is not None:
                on_progress(now)
            if now.state is not RedriveState.RUNNING:
                return now
            redrive = now
            await asyncio.sleep(every_s)

    async def _ask_redrive(
        self, redrive: Redrive | str, method: Method[Q, Any], request_type: Callable[..., Q]
    ) -> Redrive:
        """The redrive that a method of its broker responds with; of partitions all of theirs.

        Those of partitions that are done stay as they are. Raises FailedPrecondition (REDRIVE_DONE)
        where all of them are, Unavailable (INCOMPLETE) where only some brokers answer.
        """
        redrive_id = redrive.redrive_id if isinstance(redrive, Redrive) else redrive
        check_text("redrive", redrive_id)
        ids = redrive_id.split(BETWEEN)
        if len(ids) == 1:
            return await self._ask_one(redrive, method, request_type)
        parts = [_PartRedrive(one, _shard_of(one)) for one in ids]
        calls = (self._ask_one(one, method, request_type) for one in parts)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        answered = [one for one in outcomes if isinstance(one, Redrive)]
        done: list[_PartRedrive] = []
        silent: dict[int, SlateMQError] = {}
        for one, outcome in zip(parts, outcomes, strict=True):
            if isinstance(outcome, FailedPrecondition) and outcome.reason == "REDRIVE_DONE":
                done.append(one)
            elif (
                isinstance(outcome, Unavailable | DeadlineExceeded) and one.broker_shard is not None
            ):
                silent[one.broker_shard] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        if silent and len(silent) < len(parts):
            raise incomplete(silent)
        if not answered:
            raise next(one for one in outcomes if isinstance(one, SlateMQError))
        ended = [
            await self._ask_one(one, _get_redrive, entry_pb2.GetRedriveRequest) for one in done
        ]
        return _joined([*answered, *ended])

    async def _ask_one(
        self,
        redrive: Redrive | _PartRedrive | str,
        method: Method[Q, Any],
        request_type: Callable[..., Q],
    ) -> Redrive:
        response, shard = await self._locations.ask_owner_of(
            "redrive", "redrive_id", redrive, method, request_type
        )
        return _redrive_of(response.redrive, shard)


BETWEEN: Final = "+"
"""Between the IDs of the redrives of a queue's partitions."""

_ID: Final = re.compile("([0-9a-f]{1,4})-.+")

_BY_WEIGHT: Final = (
    RedriveState.RUNNING,
    RedriveState.FAILED,
    RedriveState.CANCELLED,
    RedriveState.DONE,
)
"""What a redrive of partitions is in, if one of them is; the first holds."""


def _joined(parts: Sequence[Redrive]) -> Redrive:
    """The redrive of a queue, from that of each partition."""
    if len(parts) == 1:
        return parts[0]
    parts = sorted(parts, key=lambda part: part.broker_shard)
    state = min((part.state for part in parts), key=_BY_WEIGHT.index)
    return replace(
        parts[0],
        redrive_id=BETWEEN.join(part.redrive_id for part in parts),
        rate=sum(part.rate for part in parts),
        state=state,
        created_at_ms=min(part.created_at_ms for part in parts),
        ended_at_ms=max(part.ended_at_ms for part in parts)
        if state is not RedriveState.RUNNING
        else 0,
        total_count=sum(part.total_count for part in parts),
        examined_count=sum(part.examined_count for part in parts),
        redriven_count=sum(part.redriven_count for part in parts),
        error="; ".join(part.error for part in parts if part.error),
    )


def _get_redrive(
    channel: grpc.aio.Channel,
) -> grpc.aio.UnaryUnaryMultiCallable[entry_pb2.GetRedriveRequest, entry_pb2.GetRedriveResponse]:
    return DeadLetterServiceStub(channel).GetRedrive


def _list_redrives(
    channel: grpc.aio.Channel,
) -> grpc.aio.UnaryUnaryMultiCallable[
    entry_pb2.ListRedrivesRequest, entry_pb2.ListRedrivesResponse
]:
    return DeadLetterServiceStub(channel).ListRedrives


def _shard_of(redrive_id: str) -> int | None:
    match = _ID.fullmatch(redrive_id)
    return int(match[1], 16) if match is not None else None


def _redrive_of(redrive: entry_pb2.Redrive, shard: int) -> Redrive:
    state = entry_pb2.Redrive.State.Name(redrive.state).removeprefix("STATE_").lower()
    return Redrive(**fields_of(redrive, Redrive), state=RedriveState(state), broker_shard=shard)
