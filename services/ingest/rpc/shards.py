"""IngestShardService: what operators see of an ingest shard, and do with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.objects.removed_shards import RemovedShards
from libs.storage.objects.small_objects import Objects
from libs.storage.objects.task_folders import task_folder
from services.ingest.write.draining import Drain
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from slatemq.v1 import shard_pb2, shard_pb2_grpc
from slatemq.v1.outbox_pb2 import GetOutboxRequest
from slatemq.v1.outbox_pb2_grpc import OutboxServiceStub

ASK_DEADLINE_S: Final = 10.0
"""A broker that has not answered by then counts as down."""


@dataclass(eq=False)
class IngestShardServicer(shard_pb2_grpc.IngestShardServiceServicer):
    """`_announce` puts into the topology whether the shard drains, which may have changed."""

    _shard: int
    _drain: Drain
    _directory: TopologyDirectory
    _channels: Channels
    _objects: Objects
    _announce: Callable[[], Awaitable[None]]
    _has_tasks: bool

    async def GetIngestShard(
        self, request: shard_pb2.GetIngestShardRequest, context: Any
    ) -> shard_pb2.GetIngestShardResponse:
        return shard_pb2.GetIngestShardResponse(
            shard=await self._describe(),
            removed_ingest_shards=await RemovedShards(self._objects).numbers("ingest"),
        )

    async def DrainIngestShard(
        self, request: shard_pb2.DrainIngestShardRequest, context: Any
    ) -> shard_pb2.DrainIngestShardResponse:
        if request.cancel:
            await self._drain.cancel()
        else:
            await self._check_may_drain()
            await self._drain.begin()
        # Also where nothing has changed: an earlier call may have failed here.
        await self._announce()
        if not request.cancel and not (await self._directory.read(max_age_ms=0)).open_ingests:
            # All others were drained at the same time: the last to announce itself sees it.
            await self._drain.cancel()
            await self._announce()
            raise self._last_ingest()
        return shard_pb2.DrainIngestShardResponse(shard=await self._describe())

    async def RemoveIngestShard(
        self, request: shard_pb2.RemoveIngestShardRequest, context: Any
    ) -> shard_pb2.RemoveIngestShardResponse:
        if request.database != (own := f"ingest/{self._shard}"):
            raise InvalidArgument("database", f"must be {own!r}, the one to delete")
        await self._drain.remove(self._others_have)
        return shard_pb2.RemoveIngestShardResponse()

    async def _others_have(self) -> Sequence[str]:
        """What has to get here before the shard may go. Raises Unavailable, StoreUnavailable."""
        topology = await self._directory.read(max_age_ms=0)
        found = await asyncio.gather(*map(self._waiting_at, topology.brokers))
        left = [text for text in found if text]
        if bodies := len(await self._objects.describe(task_folder(self._shard))):
            left.append(f"{bodies} bodies of publishes that are tasks")
        return left

    async def _waiting_at(self, broker_shard: int) -> str:
        """The pushes for this shard that wait at a broker; empty = none."""
        try:
            with raising_slatemq_errors():
                stub = OutboxServiceStub(await self._channels.to("broker", broker_shard))
                answer = await stub.GetOutbox(GetOutboxRequest(), timeout=ASK_DEADLINE_S)
        except (Unavailable, DeadlineExceeded) as error:
            self._channels.doubt("broker", broker_shard)
            raise Unavailable(
                f"broker {broker_shard} does not say whether pushes for ingest {self._shard} wait "
                f"there: {error.message}",
                reason="BROKER_DOWN",
            ) from error
        for line in answer.lines:
            if line.ingest_shard == self._shard and line.waiting_count:
                return f"{line.waiting_count} pushes that wait at broker {broker_shard}"
        return ""

    async def _check_may_drain(self) -> None:
        if self._has_tasks:
            raise FailedPrecondition(
                "PUBLISHES_ARE_TASKS",
                f"ingest shard {self._shard} has its publishes as tasks of a queue backend: wait "
                "until no task is pending, start the ingest without the queue settings, and drain "
                "it then (docs/how-to/async.md, Switch it off)",
                subject=f"ingest/{self._shard}",
            )
        topology = await self._directory.read(max_age_ms=0)
        if not set(topology.open_ingests) - {self._shard}:
            raise self._last_ingest()

    def _last_ingest(self) -> FailedPrecondition:
        return FailedPrecondition(
            "LAST_INGEST",
            f"no ingest but shard {self._shard} takes publishes: start another one first "
            "(`slatemq shard add` says how), or end the drain of one",
            subject=f"ingest/{self._shard}",
        )

    async def _describe(self) -> shard_pb2.IngestShard:
        state, remaining = shard_pb2.IngestShard.STATE_SERVING, list[str]()
        if self._drain.is_draining:
            remaining += await self._drain.remaining()
            state = (
                shard_pb2.IngestShard.STATE_DRAINING
                if remaining
                else shard_pb2.IngestShard.STATE_DRAINED
            )
        files = await self._objects.describe(f"ingest/{self._shard}")
        return shard_pb2.IngestShard(
            ingest_shard=self._shard,
            state=state,
            database_bytes=sum(one.size_bytes for one in files),
            remaining=remaining,
        )
