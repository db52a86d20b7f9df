"""The router's process: what it opens, when it serves, how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

import grpc.aio

from libs.serving.http.parts import HttpParts
from libs.serving.instance.servicer import SERVICE_NAME as INSTANCE_SERVICE
from libs.serving.instance.servicer import InstanceServicer
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import SERVICE_NAME as TOPOLOGY_SERVICE
from libs.serving.peers.topology import Peer, TopologyDirectory, TopologyServicer
from libs.serving.process.exits import ExitCause, FatalError
from libs.serving.process.ownership import Announcement
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import Root
from libs.storage.errors import StorageError
from services.router.config import RouterConfig, parse_shards
from services.router.pieces import PieceLimits
from services.router.router import Router
from services.router.servicer import SERVICE_NAME, Explainer, RouterServicer
from services.router.tails import Buffer
from slatemq.v1 import instance_pb2_grpc, router_pb2_grpc, topology_pb2_grpc

log = logging.getLogger(__name__)

READY_WAIT_SECONDS = 5.0
"""How long the start waits for a log and a broker. After it the process serves all the same: that
another process is down is for GetRoutingStatus, and no reason to restart the router."""

READY_LOOK_SECONDS = 0.02


class RouterProcess:
    """A router as `libs.serving.server` runs it."""

    def __init__(self, config: RouterConfig, telemetry: Telemetry, root: Root) -> None:
        """Prepare; raises FatalError for settings that mean nothing."""
        try:
            shards = parse_shards(config.ingest_shards)
        except ValueError as error:
            raise FatalError(ExitCause.usage(str(error))) from error
        self._config = config
        self._objects = root.objects
        self._directory = TopologyDirectory(root.objects)
        self._channels = Channels(
            self._directory,
            payload_bytes_max=config.instance.payload_bytes_max,
            carrier=telemetry.carrier,
        )
        self.router = Router(
            self._directory,
            self._channels,
            telemetry,
            ingest_shards=shards,
            limits=PieceLimits(hold_ms=config.hold_ms),
            buffer=Buffer(
                config.buffer_messages,
                bytes_max=config.buffer_bytes,
                total_bytes_max=config.buffers_bytes_max,
            ),
        )
        self._routing: asyncio.Task[None] | None = None
        self.announcement: Announcement | None = None

    @property
    def name(self) -> str:
        return f"router-{self._config.shard}"

    @property
    def grpc_services(self) -> Sequence[str]:
        return (SERVICE_NAME, INSTANCE_SERVICE, TOPOLOGY_SERVICE)

    @property
    def directory(self) -> TopologyDirectory:
        return self._directory

    @property
    def http_parts(self) -> HttpParts:
        """What it adds to the HTTP port: nothing yet."""
        return HttpParts()

    @property
    def note(self) -> str:
        return ""

    @property
    def held_bytes(self) -> int:
        """Nothing: its answers are small."""
        return 0

    def add_to(self, server: grpc.aio.Server) -> None:
        servicer = RouterServicer(self.router, Explainer(self.router))
        router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server)
        instance_pb2_grpc.add_InstanceServiceServicer_to_server(
            InstanceServicer(self._objects, self._directory, self._config), server
        )
        topology_pb2_grpc.add_TopologyServiceServicer_to_server(
            TopologyServicer(self._directory), server
        )

    async def start(self, address: str) -> None:
        """Begin to route, and give it a moment to be under way."""
        peer = Peer("router", self._config.shard, address, self._config.peer_address)
        self.announcement = Announcement(self._directory, peer)
        try:
            await self.announcement.announce()
        except StorageError as error:
            raise FatalError(ExitCause.failed(str(error))) from error
        self._routing = asyncio.create_task(self.router.run())
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_WAIT_SECONDS):
                while not (self.router.is_routing or self._routing.done()):  # noqa: ASYNC110
                    # Made of what many tasks know; looked at for seconds, once.
                    await asyncio.sleep(READY_LOOK_SECONDS)
        if not self.router.is_routing:
            log.warning("serving, although some log or broker cannot be reached yet")

    async def wait_fatal(self) -> ExitCause:
        """Wait until routing breaks, which only a fault of ours can do."""
        if self._routing is None:
            raise RuntimeError("not started")
        await asyncio.shield(self._routing)
        return ExitCause.failed("routing ended")

    async def drain(self) -> None:
        """Nothing: calls are short, and what is not assigned yet, the next router assigns."""

    async def stop(self) -> None:
        """Stop routing, leave the topology, close the channels."""
        if self._routing is not None:
            self._routing.cancel()
            await asyncio.gather(self._routing, return_exceptions=True)
        await self._channels.close()
        if self.announcement is not None:
            await self.announcement.withdraw()
        await self._directory.close()
