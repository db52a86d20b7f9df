"""The calls to the shard that a queue moves to, and to the ingests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from libs.serving.peers.calls import PeerFailed, peer_failures
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.database.formats import FORMAT
from libs.storage.errors import StorageError
from services.broker.delivery.message_cache import Ingests
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import Unavailable
from slatemq.v1 import move_pb2_grpc
from slatemq.v1.assignment_pb2 import LogCursor
from slatemq.v1.move_pb2 import (
    ArrivalHeader,
    ArriveRequest,
    ArriveResponse,
    CheckArrivalRequest,
    ReceiveRowsRequest,
    StoredRow,
)

log = logging.getLogger(__name__)

CALL_S: Final = 10.0
"""A broker that has not answered by then counts as down."""


@dataclass(eq=False)
class ArrivalTargets:
    """Methods raise what the target refuses with, and Unavailable where it cannot be asked."""

    _channels: Channels
    _shard: int

    async def check(self, shard: int, queue_id: str, cursors: Mapping[int, int]) -> None:
        request = CheckArrivalRequest(
            queue_id=queue_id,
            cursors=[
                LogCursor(ingest_shard=log, sequence=at) for log, at in sorted(cursors.items())
            ],
            format=FORMAT,
            to_broker_shard=shard,
        )
        with self._failures(shard):
            await (await self._stub(shard)).CheckArrival(request, timeout=CALL_S)

    async def send(
        self,
        shard: int,
        queue_id: str,
        number: int,
        rows: Iterable[StoredRow],
        *,
        header: ArrivalHeader | None = None,
        is_last: bool = False,
    ) -> None:
        request = ReceiveRowsRequest(
            queue_id=queue_id,
            move_number=number,
            from_broker_shard=self._shard,
            header=header,
            rows=rows,
            is_last=is_last,
            to_broker_shard=shard,
        )
        with self._failures(shard):
            await (await self._stub(shard)).ReceiveRows(request, timeout=CALL_S)

    async def arrive(self, shard: int, queue_id: str, number: int) -> ArriveResponse:
        request = ArriveRequest(
            queue_id=queue_id,
            move_number=number,
            from_broker_shard=self._shard,
            to_broker_shard=shard,
        )
        with self._failures(shard):
            return await (await self._stub(shard)).Arrive(request, timeout=CALL_S)

    async def is_removed(self, shard: int) -> bool:
        with self._failures(shard):
            return await self._channels.is_removed("broker", shard)

    async def is_given_up(self, shard: int) -> bool:
        with self._failures(shard):
            return await self._channels.is_given_up("broker", shard)

    async def _stub(self, shard: int) -> move_pb2_grpc.ArrivalServiceAsyncStub:
        return move_pb2_grpc.ArrivalServiceStub(await self._channels.to("broker", shard))

    @contextmanager
    def _failures(self, shard: int) -> Iterator[None]:
        try:
            with raising_slatemq_errors():
                yield
        except Unavailable:
            self._channels.doubt("broker", shard)
            raise
        except StorageError as error:
            raise Unavailable(f"broker {shard} cannot be asked: {error}") from error


@dataclass(eq=False)
class PurgeEpochs:
    _directory: TopologyDirectory
    _ingests: Ingests

    async def raise_all(self, raised: Collection[set[int]]) -> Set[int]:
        """Has each ingest that one of these sets lacks refuse purges that were decided before.

        Adds it to all of them; what a set lacks then of those returned, all ingests, is down.
        Raises Unavailable.
        """
        try:
            ingests = (await self._directory.read(max_age_ms=0)).ingests.keys()
        except StorageError as error:
            raise Unavailable(f"the topology cannot be read: {error}") from error
        lacking = [shard for shard in ingests if any(shard not in one for one in raised)]
        await asyncio.gather(*(self._raise(shard, raised) for shard in lacking))
        return ingests

    async def _raise(self, shard: int, raised: Collection[set[int]]) -> None:
        try:
            with peer_failures():
                await self._ingests.raise_purge_epoch(shard)
        except PeerFailed as failed:
            log.warning("queues that have left wait for ingest %d: %s", shard, failed)
            return
        for one in raised:
            one.add(shard)
