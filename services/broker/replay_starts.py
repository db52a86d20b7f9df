"""Where in the logs a queue that is about to be created begins: asked of the ingests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from libs.serving.channels import Channels
from libs.serving.peers import PeerFailed, peer_failures
from libs.serving.topology import TopologyDirectory
from libs.storage.errors import StorageError
from slatemq.errors import InvalidArgument, Unavailable
from slatemq.v1 import ingest_pb2, ingest_pb2_grpc, queue_pb2

Ask = Callable[["ingest_pb2_grpc.IngestServiceAsyncStub"], Awaitable[int]]

ASK_DEADLINE_S = 10.0
"""An ingest that has not answered by then counts as away; it writes a row, and reads fifty."""


class ReplayStarts:
    """Asks every ingest shard of the instance."""

    def __init__(self, directory: TopologyDirectory, channels: Channels) -> None:
        """Find the ingests in this directory, call them on these channels."""
        self._directory = directory
        self._channels = channels
        self._creating: set[asyncio.Future[None]] = set()

    @contextmanager
    def creating(self) -> Iterator[None]:
        """A queue is being created: from before its start is looked up until it is durable."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._creating.add(ended)
        try:
            yield
        finally:
            self._creating.discard(ended)
            ended.set_result(None)

    async def settled(self) -> None:
        """Wait for the creations under way now.

        A snapshot without them would show purge epochs that count for a replay which it lacks.
        """
        if self._creating:
            await asyncio.wait(set(self._creating))

    async def find(self, request: queue_pb2.CreateQueueRequest) -> dict[int, int] | None:
        """The sequence behind which each log is wanted, by ingest shard; None: nothing is.

        From now on, nothing that was stored after the start is purged by decisions made before.

        Raises:
            InvalidArgument: The start is negative.
            Unavailable: An ingest is away.
        """
        match request.WhichOneof("start"):
            case "start_from_ms":
                start_ms = request.start_from_ms
            case "start_from_beginning" if request.start_from_beginning:
                start_ms = 0
            case _:
                return None
        if start_ms < 0:
            raise InvalidArgument("start_from_ms", "must not be negative", reason="OUT_OF_RANGE")
        try:
            shards = list((await self._directory.read(max_age_ms=0)).ingests)
        except StorageError as error:
            raise Unavailable(f"the topology cannot be read: {error}") from error
        # The epoch first, everywhere: what is found must still be there when it is read.
        await asyncio.gather(*(self._ask(shard, _raise_purge_epoch) for shard in shards))

        async def position(stub: ingest_pb2_grpc.IngestServiceAsyncStub) -> int:
            place = ingest_pb2.FindLogPositionRequest(received_at_ms=start_ms)
            return (await stub.FindLogPosition(place, timeout=ASK_DEADLINE_S)).after_sequence

        starts = await asyncio.gather(*(self._ask(shard, position) for shard in shards))
        return dict(zip(shards, starts, strict=True))

    async def _ask(self, shard: int, call: Ask) -> int:
        try:
            with peer_failures():
                stub = ingest_pb2_grpc.IngestServiceStub(await self._channels.to("ingest", shard))
                status = await stub.GetLogStatus(
                    ingest_pb2.GetLogStatusRequest(), timeout=ASK_DEADLINE_S
                )
                if status.shard != shard:
                    raise PeerFailed(f"ingest {status.shard} answers there")
                return await call(stub)
        except PeerFailed as error:
            raise Unavailable(f"ingest {shard} is away: {error}", reason="INGEST_AWAY") from error


async def _raise_purge_epoch(stub: ingest_pb2_grpc.IngestServiceAsyncStub) -> int:
    request = ingest_pb2.RaisePurgeEpochRequest()
    return (await stub.RaisePurgeEpoch(request, timeout=ASK_DEADLINE_S)).purge_epoch
