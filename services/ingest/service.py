"""The ingest process: what it opens, when it serves, how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final

import grpc.aio

from libs.serving.events.servicer import SERVICE_NAME as EVENTS_SERVICE
from libs.serving.events.servicer import EventsServicer
from libs.serving.http.parts import HttpParts
from libs.serving.instance.servicer import SERVICE_NAME as INSTANCE_SERVICE
from libs.serving.instance.servicer import InstanceServicer
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import SERVICE_NAME as TOPOLOGY_SERVICE
from libs.serving.peers.topology import Peer, TopologyDirectory, TopologyServicer
from libs.serving.process.exits import ExitCause, first_cause
from libs.serving.process.ownership import Ownership
from libs.serving.snapshot_servicer import SERVICE_NAME as SNAPSHOT_SERVICE
from libs.serving.snapshot_servicer import SnapshotServicer
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import Root
from libs.storage.objects.probe import probe_store
from services.ingest.config import IngestConfig
from services.ingest.rpc.ingest import SERVICE_NAME, IngestServicer
from services.ingest.rpc.purge import SERVICE_NAME as PURGE_SERVICE
from services.ingest.rpc.purge import PurgeServicer
from services.ingest.shard import Shard, open_shard
from services.ingest.tasks.bodies import warn_of_stranded
from services.ingest.tasks.servicer import SERVICE_NAME as TASK_SERVICE
from services.ingest.tasks.servicer import TaskServicer
from slatemq.v1 import (
    events_pb2_grpc,
    ingest_pb2_grpc,
    instance_pb2_grpc,
    purge_pb2_grpc,
    snapshot_pb2_grpc,
    task_pb2_grpc,
    topology_pb2_grpc,
)

if TYPE_CHECKING:
    from services.ingest.events.relay import IngestRelay
    from services.ingest.events.s3_events import S3Events
    from services.ingest.tasks.queued import Tasks

QUEUED: Final = ("async", "sync")
"""The consistencies of event queues with which publishes are tasks."""


class IngestProcess:
    """One ingest shard; a Service of `libs.serving.server`."""

    def __init__(self, config: IngestConfig, telemetry: Telemetry, root: Root) -> None:
        self._root = root
        self._config = config
        self._telemetry = telemetry
        self._directory = TopologyDirectory(self._root.objects)
        self._shard: Shard | None = None
        self._servicer: IngestServicer | None = None
        self._tasks: Tasks | None = None
        if config.queue is not None and config.queue.consistency in QUEUED:
            # Loaded only here: a direct ingest needs nothing of it.
            queued = import_module("services.ingest.rpc.queued")
            self._tasks = queued.open_tasks(config, self._root.objects, telemetry)
        self._s3_events: S3Events | None = None
        self._relay: IngestRelay | None = None
        if config.queue is not None:
            # Loaded when it is wanted: direct mode has nothing of it. What tasks store has events
            # as anything else in the log.
            relays = import_module("services.ingest.events.relay")
            self._relay = relays.IngestRelay(
                config, config.queue, telemetry, beside_tasks=self._tasks is not None
            )
        self._looking: asyncio.Task[None] | None = None
        self.announcement: Ownership | None = None

    @property
    def name(self) -> str:
        return f"ingest-{self._config.shard}"

    @property
    def grpc_services(self) -> Sequence[str]:
        return (
            SERVICE_NAME,
            PURGE_SERVICE,
            SNAPSHOT_SERVICE,
            EVENTS_SERVICE,
            TASK_SERVICE,
            INSTANCE_SERVICE,
            TOPOLOGY_SERVICE,
        )

    @property
    def directory(self) -> TopologyDirectory:
        return self._directory

    @property
    def http_parts(self) -> HttpParts:
        """A path on the HTTP port for the notifications of S3 stores."""
        # Loaded when asked for: few processes have an HTTP port.
        module = import_module("services.ingest.events.s3_events")
        channels = Channels(
            self._directory,
            payload_bytes_max=self._config.instance.payload_bytes_max,
            carrier=self._telemetry.carrier,
        )
        s3_events: S3Events = module.S3Events(
            self._directory, channels, self._config.s3_events_token
        )
        self._s3_events = s3_events
        queue = self._tasks or self._relay
        return HttpParts([s3_events.post], queue.health if queue is not None else None)

    @property
    def note(self) -> str:
        return ""

    @property
    def held_bytes(self) -> int:
        return 0 if self._servicer is None else self._servicer.held_bytes

    def add_to(self, server: grpc.aio.Server) -> None:
        shard = self._shard
        assert shard is not None, "called after start"
        assert self._servicer is not None, "called after start"
        purges = PurgeServicer(self._config.shard, shard.purger)
        snapshots = SnapshotServicer(
            self._root.snapshots(shard.database),
            shard.clock.now_ms,
            shard.prove_ownership,
            purge_epoch=lambda: shard.purge_epoch.durable,
        )
        ingest_pb2_grpc.add_IngestServiceServicer_to_server(self._servicer, server)
        purge_pb2_grpc.add_PurgeServiceServicer_to_server(purges, server)
        snapshot_pb2_grpc.add_SnapshotServiceServicer_to_server(snapshots, server)
        events_pb2_grpc.add_EventsServiceServicer_to_server(EventsServicer(self._relay), server)
        task_pb2_grpc.add_TaskServiceServicer_to_server(TaskServicer(self._tasks), server)
        instance_pb2_grpc.add_InstanceServiceServicer_to_server(
            InstanceServicer(self._root.objects, self._directory, self._config), server
        )
        topology_pb2_grpc.add_TopologyServiceServicer_to_server(
            TopologyServicer(self._directory), server
        )

    async def start(self, address: str) -> None:
        """Probe the store, open the shard, announce the address."""
        await probe_store(self._root.objects)
        config = self._config
        shard = self._shard = await open_shard(self._root, config)
        if self._tasks is None:
            self._servicer = IngestServicer(config, shard, self._directory, self._telemetry)
        else:
            queued = import_module("services.ingest.rpc.queued")
            self._servicer = queued.QueuedServicer(
                config, shard, self._directory, self._telemetry, self._tasks
            )
        limit = config.instance.payload_bytes_max
        peer = Peer("ingest", config.shard, address, config.peer_address, limit)
        commits = shard.publisher.commits
        if self._tasks is None:
            self.announcement = Ownership(commits, self._directory, peer)
        else:
            self.announcement = Ownership(
                commits,
                self._directory,
                peer,
                serves_without_store=self._tasks.serves_without_store,
            )
        await self.announcement.announce()
        if self._tasks is not None:
            await self._tasks.begin(shard)
        else:
            # Beside the start: it serves meanwhile.
            self._looking = asyncio.create_task(warn_of_stranded(self._root.objects, config.shard))
        if self._relay is not None:
            await self._relay.start(shard)

    async def wait_fatal(self) -> ExitCause:
        """Wait until the shard is lost. Raises the error of a failed commit."""
        shard = self._shard
        assert shard is not None, "called after start"
        queues = [queue for queue in (self._tasks, self._relay) if queue is not None]
        if not queues:
            return await shard.wait_lost()
        return await first_cause(shard.wait_lost(), *(queue.wait_fatal() for queue in queues))

    async def drain(self) -> None:
        """End the streams; publishes in flight complete."""
        if self._servicer is not None:
            self._servicer.streams.drain()
        if self._tasks is not None:
            self._tasks.drain()
        if self._shard is not None:
            self._shard.drain()

    async def stop(self) -> None:
        """Commit what was accepted, and close the database."""
        if self._looking is not None:
            self._looking.cancel()
        if self._tasks is not None:
            await self._tasks.close()
        if self._relay is not None:
            await self._relay.stop()
        if self._shard is not None:
            await self._shard.close()
        if self._s3_events is not None:
            await self._s3_events.close()
        await self._directory.close()
