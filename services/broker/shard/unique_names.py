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
A creation always makes a claim of its own, also where the shard has an older one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakValueDictionary

from libs.serving.peers.calls import PeerFailed, peer_failures
from libs.serving.peers.channels import Channels
from libs.storage.errors import CorruptRecord, StorageError
from libs.storage.objects.queue_names import UNCLAIMED, NameClaim, QueueNames
from services.broker.shard.owner import ShardOwner
from slatemq.errors import AlreadyExists, DataLoss, Unavailable
from slatemq.v1.queue_name_pb2 import GetNameUseRequest, NameUse
from slatemq.v1.queue_name_pb2_grpc import QueueNameServiceStub

log = logging.getLogger(__name__)

ASK_DEADLINE_S: Final = 5.0
"""A broker that has not answered by then counts as down."""


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
    async def claimed(self, queue_id: str) -> AsyncIterator[None]:
        """Claims the name for this shard, as long as the block, or a queue made in it, exists.

        One block at a time for each name.

        Raises:
            AlreadyExists: Another shard has such a queue; `broker_shard` is in the metadata.
            Unavailable: The store, or the broker that has the name, cannot be asked now.
            DataLoss: The claim is damaged.
        """
        with self._noted(queue_id):
            async with self._lock(queue_id):
                if not self._exists(queue_id):
                    await self._claim(queue_id)
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

    def _lock(self, queue_id: str) -> asyncio.Lock:
        lock = self._locks.get(queue_id)
        if lock is None:
            lock = self._locks[queue_id] = asyncio.Lock()
        return lock

    def _exists(self, queue_id: str) -> bool:
        return queue_id in self._owner.shard.queues

    async def _claim(self, queue_id: str) -> None:
        try:
            claim = UNCLAIMED  # As most names are: then nothing is read.
            while not await self._claim_after(queue_id, claim):
                claim = await self._names.get(queue_id)
        except CorruptRecord as error:
            raise DataLoss(str(error), reason="NAME_DAMAGED") from error
        except StorageError as error:
            raise Unavailable(f"the name {queue_id!r} cannot be claimed: {error}") from error

    async def _claim_after(self, queue_id: str, claim: NameClaim) -> bool:
        for shard in claim.broker_shards:
            if shard != self._shard:
                await self._check_unused(queue_id, shard)
        return await self._names.claim(queue_id, (self._shard,), claim)

    async def _check_unused(self, queue_id: str, shard: int) -> None:
        """Raises AlreadyExists, or Unavailable, unless that shard does not need the name."""
        try:
            with peer_failures():
                stub = QueueNameServiceStub(await self._channels.to("broker", shard))
                request = GetNameUseRequest(queue_id=queue_id)
                answer = await stub.GetNameUse(request, timeout=ASK_DEADLINE_S)
                if answer.broker_shard != shard:
                    raise PeerFailed(f"broker {answer.broker_shard} answers at its address")
        except PeerFailed as error:
            raise Unavailable(
                f"queue {queue_id!r} may exist on broker {shard}, which cannot be asked: {error}",
                reason="BROKER_AWAY",
                metadata={"broker_shard": str(shard)},
            ) from error
        if answer.use == NameUse.NAME_USE_QUEUE:
            raise AlreadyExists(
                "queue",
                queue_id,
                f"queue {queue_id!r} exists already, on broker {shard}",
                metadata={"broker_shard": str(shard)},
            )
        if answer.use != NameUse.NAME_USE_NONE:
            raise Unavailable(
                f"broker {shard} is creating or deleting a queue {queue_id!r} now",
                reason="QUEUE_CHANGING",
                metadata={"broker_shard": str(shard)},
            )

    async def use(self, queue_id: str) -> NameUse.ValueType:
        """What this shard uses a name for, if that is the same before and after a commit."""
        before = self._use_now(queue_id)
        await self._owner.commits.prove_ownership()
        return before if self._use_now(queue_id) == before else NameUse.NAME_USE_CHANGING

    def _use_now(self, queue_id: str) -> NameUse.ValueType:
        if self._exists(queue_id):
            return NameUse.NAME_USE_QUEUE
        is_creating = queue_id in self._creating
        return NameUse.NAME_USE_CHANGING if is_creating else NameUse.NAME_USE_NONE

    async def free(self, queue_id: str) -> None:
        """Free the name of a queue whose deletion is durable, unless it is used again.

        Raises nothing: a claim that stays is taken over as after a crash.
        """
        async with self._lock(queue_id):
            try:
                claim = await self._names.get(queue_id)
                # A process that takes the shard over after this proof makes its claims under the
                # number that is created below, or a higher one.
                await self._owner.commits.prove_ownership()
                if claim.broker_shards == (self._shard,) and not self._exists(queue_id):
                    await self._names.free(queue_id, claim)
            except StorageError as error:
                log.warning("the name of deleted queue %s is still claimed: %s", queue_id, error)
