"""The router's process: what it opens, when it serves, how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress

from libs.serving.peers.topology import Peer
from libs.serving.process.exits import ExitCause, FatalError
from libs.serving.process.ownership import Announcement
from libs.serving.service import Service
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import Root
from services.router.config import RouterConfig, parse_shards
from services.router.pieces import PieceLimits
from services.router.router import Router
from services.router.servicer import Explainer, RouterServicer
from services.router.tails import Buffer
from slatemq._cancelling import end_all

log = logging.getLogger(__name__)

READY_WAIT_SECONDS = 5.0
"""How long the start waits for a log and a broker. After it the process serves all the same: that
another process is down is for GetRoutingStatus, and no reason to restart the router."""

READY_LOOK_SECONDS = 0.02


class RouterProcess(Service[RouterConfig]):
    kind = "router"

    def __init__(self, config: RouterConfig, telemetry: Telemetry, root: Root) -> None:
        try:
            shards = parse_shards(config.ingest_shards)
        except ValueError as error:
            raise FatalError.usage(str(error)) from error
        super().__init__(config, config.shard, telemetry, root)
        self.router = Router(
            self.directory,
            self.channels,
            telemetry,
            ingest_shards=shards,
            limits=PieceLimits(hold_ms=config.hold_ms),
            buffer=Buffer(
                config.buffer_messages,
                bytes_max=config.buffer_bytes,
                total_bytes_max=config.buffers_bytes_max,
            ),
            number=config.shard,
        )
        self._routing: asyncio.Task[None] | None = None

    @property
    def memory_parts(self) -> Mapping[str, int]:
        return {"buffers": self.router.buffered_bytes}

    def servicers(self) -> Iterable[object]:
        return [RouterServicer(self.router, Explainer(self.router))]

    async def start(self, address: str, peer_address: str) -> None:
        """Begin to route, and give it a moment to be under way."""
        peer = Peer("router", self._config.shard, address, peer_address)
        self.announcement = Announcement(self.directory, peer, tls=self.probe_tls)
        await self.announcement.announce()
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

    async def stop(self) -> None:
        """Stop routing, leave the topology. What is not assigned yet, the next router assigns."""
        if self._routing is not None:
            await end_all([self._routing])
        await super().stop()
