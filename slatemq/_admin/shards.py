"""The shards of an instance: what each has, draining and removing them, and moving queues."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias, TypeVar, Unpack

from slatemq._admin.examining import ExaminingCalls
from slatemq._admin.placement import least_loaded
from slatemq._checks import check_on_progress, check_text, check_whole
from slatemq._requests import fields_of, message_of
from slatemq._rpc.peers import CallOptions, Method
from slatemq.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from slatemq.v1 import move_pb2, queue_pb2, shard_pb2
from slatemq.v1.move_pb2_grpc import MoveServiceStub
from slatemq.v1.queue_pb2_grpc import QueueServiceStub
from slatemq.v1.shard_pb2_grpc import ShardServiceStub

Q = TypeVar("Q")
R = TypeVar("R")

ShardKind: TypeAlias = Literal["ingest", "broker"]

ANSWER_S = 5.0

LOOK_S = 0.2
"""How often a move is asked for."""

MOVES_RUNNING = "MOVES_RUNNING"
"""The reason where a shard copies as many queues as it does at once."""


class ShardState(StrEnum):
    """What a shard is doing.

    DRAINING: it takes no new queues, or an ingest no publishes. DRAINED: it has nothing any more,
    and can be removed. DOWN: it does not answer.
    """

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard, as its ingest or its broker says; shard.proto has the fields.

    Attributes:
        problem: Why it did not answer; empty when it did. Then the other fields are empty.
    """

    service: str
    shard: int
    state: ShardState
    database_bytes: int = 0
    remaining: tuple[str, ...] = ()
    queues_count: int | None = None
    messages_count: int | None = None
    load: float | None = None
    problem: str = ""


class Shards(NamedTuple):
    """All shards of a kind, ascending, and the numbers of those that were removed."""

    shards: Sequence[Shard]
    removed: Sequence[int]


class MoveState(StrEnum):
    """How far a queue is that moves to another broker shard.

    COPYING: its rows are being copied. ARRIVING: it is the other shard's, and will be served there.
    CANCELLED: it stays where it was.
    """

    COPYING = "copying"
    ARRIVING = "arriving"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class QueueMove:
    """A queue that moves to another broker shard; move.proto has the fields."""

    queue_id: str
    from_broker_shard: int
    to_broker_shard: int
    state: MoveState
    copied_rows_count: int = 0
    problem: str = ""
    partition: int | None = None


class ShardCalls(ExaminingCalls):
    """Looking at shards, draining and removing them, moving queues; a part of the client."""

    async def shards(self, service: ShardKind) -> Shards:
        """What each ingest shard or each broker shard has; takes the verb `operate`.

        A shard whose process does not answer within some seconds has a `problem`. Raises
        PermissionDenied, Unavailable (no process answers).
        """
        shards = sorted(await self._numbers(service))
        answers = await asyncio.gather(*(self._described(service, shard) for shard in shards))
        removed = {number for _, numbers in answers for number in numbers}
        return Shards([shard for shard, _ in answers], sorted(removed))

    async def _described(self, service: ShardKind, shard: int) -> tuple[Shard, Sequence[int]]:
        try:
            response = await self._ask(
                service,
                shard,
                lambda channel: ShardServiceStub(channel).GetShard,
                shard_pb2.GetShardRequest(),
                call_s=ANSWER_S,
                attempt_s=ANSWER_S,
            )
        except (Unavailable, DeadlineExceeded) as error:
            return Shard(service, shard, ShardState.DOWN, problem=error.message), ()
        return _shard_of(response.shard), response.removed_shards

    async def drain_shard(self, service: ShardKind, shard: int, *, cancel: bool = False) -> Shard:
        """Has a shard take no new queues, or publishes, or (`cancel`) take them again; durable.

        A broker shard's queues stay until they are deleted; what an ingest shard has stored is
        delivered and removed as before. Raises FailedPrecondition (SHARD_LEAVING: its removal has
        begun; of an ingest, LAST_INGEST: no other takes publishes, PUBLISHES_ARE_TASKS), NotFound
        (no such shard), Unavailable.
        """
        request = message_of(shard_pb2.DrainShardRequest, cancel=cancel)
        await self._check_is_shard(service, shard)
        response = await self._ask(
            service, shard, lambda channel: ShardServiceStub(channel).DrainShard, request
        )
        return _shard_of(response.shard)

    async def remove_shard(self, service: ShardKind, shard: int) -> None:
        """Removes a drained shard for ever: its process ends, its database is deleted.

        Raises FailedPrecondition (SHARD_NOT_DRAINED: what it still has), NotFound (no such shard),
        Unavailable (of an ingest, also where a broker does not answer). After Unavailable the
        removal may have begun, which is final: repeat it.
        """
        await self._check_is_shard(service, shard)
        await self._ask(
            service,
            shard,
            lambda channel: ShardServiceStub(channel).RemoveShard,
            shard_pb2.RemoveShardRequest(database=f"{service}/{shard}"),
            repeat_unknown=False,
        )

    async def move_queue(
        self,
        queue_id: str,
        broker_shard: int | None = None,
        *,
        partition: int | None = None,
        on_progress: Callable[[QueueMove], None] = lambda move: None,
    ) -> int:
        """Moves a queue to another broker shard, by default one with little to do; returns which.

        Of a queue with several partitions the one of this index moves, to a shard without any of
        the others. Returns once it is served there: until then other calls about it wait. Of many
        moves from a shard some wait for their turn; their queues are served meanwhile. A call that
        is cancelled, or fails in between, leaves the move going on; repeat it to wait for its end:
        without a shard, too, it begins no other one. Raises FailedPrecondition (MOVE_CANCELLED,
        with why; REDRIVE_RUNNING, SHARD_DRAINING, SHARD_HAS_PARTITION, NO_OTHER_SHARD),
        InvalidArgument (`partition`), NotFound (no such queue or shard), Unavailable.
        """
        check_text("queue_id", queue_id)
        check_on_progress(on_progress)
        shards = await self._locations.located(queue_id, fresh=True)
        if partition is None and len(shards) > 1:
            raise InvalidArgument(
                "partition", f"must say which of the {len(shards)} partitions of the queue moves"
            )
        index = 0 if partition is None else partition
        check_whole("partition", index, 0, len(shards) - 1)
        move = None
        if broker_shard is None:
            move = await self._move_under_way(queue_id, index)
            if move is None:
                broker_shard = await self._peers.call(
                    lambda _: least_loaded(self._peers, beside=shards)
                )
            else:
                broker_shard = move.to_broker_shard
        await self._check_is_shard("broker", broker_shard, "broker_shard")
        if move is None and shards[index] != broker_shard:
            move = await self._begin_move(queue_id, index, broker_shard)
        if move is not None:
            await self._wait_moved(move, on_progress)
        await self._locations.ask(
            queue_id,
            lambda channel: QueueServiceStub(channel).GetQueue,
            queue_pb2.GetQueueRequest(queue_id=queue_id),
            index,
        )
        return broker_shard

    async def queue_moves(self, broker_shard: int) -> Sequence[QueueMove]:
        """The queues that are leaving a shard, and those whose moves were cancelled, by ID.

        Cancelled ones are forgotten with the broker's process. Raises NotFound (no such shard),
        Unavailable.
        """
        await self._check_is_shard("broker", broker_shard, "broker_shard")
        return await self._moves_from(broker_shard)

    async def _begin_move(
        self, queue_id: str, partition: int, broker_shard: int
    ) -> QueueMove | None:
        """The move as it begins; None where an earlier try has brought the queue there."""
        request = move_pb2.MoveQueueRequest(queue_id=queue_id, to_broker_shard=broker_shard)
        while True:
            try:
                response = await self._locations.ask(
                    queue_id,
                    lambda channel: MoveServiceStub(channel).MoveQueue,
                    request,
                    partition,
                )
                return _move_of(response.move)
            except InvalidArgument:
                if await self._shard_of(queue_id, partition) != broker_shard:
                    raise
                return None
            except Unavailable as error:
                if error.reason != MOVES_RUNNING:
                    raise

    async def _move_under_way(self, queue_id: str, partition: int) -> QueueMove | None:
        """The move of a partition that has begun and is not over.

        The claim does not say which shard it leaves, so all are asked, and one that is down is
        passed over: it takes no part in the rest of a move.
        """
        shards = (await self._peers.fresh_topology()).brokers
        for moves in await asyncio.gather(*map(self._moves_now, shards)):
            for one in moves:
                is_named = (one.queue_id, one.partition or 0) == (queue_id, partition)
                if is_named and one.state != MoveState.CANCELLED:
                    return one
        return None

    async def _moves_now(self, broker_shard: int) -> Sequence[QueueMove]:
        """As `_moves_from`; none where the broker does not answer within some seconds."""
        try:
            return await self._moves_from(broker_shard, call_s=ANSWER_S, attempt_s=ANSWER_S)
        except (Unavailable, DeadlineExceeded):
            return ()

    async def _shard_of(self, queue_id: str, partition: int) -> int | None:
        """Where a partition is by the claim of the name now; None where there is no such."""
        shards = await self._locations.located(queue_id, fresh=True)
        return shards[partition] if partition < len(shards) else None

    async def _wait_moved(self, move: QueueMove, on_progress: Callable[[QueueMove], None]) -> None:
        source, queue_id = move.from_broker_shard, move.queue_id
        named = (queue_id, move.partition)
        found: QueueMove | None = move
        while found is not None and found.state != MoveState.CANCELLED:
            on_progress(found)
            await asyncio.sleep(LOOK_S)
            moves = await self._moves_from(source)
            found = next((one for one in moves if (one.queue_id, one.partition) == named), None)
        if found is None and await self._shard_of(queue_id, move.partition or 0) != source:
            return
        why = "its broker was started again" if found is None else found.problem
        raise FailedPrecondition(
            "MOVE_CANCELLED",
            f"queue {queue_id!r} has stayed on broker {source}: {why}",
            subject=queue_id,
        )

    async def _moves_from(
        self, broker_shard: int, **options: Unpack[CallOptions]
    ) -> Sequence[QueueMove]:
        response = await self._peers.ask_broker(
            broker_shard,
            lambda channel: MoveServiceStub(channel).ListMoves,
            move_pb2.ListMovesRequest(),
            **options,
        )
        return [_move_of(move) for move in response.moves]

    async def _ask(
        self,
        service: ShardKind,
        shard: int,
        method: Method[Q, R],
        request: Q,
        **options: Unpack[CallOptions],
    ) -> R:
        ask = self._peers.ask_ingest if service == "ingest" else self._peers.ask_broker
        return await ask(shard, method, request, **options)

    async def _numbers(self, service: ShardKind) -> Collection[int]:
        """The shards of a kind. Raises InvalidArgument for another kind."""
        check_text("service", service)
        if service not in ("ingest", "broker"):
            raise InvalidArgument("service", "must be ingest or broker")
        topology = await self._peers.fresh_topology()
        return topology.ingests if service == "ingest" else topology.brokers

    async def _check_is_shard(self, service: ShardKind, shard: int, field: str = "shard") -> None:
        check_whole(field, shard, 0)
        if shard not in await self._numbers(service):
            raise NotFound(f"{service} shard", str(shard))


def _shard_of(wire: shard_pb2.Shard) -> Shard:
    state = shard_pb2.Shard.State.Name(wire.state).removeprefix("STATE_").lower()
    return Shard(**fields_of(wire, Shard), state=ShardState(state), remaining=tuple(wire.remaining))


def _move_of(wire: move_pb2.QueueMove) -> QueueMove:
    state = move_pb2.QueueMove.State.Name(wire.state).removeprefix("STATE_").lower()
    return QueueMove(**fields_of(wire, QueueMove), state=MoveState(state))
