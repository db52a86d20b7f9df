"""The ingest process: what it opens, when it serves, how it ends."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from libs.serving.exits import ExitCause
from libs.serving.http_parts import HttpParts
from libs.serving.ownership import Ownership
from libs.serving.shards import opened_root
from libs.serving.snapshot_servicer import SERVICE_NAME as SNAPSHOT_SERVICE
from libs.serving.snapshot_servicer import SnapshotServicer
from libs.serving.telemetry import Telemetry
from libs.serving.topology import Peer, TopologyDirectory
from libs.serving.topology_servicer import SERVICE_NAME as TOPOLOGY_SERVICE
from libs.serving.topology_servicer import TopologyServicer
from libs.storage.probe import probe_store
from services.ingest.config import IngestConfig
from services.ingest.purge_servicer import SERVICE_NAME as PURGE_SERVICE
from services.ingest.purge_servicer import PurgeServicer
from services.ingest.servicer import SERVICE_NAME, IngestServicer
from services.ingest.shard import open_shard
from slatemq.v1 import ingest_pb2_grpc, purge_pb2_grpc, snapshot_pb2_grpc, topology_pb2_grpc

__all__ = ["IngestProcess"]


class IngestProcess:
    """One ingest shard as `libs.serving.server` runs it."""

    def __init__(self, config: IngestConfig, telemetry: Telemetry) -> None:
        """Prepare; raises FatalError for a root that means nothing."""
        self._root = opened_root(config.root)
        self._config = config
        self._directory = TopologyDirectory(self._root.objects)
        self._servicer = IngestServicer(config, self._directory, telemetry)
        self._purges = PurgeServicer(config.shard)
        self._snapshots = SnapshotServicer()
        self.announcement: Ownership | None = None

    @property
    def name(self) -> str:
        """Name of this process for logs and telemetry."""
        return f"ingest-{self._config.shard}"

    @property
    def grpc_services(self) -> Sequence[str]:
        """What it serves."""
        return (SERVICE_NAME, PURGE_SERVICE, SNAPSHOT_SERVICE, TOPOLOGY_SERVICE)

    @property
    def directory(self) -> TopologyDirectory:
        """Knows where the services are that this one does not have."""
        return self._directory

    @property
    def http_parts(self) -> HttpParts:
        """What it adds to the HTTP port: nothing yet."""
        return HttpParts()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the servicers."""
        ingest_pb2_grpc.add_IngestServiceServicer_to_server(self._servicer, server)
        purge_pb2_grpc.add_PurgeServiceServicer_to_server(self._purges, server)
        snapshot_pb2_grpc.add_SnapshotServiceServicer_to_server(self._snapshots, server)
        topology_pb2_grpc.add_TopologyServiceServicer_to_server(
            TopologyServicer(self._directory), server
        )

    async def start(self, address: str) -> None:
        """Probe the store, open the shard, tell everybody where it is."""
        await probe_store(self._root.objects)
        shard = self._servicer.shard = await open_shard(self._root, self._config)
        self._purges.purger = shard.purger
        self._snapshots.begin(
            self._root.snapshots(shard.database),
            shard.clock.now_ms,
            shard.prove_ownership,
            purge_epoch=lambda: shard.purge_epoch.durable,
        )
        config = self._config
        limit = config.payload_bytes_max
        peer = Peer("ingest", config.shard, address, config.peer_address, limit)
        self.announcement = Ownership(shard.publisher.commits, self._directory, peer)
        await self.announcement.announce()

    async def wait_fatal(self) -> ExitCause:
        """Wait until the shard is lost; raises the error of a failed commit."""
        if self._servicer.shard is None:
            raise RuntimeError("not started")
        return await self._servicer.shard.wait_lost()

    async def drain(self) -> None:
        """End the streams; publishes in flight end by themselves."""
        self._servicer.streams.drain()
        if self._servicer.shard is not None:
            self._servicer.shard.drain()

    async def stop(self) -> None:
        """Commit what was accepted, close the database."""
        if self._servicer.shard is not None:
            await self._servicer.shard.close()
        await self._directory.close()
