"""After a message was replaced: no broker hands out what it holds of it from before."""

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
"""A broker that has not answered by then counts as away."""


class Forgetting:
    """Tells the other brokers."""

    def __init__(self, channels: Channels, directory: TopologyDirectory, shard: int) -> None:
        """Tell all but this broker shard."""
        self._channels = channels
        self._directory = directory
        self._shard = shard

    async def elsewhere(self, message_id: int) -> None:
        """Every other broker forgets what it holds of a message.

        Raises Unavailable when one cannot be told: it may be away from here alone.
        """
        try:
            # Not what was known a while ago: who came since may hold the message, too.
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
                f"message {message_id} is replaced, but broker {shard} may hold what it was, "
                f"and is away: {failed}",
                reason="BROKER_AWAY",
            ) from failed
