"""What a broker asks others: whether queues exist there, where pushes go, and to take them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Protocol

import grpc

from libs.serving.peers.calls import PeerFailed, peer_failures
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.pace import INTERVAL_S_MAX
from libs.storage.errors import StorageError
from libs.storage.records.payloads import INLINE_PAYLOAD_MAX_BYTES
from services.broker.shard.locations import Locations
from slatemq._rpc.rpc_status import from_rpc_error, raising_slatemq_errors
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound, SlateMQError, Unavailable
from slatemq.v1.ingest_pb2 import PushRequest
from slatemq.v1.ingest_pb2_grpc import IngestServiceStub
from slatemq.v1.queue_pb2 import GetQueueRequest
from slatemq.v1.queue_pb2_grpc import QueueServiceStub

ASK_DEADLINE_S = INTERVAL_S_MAX + 5.0
"""A broker that has not answered by then counts as down: it commits first, and may be slow."""

ASK_NEXT_S = 1.0
"""A broker that has not answered by then holds no push up where another one can say as much."""

PUSH_DEADLINE_S = 30.0
"""Some megabytes to store, on a slow disk."""


class RowRefused(PeerFailed):
    """An ingest will never take rows as they are; of several, one of them."""


class NumbersDiffer(PeerFailed):
    """An ingest has stored more rows than there are, or lacks some that it said it had."""

    def __init__(self, message: str, last_number: int) -> None:
        """`last_number` is the last row that the ingest has."""
        super().__init__(message)
        self.last_number = last_number


class OutboxTarget(Protocol):
    async def choose(self) -> int:
        """The ingest shard for pushes made now; raises Unavailable when there is none."""

    def payload_bytes_max(self, ingest_shard: int) -> int | None:
        """The largest payload that it takes, as far as is known: what is larger it would refuse."""

    async def push(self, ingest_shard: int, request: PushRequest) -> int:
        """The number of the last row that is durable there.

        Raises PeerFailed, also as RowRefused or NumbersDiffer.
        """

    async def is_removed(self, ingest_shard: int) -> bool:
        """Whether it was removed for ever. Raises StoreUnavailable."""


@dataclass(eq=False)
class IngestPushes:
    """Sends pushes over gRPC; all of a broker shard go to one ingest shard, so in order."""

    _channels: Channels
    _directory: TopologyDirectory
    _shard: int
    _chosen: int | None = field(default=None, init=False)

    async def choose(self) -> int:
        """The choice holds until its ingest is drained."""
        shards = (self._directory.last() or await self._directory.read()).open_ingests
        chosen = self._chosen
        if chosen is None or chosen not in shards:
            # One may have come since.
            shards = shards or (await self._directory.read(max_age_ms=0)).open_ingests
            if not shards:
                raise Unavailable("no ingest takes pushes", reason="PEER_UNKNOWN")
            chosen = self._chosen = shards[self._shard % len(shards)]
        return chosen

    def payload_bytes_max(self, ingest_shard: int) -> int | None:
        """What fits into a record is never too large."""
        topology = self._directory.last()
        payload_bytes_max = topology.payload_bytes_max(ingest_shard) if topology else None
        return max(payload_bytes_max, INLINE_PAYLOAD_MAX_BYTES) if payload_bytes_max else None

    async def is_removed(self, ingest_shard: int) -> bool:
        return await self._channels.is_removed("ingest", ingest_shard)

    async def push(self, ingest_shard: int, request: PushRequest) -> int:
        try:
            with peer_failures():
                stub = IngestServiceStub(await self._channels.to("ingest", ingest_shard))
                answer = await stub.Push(request, timeout=PUSH_DEADLINE_S)
        except PeerFailed as failed:
            self._channels.doubt("ingest", ingest_shard)
            raise _push_failure(failed) from failed
        return answer.last_number


@dataclass(eq=False)
class OtherBrokers:
    _channels: Channels
    _locations: Locations
    _shard: int
    _late: dict[int, asyncio.Task[bool | None]] = field(default_factory=dict, init=False)
    """By shard, a call that goes on although another partition has answered instead: where it fails
    in the end, the next one looks for that broker elsewhere."""

    async def having(self, queue_ids: Iterable[str]) -> frozenset[str]:
        """The queues, of these, that exist on other shards.

        Raises Unavailable when a broker that should have one cannot be asked.
        """
        wanted = sorted(set(queue_ids))
        found = await asyncio.gather(*map(self._is_elsewhere, wanted))
        return frozenset(compress(wanted, found))

    async def _is_elsewhere(self, queue_id: str) -> bool:
        shards = await self._locations.of(queue_id)
        if await self._has(queue_id, shards):
            return True
        # It may have been created, or moved, since that was read.
        fresh = await self._locations.of(queue_id, fresh=True)
        return fresh != shards and await self._has(queue_id, fresh)

    async def _has(self, queue_id: str, shards: Sequence[int]) -> bool:
        """Whether these shards, none of them this one, have the queue. Raises Unavailable.

        Partition 0 decides. While its broker is down, or does not answer, another one that has a
        partition will do.
        """
        if not shards or self._shard in shards:
            return False
        asked: list[asyncio.Task[bool | None]] = []
        try:
            for shard in shards:
                asked.append(asyncio.create_task(self._ask(queue_id, shard)))
                if (answer := await _answer(asked, ASK_NEXT_S)) is not None:
                    return answer
            while not all(one.done() for one in asked):
                if (answer := await _answer(asked, None)) is not None:
                    return answer
            raise self._down(queue_id, shards[0])
        finally:
            for shard, one in zip(shards, asked, strict=False):
                if not one.done():
                    self._leave(shard, one)

    def _leave(self, shard: int, one: asyncio.Task[bool | None]) -> None:
        """Let one call to a broker that may be down, or only slow, go on to its end."""
        if shard in self._late:
            one.cancel()
            return
        self._late[shard] = one
        one.add_done_callback(lambda _: self._late.pop(shard))

    async def _ask(self, queue_id: str, shard: int) -> bool | None:
        """Whether that shard has the queue; None where it cannot be asked."""
        try:
            return await self._is_on(queue_id, shard)
        except Unavailable:
            return None

    async def _is_on(self, queue_id: str, shard: int) -> bool:
        """Whether that shard has the queue, or a partition of it. Raises Unavailable."""
        try:
            if await self._channels.is_removed("broker", shard):
                return False
            with raising_slatemq_errors():
                stub = QueueServiceStub(await self._channels.to("broker", shard))
                await stub.GetQueue(GetQueueRequest(queue_id=queue_id), timeout=ASK_DEADLINE_S)
        except NotFound:
            return False
        except (SlateMQError, StorageError) as error:
            self._channels.doubt("broker", shard)
            raise self._down(queue_id, shard) from error
        return True

    def _down(self, queue_id: str, shard: int) -> Unavailable:
        return Unavailable(
            f"cannot look up queue {queue_id!r}: broker {shard} is down",
            reason="BROKER_DOWN",
        )


async def _answer(asked: Sequence[asyncio.Task[bool | None]], wait_s: float | None) -> bool | None:
    """What partitions say once one more has answered: the first decides, another may only confirm.

    None if that is nothing.
    """
    pending = [one for one in asked if not one.done()]
    await asyncio.wait(pending, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    answers = [one.result() if one.done() else None for one in asked]
    if answers[0] is not None:
        return answers[0]
    return True if True in answers else None


def _push_failure(failed: PeerFailed) -> PeerFailed:
    cause = failed.__cause__
    problem = from_rpc_error(cause) if isinstance(cause, grpc.RpcError) else None
    if problem is None:
        return failed
    said = f"{problem.reason}: {problem.message}"
    if isinstance(problem, FailedPrecondition) and problem.reason == "OUTBOX_GAP":
        return NumbersDiffer(said, int(problem.metadata["last_number"]))
    # Any other field is about the call: no row is at fault.
    row = isinstance(problem, InvalidArgument) and problem.field.startswith("messages[")
    return RowRefused(said) if row or problem.reason == "MESSAGE_TOO_LARGE" else failed
