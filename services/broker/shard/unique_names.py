"""A queue's name is unique in the instance: it is claimed in the store before the queue is created.

::

    creation on shard 3                                     store           shard 7
      note in memory that the name is being used
      claim number 1, if it is absent ────────────────────► done for a name never used before
      read the claim ─────────────────────────────────────► free, mine, or 7's
      only for 7's: does it need the name? ────────────────────────────────► QUEUE: refused
                                                                             NONE: go on
      claim the next number, if it is still absent ───────► taken: read again
      create the queue, durable
      forget the note

A crash between any two steps leaves a claim without a queue: its shard, once asked, says NONE. The
order makes that answer safe. A shard that says NONE has no note at that moment; should it create
the queue later, it reads the claim after that, and of two claims of one number the store takes one.
A creation always makes a claim of its own, also where the shard has an older one. A shard that was
removed has no queue, and needs no name.

A partitioned queue is claimed for the shards of all partitions at once, by the creation of
partition 0: no other shard of the claim before may have such a queue then, nor one that it lists,
which a former queue may have left by a move (decision 0086). The creation of another partition
makes the same claim once more, and only while partition 0 is there; on another shard than the claim
has for it, since that is drained or was removed, only where that one does not need the name. So of
two callers that create a queue of one name, the one that creates partition 0 decides which shards
it has. Later only moves change them, each that of one partition.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakValueDictionary

from libs.serving.peers.calls import PeerFailed, peer_failures
from libs.serving.peers.channels import Channels
from libs.storage.database.pace import INTERVAL_S_MAX
from libs.storage.errors import CorruptRecord, StorageError
from libs.storage.objects.queue_names import UNCLAIMED, NameClaim, QueueNames, named_shards
from services.broker.shard.owner import ShardOwner
from slatemq.errors import AlreadyExists, DataLoss, FailedPrecondition, Unavailable
from slatemq.v1.queue_name_pb2 import GetNameUseRequest, GetNameUseResponse, NameUse
from slatemq.v1.queue_name_pb2_grpc import QueueNameServiceStub

log = logging.getLogger(__name__)

ASK_DEADLINE_S: Final = INTERVAL_S_MAX + 5.0
"""A broker that has not answered by then counts as down: it commits first, and may be slow."""


@dataclass(eq=False)
class UniqueNames:
    _owner: ShardOwner
    _names: QueueNames
    _channels: Channels
    _shard: int
    _creating: Counter[str] = field(default_factory=Counter, init=False)
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(
        default_factory=WeakValueDictionary, init=False
    )

    @asynccontextmanager
    async def claimed(self, queue_id: str, shards: tuple[int, ...]) -> AsyncIterator[None]:
        """Claims the name for these shards, as long as the block, or a queue made in it, exists.

        They are this one alone, or those of the queue's partitions by index; this one is one of
        them. One block at a time for each name.

        Raises:
            AlreadyExists: Another shard has such a queue, or its partitions are on other shards;
                `broker_shard` is in the metadata.
            FailedPrecondition: Partition 0 is missing (PARTITION_MISSING).
            Unavailable: The store, or a broker that may have the name, cannot be asked now.
            DataLoss: The claim is damaged.
        """
        with self._noted(queue_id):
            async with self._locks.setdefault(queue_id, asyncio.Lock()):
                if not self._exists(queue_id):
                    await self._claim(queue_id, shards)
                yield

    @contextmanager
    def _noted(self, queue_id: str) -> Iterator[None]:
        self._creating[queue_id] += 1
        try:
            yield
        finally:
            self._creating[queue_id] -= 1
            if not self._creating[queue_id]:
                del self._creating[queue_id]

    def _exists(self, queue_id: str) -> bool:
        shard = self._owner.shard
        return queue_id in shard.queues or shard.moves.is_leaving(queue_id)

    async def _claim(self, queue_id: str, shards: tuple[int, ...]) -> None:
        try:
            claim = UNCLAIMED  # As most names are: then nothing is read.
            if self._shard != shards[0]:
                await self._check_begun(queue_id, shards)
                claim = await self._names.get(queue_id)
            while not await self._claim_after(queue_id, shards, claim):
                claim = await self._names.get(queue_id)
        except CorruptRecord as error:
            raise DataLoss(str(error), reason="NAME_DAMAGED") from error
        except StorageError as error:
            raise Unavailable(f"the name {queue_id!r} cannot be claimed: {error}") from error

    async def _claim_after(self, queue_id: str, shards: tuple[int, ...], claim: NameClaim) -> bool:
        if self._shard == shards[0]:
            # Where it was never used, no shard has anything of it.
            listed = () if claim == UNCLAIMED else shards
            for shard in sorted({*claim.broker_shards, *listed} - {self._shard}):
                await self._check_unused(queue_id, shard)
        else:
            index = shards.index(self._shard)
            before = claim.broker_shards[index : index + 1]
            if claim.broker_shards != (*shards[:index], *before, *shards[index + 1 :]):
                raise _exists_on(queue_id, claim.broker_shards)
            if before != (self._shard,):
                await self._check_unused(queue_id, *before)
            return await self._names.place(queue_id, index, self._shard, claim)
        return await self._names.claim(queue_id, shards, claim)

    async def _check_begun(self, queue_id: str, shards: tuple[int, ...]) -> None:
        """Raises FailedPrecondition, AlreadyExists or Unavailable unless partition 0 is there.

        The creation of that one decides about the queue.
        """
        answer = await self._ask_use(queue_id, shards[0])
        if answer.use == NameUse.NAME_USE_NONE:
            raise FailedPrecondition(
                "PARTITION_MISSING",
                f"create partition 0 of queue {queue_id!r} first, on broker {shards[0]}",
                subject=queue_id,
            )
        if answer.use == NameUse.NAME_USE_QUEUE and answer.partitions_count != len(shards):
            raise _exists_on(queue_id, shards[:1])
        _check_settled(queue_id, shards[0], answer)

    async def _check_unused(self, queue_id: str, shard: int) -> None:
        """Raises AlreadyExists, or Unavailable, unless that shard does not need the name."""
        answer = await self._ask_use(queue_id, shard)
        if answer.use == NameUse.NAME_USE_QUEUE:
            raise _exists_on(queue_id, (shard,))
        _check_settled(queue_id, shard, answer)

    async def _ask_use(self, queue_id: str, shard: int) -> GetNameUseResponse:
        """That shard's use of the name; one that was removed has none.

        Raises Unavailable, StoreUnavailable.
        """
        try:
            with peer_failures():
                stub = QueueNameServiceStub(await self._channels.to("broker", shard))
                request = GetNameUseRequest(queue_id=queue_id)
                answer = await stub.GetNameUse(request, timeout=ASK_DEADLINE_S)
                if answer.broker_shard != shard:
                    other = answer.broker_shard
                    raise PeerFailed(f"broker {other} answers at the address of broker {shard}")
        except PeerFailed as error:
            if await self._channels.is_removed("broker", shard):
                return GetNameUseResponse(use=NameUse.NAME_USE_NONE, broker_shard=shard)
            raise Unavailable(
                f"queue {queue_id!r} may exist on broker {shard}, which cannot be asked: {error}",
                reason="BROKER_DOWN",
                metadata={"broker_shard": str(shard)},
            ) from error
        return answer

    async def use(self, queue_id: str) -> GetNameUseResponse:
        """What this shard uses a name for, if that is the same before and after a commit."""
        before = self._use_now(queue_id)
        await self._owner.commits.prove_ownership()
        use = before if self._use_now(queue_id) == before else NameUse.NAME_USE_CHANGING
        shard = self._owner.shard
        queue, departure = shard.queues.get(queue_id), shard.moves.departures.get(queue_id)
        if queue is None and departure is not None:
            queue = departure.queue
        return GetNameUseResponse(
            use=use,
            broker_shard=self._shard,
            partitions_count=0 if queue is None else queue.settings.partitions_count,
        )

    def _use_now(self, queue_id: str) -> NameUse.ValueType:
        if self._exists(queue_id):
            return NameUse.NAME_USE_QUEUE
        is_changing = queue_id in self._creating or self._owner.shard.moves.has_record(queue_id)
        return NameUse.NAME_USE_CHANGING if is_changing else NameUse.NAME_USE_NONE

    async def free(self, queue_id: str) -> None:
        """Free the name of a queue whose deletion is durable, unless it is used again.

        The last partition of a queue to be deleted frees its name.
        Raises nothing: a claim that stays is taken over as after a crash.
        """
        async with self._locks.setdefault(queue_id, asyncio.Lock()):
            try:
                claim = await self._names.get(queue_id)
                # A process that takes the shard over after this proof makes its claims under the
                # number that is created below, or a higher one.
                await self._owner.commits.prove_ownership()
                is_mine = self._shard in claim.broker_shards and not self._exists(queue_id)
                if is_mine and not await self._is_used_beside(queue_id, claim):
                    await self._names.free(queue_id, claim)
            except (StorageError, Unavailable) as error:
                log.warning("the name of deleted queue %s is still claimed: %s", queue_id, error)

    async def _is_used_beside(self, queue_id: str, claim: NameClaim) -> bool:
        """Whether another shard of the claim uses the name. Raises as `_ask_use`."""
        for shard in claim.broker_shards:
            if shard != self._shard:
                answer = await self._ask_use(queue_id, shard)
                if answer.use != NameUse.NAME_USE_NONE:
                    return True
        return False


def _exists_on(queue_id: str, shards: Sequence[int]) -> AlreadyExists:
    return AlreadyExists(
        "queue",
        queue_id,
        f"queue {queue_id!r} exists already, on {named_shards(shards)}",
        metadata={"broker_shard": ",".join(map(str, shards))},
    )


def _check_settled(queue_id: str, shard: int, answer: GetNameUseResponse) -> None:
    """Raises Unavailable where a shard is creating or deleting a queue of this name."""
    if answer.use not in (NameUse.NAME_USE_NONE, NameUse.NAME_USE_QUEUE):
        raise Unavailable(
            f"broker {shard} is creating or deleting a queue {queue_id!r} now",
            reason="QUEUE_CHANGING",
            metadata={"broker_shard": str(shard)},
        )
