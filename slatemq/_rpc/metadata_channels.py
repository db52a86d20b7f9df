"""Channels whose calls carry metadata: the trace context, and the caller's token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import grpc
import grpc.aio

CallMetadata = Callable[[], Sequence[tuple[str, str]]]
"""The metadata of a call that begins now; may be empty."""

_MAKERS = frozenset({"unary_unary", "unary_stream", "stream_unary", "stream_stream"})
"""What makes the callables of methods."""


def channel_with(metadata: CallMetadata, channel: grpc.aio.Channel) -> grpc.aio.Channel:
    """The channel for stubs, which adds `metadata()` to every call."""
    return cast("grpc.aio.Channel", _MetadataChannel(channel, metadata))


class _MetadataChannel:
    """A channel whose calls carry metadata.

    gRPC's interceptors could do so, at several times the cost of a call.
    """

    def __init__(self, channel: grpc.aio.Channel, metadata: CallMetadata) -> None:
        self._channel = channel
        self._metadata = metadata

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._channel, name)
        if name not in _MAKERS:
            return found

        def make(*args: Any, **kwargs: Any) -> Any:
            return self._adding(found(*args, **kwargs))

        return make

    def _adding(self, call: Any) -> Any:
        metadata = self._metadata

        def with_metadata(*args: Any, **kwargs: Any) -> Any:
            if added := metadata():
                kwargs["metadata"] = (*(kwargs.get("metadata") or ()), *added)
            return call(*args, **kwargs)

        return with_metadata
