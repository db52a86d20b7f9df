"""Channels whose calls carry the current trace context in their metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import grpc
import grpc.aio

__all__ = ["Carried", "traced_channel"]

Carried = Callable[[], Sequence[tuple[str, str]]]
"""The metadata of a call that begins now; empty where there is no context."""


def traced_channel(channel: grpc.aio.Channel, carried: Carried) -> grpc.aio.Channel:
    """The same channel for stubs, which adds `carried()` to the metadata of every call."""
    return cast("grpc.aio.Channel", _TracedChannel(channel, carried))


class _TracedChannel:
    """What stubs and clients use of a channel.

    gRPC's interceptors could do so, at several times the cost of a call.
    """

    def __init__(self, channel: grpc.aio.Channel, carried: Carried) -> None:
        self._channel = channel
        self._carried = carried

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._traced(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._traced(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._traced(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._traced(self._channel.stream_stream(*args, **kwargs))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last)

    async def close(self) -> None:
        await self._channel.close()

    def _traced(self, call: Any) -> Any:
        carried = self._carried

        def traced(*args: Any, **kwargs: Any) -> Any:
            if context := carried():
                kwargs["metadata"] = (*(kwargs.get("metadata") or ()), *context)
            return call(*args, **kwargs)

        return traced
