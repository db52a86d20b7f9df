"""The shards of an instance: what each has, and draining and removing broker shards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from slatemq._admin.examining import ExaminingCalls
from slatemq.errors import DeadlineExceeded, NotFound, SlateMQError, Unavailable
from slatemq.v1 import shard_pb2
from slatemq.v1.shard_pb2_grpc import ShardServiceStub

ANSWER_S = 5.0


class ShardState(StrEnum):
    """What a broker shard is doing.

    DRAINING: it takes no new queues. DRAINED: it has nothing any more, and can be removed. AWAY: it
    does not answer.
    """

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    AWAY = "away"


@dataclass(frozen=True, slots=True)
class BrokerShard:
    """One broker shard, as its broker says; shard.proto has the fields.

    Attributes:
        problem: Why it did not answer; empty when it did. Then the other fields are empty.
    """

    broker_shard: int
    state: ShardState
    queues_count: int = 0
    messages_count: int = 0
    database_bytes: int = 0
    remaining: tuple[str, ...] = ()
    load: float = 0.0
    problem: str = ""


class BrokerShards(NamedTuple):
    """All broker shards, ascending, and the numbers of those that were removed."""

    shards: Sequence[BrokerShard]
    removed: Sequence[int]


class ShardCalls(ExaminingCalls):
    """Looking at shards, draining and removing them; a part of the client."""

    async def broker_shards(self) -> BrokerShards:
        """What each broker shard has; takes the verb `operate`.

        A shard whose broker does not answer within some seconds has a `problem`. Raises
        PermissionDenied, Unavailable (no process answers).
        """
        shards = sorted((await self._peers.fresh_topology()).brokers)
        answers = await asyncio.gather(*map(self._shard_of, shards))
        found: list[BrokerShard] = []
        removed: set[int] = set()
        for shard, answer in zip(shards, answers, strict=True):
            if isinstance(answer, SlateMQError):
                found.append(BrokerShard(shard, ShardState.AWAY, problem=answer.message))
            else:
                found.append(_shard_of(answer.shard))
                removed.update(answer.removed_broker_shards)
        return BrokerShards(found, sorted(removed))

    async def _shard_of(self, shard: int) -> shard_pb2.GetShardResponse | SlateMQError:
        try:
            return await self._peers.ask_broker(
                shard,
                lambda channel: ShardServiceStub(channel).GetShard,
                shard_pb2.GetShardRequest(),
                call_s=ANSWER_S,
                attempt_s=ANSWER_S,
            )
        except (Unavailable, DeadlineExceeded) as error:
            return error

    async def drain_shard(self, broker_shard: int, *, cancel: bool = False) -> BrokerShard:
        """Has a broker shard take no new queues, or (`cancel`) take them again; durable.

        Its queues stay until they are deleted. Raises NotFound (no such shard), Unavailable.
        """
        await self._check_is_shard(broker_shard)
        response = await self._peers.ask_broker(
            broker_shard,
            lambda channel: ShardServiceStub(channel).DrainShard,
            shard_pb2.DrainShardRequest(cancel=cancel),
        )
        return _shard_of(response.shard)

    async def remove_shard(self, broker_shard: int) -> None:
        """Removes a drained broker shard for ever: its process ends, its database is deleted.

        Raises FailedPrecondition (SHARD_NOT_DRAINED: what it still has), NotFound (no such shard),
        Unavailable.
        """
        await self._check_is_shard(broker_shard)
        await self._peers.ask_broker(
            broker_shard,
            lambda channel: ShardServiceStub(channel).RemoveShard,
            shard_pb2.RemoveShardRequest(database=f"broker/{broker_shard}"),
            repeat_unknown=False,
        )

    async def _check_is_shard(self, broker_shard: int) -> None:
        if broker_shard not in (await self._peers.fresh_topology()).brokers:
            raise NotFound("broker shard", str(broker_shard))


def _shard_of(wire: shard_pb2.BrokerShard) -> BrokerShard:
    state = shard_pb2.BrokerShard.State.Name(wire.state).removeprefix("STATE_").lower()
    return BrokerShard(
        wire.broker_shard,
        ShardState(state),
        wire.queues_count,
        wire.messages_count,
        wire.database_bytes,
        tuple(wire.remaining),
        wire.load,
    )
