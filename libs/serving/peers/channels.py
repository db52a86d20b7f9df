"""Channels to other services: one per peer for the whole process.

A channel knows its address only by the topology. When the peer moves, the next `to` gives a new
channel and the old one ends with its calls. When the certificates are renewed, it gives a new one,
too, and streams go on where they are. Calls never wait for a peer that is down (no wait-for-ready):
they fail at once with UNAVAILABLE, and the caller decides when to try again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc
import grpc.aio

from libs.serving import limits
from libs.serving.peers.topology import RESOLVE_AGAIN_MS, TopologyDirectory
from slatemq._rpc.metadata_channels import CallMetadata, channel_with
from slatemq._rpc.tls import ChannelTls, channel_to
from slatemq.errors import Unavailable

TRACE_VARIABLES = ("TRACEPARENT", "TRACESTATE")
"""Environment variables that have the trace context in which a process was started."""

CLOSE_GRACE_SECONDS = 90.0
"""For the calls on the channel of a peer that has moved: longer than any deadline of ours."""

_DOWN = (
    grpc.ChannelConnectivity.IDLE,  # After a connection has ended, which may be the peer's end.
    grpc.ChannelConnectivity.CONNECTING,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
)


@dataclass
class _Peer:
    address: str
    channel: grpc.aio.Channel
    tls_version: int
    former: list[grpc.aio.Channel]
    """Opened with earlier certificates: there are streams on them, or were half an hour ago."""


class Channels:
    """The channels of one process, by service and shard."""

    def __init__(
        self,
        directory: TopologyDirectory,
        *,
        payload_bytes_max: int = limits.PAYLOAD_BYTES_MAX,
        call_deadline_ms: int = limits.CALL_DEADLINE_MS,
        carrier: CallMetadata | None = None,
        tls: ChannelTls | None = None,
    ) -> None:
        """Find peers in this directory; unary calls without a deadline get this one.

        `carrier` returns metadata that every call has: the trace context, where telemetry is on.
        `tls` proves that this process is a service; None connects without TLS.
        """
        self._tls = tls
        self._directory = directory
        self._options = limits.channel_options(payload_bytes_max)
        self._deadline = call_deadline_ms / 1000
        self._carrier = carrier
        self._peers: dict[tuple[str, int], _Peer] = {}
        self._doubted: set[tuple[str, int]] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def to(self, service: str, shard: int) -> grpc.aio.Channel:
        """The channel to one process, for the generated stubs.

        Cheap enough to ask for before every call; do not keep it for longer than one.

        Raises:
            Unavailable: No such process has announced itself (reason PEER_UNKNOWN).
            StoreUnavailable: The topology was never read and cannot be.
        """
        known = self._peers.get((service, shard))
        # While the peer answers, no call waits for the store; else it may just have moved.
        is_doubted = (service, shard) in self._doubted
        is_down = known is None or known.channel.get_state() in _DOWN
        topology = None if is_doubted or is_down else self._directory.last()
        if topology is None:
            topology = await self._directory.read_soon(RESOLVE_AGAIN_MS)
            self._doubted.discard((service, shard))
        address = topology.address(service, shard)
        if address is None:
            raise Unavailable(
                f"no {service} {shard} has announced itself",
                reason="PEER_UNKNOWN",
                retry_after_ms=limits.RECONNECT_BACKOFF_MS_MAX,
            )
        # Another caller may have been here while this one read.
        known = self._peers.get((service, shard))
        version = 0 if self._tls is None else self._tls.version
        if known is None or known.address != address or known.tls_version != version:
            former = [] if known is None else [known.channel, *known.former]
            has_moved = known is not None and known.address != address
            # Without calls, gRPC lets go of a connection after half an hour.
            ending = [one for one in former if has_moved or one.get_state() in _DOWN]
            for one in ending:
                self._end(one)
            channel = open_channel(address, self._options, self._deadline, self._carrier, self._tls)
            lasting = [one for one in former if one not in ending]
            known = _Peer(address, channel, version, lasting)
            self._peers[service, shard] = known
        return known.channel

    async def find_again(self) -> None:
        """Let calls that begin from now on go to the present owners. Raises StoreUnavailable."""
        await self._directory.read_now()

    def _end(self, channel: grpc.aio.Channel) -> None:
        closing = asyncio.create_task(_close(channel))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def is_removed(self, service: str, shard: int) -> bool:
        """Whether a shard was removed for ever; costs nothing while the topology has it.

        Raises StoreUnavailable.
        """
        topology = self._directory.last()
        if topology is None or topology.peer(service, shard) is not None:
            return False
        return await self._directory.is_removed(service, shard)

    async def is_given_up(self, service: str, shard: int) -> bool:
        """Whether a shard is gone with what it had; costs and raises as `is_removed`."""
        return await self.is_removed(service, shard) and await self._directory.is_given_up(
            service, shard
        )

    def doubt(self, service: str, shard: int) -> None:
        """A call failed, though perhaps not the connection: the next `to` reads where the peer is.

        A process that was replaced may stand still with its connections open, or answer that it
        has nothing.
        """
        self._doubted.add((service, shard))

    async def close(self) -> None:
        """Close all channels; calls on them end with CANCELLED."""
        peers, self._peers = list(self._peers.values()), {}
        for closing in self._closing:
            closing.cancel()
        channels = [one for peer in peers for one in (peer.channel, *peer.former)]
        await asyncio.gather(*(channel.close() for channel in channels))
        await asyncio.gather(*self._closing, return_exceptions=True)


def inherited() -> CallMetadata | None:
    """Gives the trace context that this process was started in as metadata of its calls.

    It is in the environment, which processes that this one starts have, too: Spark's workers. None
    where there is none.
    """
    found = [(name.lower(), os.environ.get(name, "")) for name in TRACE_VARIABLES]
    context = tuple((name, value) for name, value in found if value)
    return (lambda: context) if context else None


class Connection:
    """One peer: its channel for each call, and doubts about its address."""

    def __init__(self, channels: Channels, service: str, shard: int) -> None:
        self._channels = channels
        self._service = service
        self._shard = shard

    async def __call__(self) -> grpc.aio.Channel:
        return await self._channels.to(self._service, self._shard)

    def doubt(self) -> None:
        self._channels.doubt(self._service, self._shard)


def open_channel(
    address: str,
    options: Sequence[tuple[str, int]] | None = None,
    deadline_seconds: float = limits.CALL_DEADLINE_MS / 1000,
    carrier: CallMetadata | None = None,
    tls: ChannelTls | None = None,
) -> grpc.aio.Channel:
    """A channel to `host:port` whose unary calls have a deadline, stated or not.

    `carrier` returns metadata that every call has.
    """
    options = options or limits.channel_options()
    channel = channel_to(address, options, tls)
    if carrier is not None:
        channel = channel_with(carrier, channel)
    return cast("grpc.aio.Channel", _Channel(channel, deadline_seconds))


async def _close(channel: grpc.aio.Channel) -> None:
    try:
        await channel.close(CLOSE_GRACE_SECONDS)
    except asyncio.CancelledError:
        await channel.close()


class _Channel:
    """A channel that adds a deadline to unary calls.

    Not a client interceptor, which would put a task of its own around every call.
    """

    def __init__(self, channel: grpc.aio.Channel, deadline_seconds: float) -> None:
        self._channel = channel
        self._deadline = deadline_seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> _Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        call: Any = self._channel.unary_unary(*args, **kwargs)
        deadline = self._deadline

        def with_deadline(request: Any, *, timeout: float | None = None, **rest: Any) -> Any:
            return call(request, timeout=deadline if timeout is None else timeout, **rest)

        return with_deadline
