"""Whether a server answers now: asked before it gets what cannot be sent elsewhere afterwards."""

from __future__ import annotations

import time
from typing import Any, Final

import grpc
import grpc.aio

from slatemq._rpc.peers import NOT_CONNECTED, connected
from slatemq.errors import Unavailable

__all__ = ["Liveness"]

FRESH_S: Final = 0.5
"""A server that answered within this time is not asked again."""

PROBE_S: Final = 2.0
"""How long a server has to answer a probe. A live one that is slower loses a request to another
server, and nothing else."""

_HEALTH: Final = "/grpc.health.v1.Health/Check"
_NO_ANSWER: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class Liveness:
    """When one server last answered.

    A frozen process keeps its connections open, and the kernel takes what is written to them. A
    request written there may be stored once the process goes on, so no other server may get it.
    """

    def __init__(self) -> None:
        """Not heard of yet."""
        self._answered_s = float("-inf")

    @property
    def is_fresh(self) -> bool:
        """Whether it answered within `FRESH_S`."""
        return time.monotonic() - self._answered_s < FRESH_S

    def answered(self) -> None:
        """An answer came."""
        self._answered_s = time.monotonic()

    async def prove(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        """Waits for a connection, and for the answer to a probe unless one came just now.

        Raises Unavailable (NOT_CONNECTED) where none comes in time.
        """
        await connected(channel, timeout_s)
        if self.is_fresh:
            return
        waited_s = min(timeout_s, PROBE_S)
        probe: Any = channel.unary_unary(_HEALTH)
        try:
            await probe(b"", timeout=waited_s)
        except grpc.RpcError as error:
            call: Any = error
            if call.code() in _NO_ANSWER:
                raise Unavailable(
                    f"the server did not answer a probe within {waited_s:.1f} s",
                    reason=NOT_CONNECTED,
                ) from None
        self.answered()
