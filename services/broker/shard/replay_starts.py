"""Where in the logs a queue that starts in the past begins: asked of the ingests.

They raise their purge epochs first, so that what the queue will need is not purged by a decision
made before the queue was known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from libs.serving.peers.calls import PeerFailed, peer_failures
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.errors import StorageError
from services.broker.core.lists.replays import Starts
from slatemq.errors import InvalidArgument, Unavailable
from slatemq.v1 import ingest_pb2, ingest_pb2_grpc, queue_pb2

log = logging.getLogger(__name__)

IngestCall = Callable[["ingest_pb2_grpc.IngestServiceAsyncStub"], Awaitable[int]]

AHEAD_MS_MAX = 60_000
"""How far ahead of the broker's clock a start may be: "now" by the caller's clock. More is a wrong
unit, or meant as a later start, which takes a filter on `received_at`."""

TRY_S = 3.0
"""How long a queue's creation waits for an ingest; it is asked again when the replay begins."""

ASK_DEADLINE_S = 10.0
"""An ingest that has not answered by then counts as down; it writes a row, and reads fifty."""


@dataclass(eq=False)
class ReplayStarts:
    """Asks every ingest shard of the instance."""

    _directory: TopologyDirectory
    _channels: Channels
    _window_s: int
    """No queue starts further back; 0 = no limit."""
    _creating: set[asyncio.Future[None]] = field(default_factory=set, init=False)

    @contextmanager
    def creating(self) -> Iterator[None]:
        """Held while a queue is created: from before its start is looked up until it is durable."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._creating.add(ended)
        try:
            yield
        finally:
            self._creating.discard(ended)
            ended.set_result(None)

    async def settled(self) -> None:
        """Wait for the creations under way now.

        A snapshot without them would show purge epochs raised for a replay that it lacks.
        """
        if self._creating:
            await asyncio.wait(set(self._creating))

    def _start_ms(self, request: queue_pb2.CreateQueueRequest, now_ms: int) -> int | None:
        match request.WhichOneof("start"):
            case "start_from_ms":
                start_ms = request.start_from_ms
            case "start_from_beginning" if request.start_from_beginning:
                start_ms = 0
            case _:
                return None
        problem = ""
        if start_ms < 0:
            problem = f"must be 0 or more, in ms since 1970, not {start_ms}"
        elif (ahead_ms := start_ms - now_ms) > AHEAD_MS_MAX:
            problem = f"must not lie in the future: it is {ahead_ms / 1000:,.1f} s ahead"
        if problem:
            raise InvalidArgument("start_from_ms", problem, reason="OUT_OF_RANGE")
        return max(start_ms, now_ms - self._window_s * 1000) if self._window_s else start_ms

    async def find(self, request: queue_pb2.CreateQueueRequest, now_ms: int) -> Starts | None:
        """The sequences behind which the logs are wanted; None: the queue starts now.

        From now on, nothing that was stored after the start is purged by decisions made before, in
        the logs whose ingests answer. The others are asked when their replay begins: see `look_up`.

        Raises:
            InvalidArgument: The start is negative, or in the future.
            Unavailable: The topology cannot be read.
        """
        start_ms = self._start_ms(request, now_ms)
        if start_ms is None:
            return None
        try:
            shards = list((await self._directory.read(max_age_ms=0)).ingests)
        except StorageError as error:
            raise Unavailable(f"the topology cannot be read: {error}") from error
        found = await asyncio.gather(*(self._try(shard, start_ms) for shard in shards))
        positions = zip(shards, found, strict=True)
        return Starts(start_ms, {shard: at for shard, at in positions if at is not None})

    async def look_up(self, shard: int, start_ms: int) -> int:
        """The sequence behind which a log is wanted from this time on; raises Unavailable.

        From now on, nothing that was stored after it is purged by decisions made before.
        """

        async def position(stub: ingest_pb2_grpc.IngestServiceAsyncStub) -> int:
            # The epoch first: what is found must still be there when it is read.
            request = ingest_pb2.RaisePurgeEpochRequest()
            await stub.RaisePurgeEpoch(request, timeout=ASK_DEADLINE_S)
            place = ingest_pb2.FindLogPositionRequest(received_at_ms=start_ms)
            return (await stub.FindLogPosition(place, timeout=ASK_DEADLINE_S)).after_sequence

        return await self._ask(shard, position)

    async def _try(self, shard: int, start_ms: int) -> int | None:
        try:
            async with asyncio.timeout(TRY_S):
                return await self.look_up(shard, start_ms)
        except (Unavailable, TimeoutError) as error:
            log.warning("a replay of log %d waits for its ingest: %s", shard, error)
            return None

    async def _ask(self, shard: int, call: IngestCall) -> int:
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
            raise Unavailable(f"ingest {shard} is down: {error}", reason="INGEST_DOWN") from error
