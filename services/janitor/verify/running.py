"""The databases of a running instance, from snapshots of all shards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import CACHE_MS, Topology, TopologyDirectory
from libs.storage.database.roots import Root
from libs.storage.database.snapshots import SnapshotReader
from services.janitor.asking import asking
from services.janitor.snapshots import (
    SHARDED,
    SnapshotName,
    SnapshotSet,
    opened,
    snapshots_of_all,
)
from slatemq.errors import Unavailable
from slatemq.v1 import ingest_pb2, ingest_pb2_grpc

CALL_S: Final = 30.0


class StoredShards(TopologyDirectory):
    """The topology without shards whose database is lost: a verification says so of them.

    Other jobs stop at such an entry, since what the shard needs is not known.
    """

    def __init__(self, root: Root) -> None:
        super().__init__(root.objects)
        self._root = root

    async def read(self, max_age_ms: int = CACHE_MS) -> Topology:
        topology = await super().read(max_age_ms)
        stored = {path for service in SHARDED for path in await self._root.objects.folders(service)}
        return Topology(
            tuple(
                peer
                for peer in topology.peers
                if peer.service not in SHARDED or f"{peer.service}/{peer.shard}" in stored
            )
        )


class RunningDatabases:
    """Snapshots, taken of the ingests before the brokers."""

    is_stopped = False

    def __init__(self, root: Root, channels: Channels, taken: SnapshotSet) -> None:
        self._root = root
        self._channels = channels
        self._taken = taken
        self._names: Mapping[str, SnapshotName] = {one.database: one for one in taken.names}
        self.names: Sequence[str] = list(self._names)

    @asynccontextmanager
    async def open(self, name: str) -> AsyncIterator[SnapshotReader]:
        async with opened(self._root, self._names[name]) as reader:
            yield reader

    async def ends(self) -> Mapping[int, int]:
        """Asked after the snapshots: what brokers have routed by then is in the logs."""
        self.check()
        found: dict[int, int] = {}
        for name in self._names.values():
            if name.service == "ingest":
                with asking("ingest", name.shard):
                    channel = await self._channels.to("ingest", name.shard)
                    stub = ingest_pb2_grpc.IngestServiceStub(channel)
                    request = ingest_pb2.GetLogStatusRequest()
                    status = await stub.GetLogStatus(request, timeout=CALL_S)
                found[name.shard] = status.durable_sequence
        return found

    @asynccontextmanager
    async def later(self, services: Sequence[str]) -> AsyncIterator[RunningDatabases]:
        shards = StoredShards(self._root)
        async with snapshots_of_all(shards, self._channels, services=services) as taken:
            later = RunningDatabases(self._root, self._channels, taken)
            yield later
            later.check()

    def check(self) -> None:
        """Raise Unavailable where a snapshot was lost: its tables may be gone."""
        if self._taken.lost.done():
            raise Unavailable(self._taken.lost.result())
