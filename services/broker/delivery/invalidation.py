"""After a message was replaced: no broker delivers what it cached of it before."""

from __future__ import annotations

import asyncio
from typing import Final

from libs.serving.peers.calls import PeerFailed, peer_failures
from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.storage.errors import StorageError
from slatemq.errors import Unavailable
from slatemq.v1.entry_pb2 import ForgetMessageRequest
from slatemq.v1.entry_pb2_grpc import DelayedServiceStub

INVALIDATE_DEADLINE_S: Final = 5.0
"""A broker that has not answered by then counts as down."""


class Invalidator:
    """Has the other brokers drop what they cached of a message."""

    def __init__(self, channels: Channels, directory: TopologyDirectory, shard: int) -> None:
        self._channels = channels
        self._directory = directory
        self._shard = shard

    async def invalidate(self, message_id: int) -> None:
        """Calls every other broker; raises Unavailable where one does not answer."""
        try:
            # The latest topology: a broker that started since may have cached the message.
            brokers = (await self._directory.read(max_age_ms=0)).brokers
        except StorageError as error:
            raise Unavailable(f"the topology cannot be read: {error}") from error
        others = [shard for shard in brokers if shard != self._shard]
        await asyncio.gather(*(self._invalidate_at(shard, message_id) for shard in others))

    async def _invalidate_at(self, shard: int, message_id: int) -> None:
        request = ForgetMessageRequest(message_id=message_id)
        try:
            with peer_failures():
                stub = DelayedServiceStub(await self._channels.to("broker", shard))
                await stub.ForgetMessage(request, timeout=INVALIDATE_DEADLINE_S)
        except PeerFailed as failed:
            raise Unavailable(
                f"message {message_id} is replaced, but broker {shard} may deliver what it was, "
                f"and does not answer, retry: {failed}",
                reason="BROKER_AWAY",
            ) from failed
