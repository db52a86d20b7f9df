"""Which broker shard a new queue goes to: of two brokers, the one that has less to do.

Two choices are enough: with them the shards differ by a few queues at most, however many there are,
and callers that create queues at the same time, who all see the same loads, do not all take the
same shard.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping
from typing import Final

from slatemq._rpc.peers import Peers, errors_translated
from slatemq.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    SlateMQError,
    Unavailable,
    brokers_silent,
)
from slatemq.v1.queue_pb2 import GetShardLoadRequest, GetShardLoadResponse
from slatemq.v1.queue_pb2_grpc import QueueServiceStub

CHOICES: Final = 2

SHARD_DRAINING: Final = "SHARD_DRAINING"
"""The reason where a shard takes no new queues."""

ANSWER_S: Final = 1.0
"""A broker that needs longer to say what it has to do has too much to do."""


async def least_loaded(peers: Peers, beside: Collection[int] = ()) -> int:
    """The shard for a new queue, none of `beside`; the only one is not asked.

    Brokers that do not answer, or take no new queues, are passed over. Raises Unavailable where
    none answers, FailedPrecondition (SHARD_DRAINING) where none that does takes any, or
    (NO_OTHER_SHARD) there is none.
    """
    shards = [shard for shard in await peers.broker_shards() if shard not in beside]
    if beside and not shards:
        raise FailedPrecondition(
            "NO_OTHER_SHARD",
            "there is no other broker shard: add one first"
            if len(beside) == 1
            else "every broker shard has a partition of the queue: add a shard first",
        )
    if len(shards) < 2 and not beside:
        return shards[0] if shards else 0
    left = random.sample(shards, len(shards))
    found: list[tuple[float, int]] = []
    silent: dict[int, SlateMQError] = {}
    draining: list[int] = []
    while left and len(found) < CHOICES:
        asked, left = left[: CHOICES - len(found)], left[CHOICES - len(found) :]
        answers = await asyncio.gather(*(_load(peers, shard) for shard in asked))
        for shard, answer in zip(asked, answers, strict=True):
            if isinstance(answer, SlateMQError):
                silent[shard] = answer
            elif answer.draining:
                draining.append(shard)
            else:
                found.append((answer.load, shard))
    if not found:
        raise _none_takes_it(draining, silent, is_beside=bool(beside))
    return min(found, key=lambda one: one[0])[1]  # of equal ones, any: they are shuffled


def _none_takes_it(
    draining: Collection[int], silent: Mapping[int, SlateMQError], *, is_beside: bool
) -> SlateMQError:
    """Why no shard takes a queue, of those without it (`is_beside`) or of all."""
    others = "broker shard without the queue" if is_beside else "broker shard"
    if not draining:
        first = silent[min(silent)]
        return brokers_silent(f"no {others} can take it now", silent, first.reason)
    why = f"being drained: {_listed(draining)}" + (f"; down: {_listed(silent)}" if silent else "")
    return FailedPrecondition(
        SHARD_DRAINING,
        f"no {others} takes it ({why}): add a shard, or end a drain with `slatemq shard drain "
        "--cancel`",
    )


def _listed(shards: Collection[int]) -> str:
    return ", ".join(map(str, sorted(shards)))


async def least_loaded_of_all(peers: Peers, count: int) -> tuple[int, ...]:
    """Shards for the partitions of a new queue: of all, these have the least to do.

    Raises InvalidArgument where there are fewer, FailedPrecondition (SHARD_DRAINING) where too many
    are being drained, Unavailable (TOO_FEW_SHARDS) where too few of the others answer.
    """
    shards = await peers.broker_shards()
    if count > len(shards):  # Some may have started just now.
        shards = sorted((await peers.fresh_topology()).brokers)
    if count > len(shards):
        raise InvalidArgument(
            "partitions",
            f"must be at most {len(shards)}, the number of broker shards, each of which has one",
        )
    asked = random.sample(shards, len(shards))
    answers = await asyncio.gather(*(_load(peers, shard) for shard in asked))
    loads = [
        (answer.load, shard)
        for shard, answer in zip(asked, answers, strict=True)
        if isinstance(answer, GetShardLoadResponse) and not answer.draining
    ]
    if len(loads) < count:
        silent_count = sum(isinstance(answer, SlateMQError) for answer in answers)
        if len(loads) + silent_count < count:
            raise FailedPrecondition(
                SHARD_DRAINING,
                f"{count} partitions need as many broker shards, and of {len(shards)} all but "
                f"{len(loads) + silent_count} are being drained",
            )
        raise Unavailable(
            f"only {len(loads)} of {len(shards)} brokers answer and are not being drained; "
            f"{count} partitions need as many",
            reason="TOO_FEW_SHARDS",
        )
    return tuple(shard for _, shard in sorted(loads, key=lambda one: one[0])[:count])


async def _load(peers: Peers, shard: int) -> GetShardLoadResponse | SlateMQError:
    """The load of a shard, or why it is not known."""
    try:
        with errors_translated(peers.process("broker", shard)):
            stub = QueueServiceStub(await peers.broker(shard))
            call = stub.GetShardLoad(GetShardLoadRequest(), timeout=ANSWER_S)
            return await peers.unless_closed(call)
    except (Unavailable, DeadlineExceeded) as error:
        return error
