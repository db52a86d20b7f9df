"""Channels whose calls carry the current trace context in their metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import grpc
import grpc.aio

Carried = Callable[[], Sequence[tuple[str, str]]]
"""The metadata of a call that begins now; empty where there is no context."""


_MAKERS = frozenset({"unary_unary", "unary_stream", "stream_unary", "stream_stream"})
"""The methods of a channel that make calls."""


def traced_channel(channel: grpc.aio.Channel, carried: Carried) -> grpc.aio.Channel:
    """The same channel for stubs, which adds `carried()` to the metadata of every call."""
    return cast("grpc.aio.Channel", _TracedChannel(channel, carried))


class _TracedChannel:
    """A channel, whose calls are traced.

    gRPC's interceptors could do so, at several times the cost of a call.
    """

    def __init__(self, channel: grpc.aio.Channel, carried: Carried) -> None:
        self._channel = channel
        self._carried = carried

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        if name not in _MAKERS:
            return found

        def make(*args: Any, **kwargs: Any) -> Any:
            return self._traced(found(*args, **kwargs))

        return make

    def _traced(self, call: Any) -> Any:
        carried = self._carried

        def traced(*args: Any, **kwargs: Any) -> Any:
            if context := carried():
                kwargs["metadata"] = (*(kwargs.get("metadata") or ()), *context)
            return call(*args, **kwargs)

        return traced
