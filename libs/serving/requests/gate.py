"""Whether calls are let in."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from libs.access.principals import PLACE_RETRY_MS
from libs.serving.process.ownership import Standstill
from libs.serving.requests.shares import Shares
from slatemq import errors

if TYPE_CHECKING:
    from libs.access.quotas import PrincipalQuota


class Gate:
    """Admits calls, but not before the service has started, nor once it drains.

    Attributes:
        calls: The places of calls in flight.
        standstill: Holds calls back after a standstill, where the process owns a shard.
    """

    def __init__(self, calls_max: int) -> None:
        self.calls = Shares(
            "concurrent_calls_max",
            calls_max,
            "calls in flight",
            ("TOO_MANY_CALLS", f"{calls_max} calls are in flight"),
            for_services=True,
        )
        self.standstill: Standstill | None = None
        self._closed: tuple[str, str] | None = ("STARTING", "the service is starting")

    def open(self) -> None:
        self._closed = None

    def close(self, reason: str, message: str) -> None:
        """Refuse new calls with UNAVAILABLE and this reason; calls in flight go on.

        Clients take the reason as a proof that nothing was done (`NOT_TAKEN` of `_rpc.peers`), so
        use none that calls in flight may end with.
        """
        self._closed = (reason, message)

    def proof(self) -> asyncio.Future[None] | None:
        return None if self.standstill is None else self.standstill.proof()

    def check(self) -> None:
        """Raise why no call is let in now."""
        self._check_open()
        self.calls.check()

    def place(self, quota: PrincipalQuota | None) -> AbstractContextManager[None]:
        """Let in a call of a principal until the end of the context, or raise why not."""
        self._check_open()
        return self.calls.place(quota)

    def _check_open(self) -> None:
        if self._closed is not None:
            reason, message = self._closed
            raise errors.Unavailable(message, reason=reason)


class NewestGate:
    """Admits every stream, in every state of the service; one too many ends the oldest."""

    def __init__(self, streams_max: int) -> None:
        self._streams_max = streams_max
        self._streams: dict[asyncio.Task[Any], None] = {}
        self._ended = WeakSet[asyncio.Task[Any]]()

    def proof(self) -> None:
        """None."""

    def check(self) -> None:
        """Let in every call."""

    def place(self, _: PrincipalQuota | None) -> AbstractContextManager[None]:
        return self

    def __enter__(self) -> None:
        stream = asyncio.current_task()
        assert stream is not None, "each call has a task of its own"
        if len(self._streams) >= self._streams_max:
            oldest = next(iter(self._streams))
            del self._streams[oldest]
            self._ended.add(oldest)
            oldest.cancel()
        self._streams[stream] = None
        # Where the stream ends while it does not run, it is left later, and by another task.
        stream.add_done_callback(self._leave)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        stream = asyncio.current_task()
        if stream is None:
            return
        self._leave(stream)
        if stream in self._ended and isinstance(error, asyncio.CancelledError):
            self._ended.discard(stream)
            stream.uncancel()
            raise errors.ResourceExhausted(
                f"{self._streams_max} newer streams are open",
                reason="TOO_MANY_CALLS",
                retry_after_ms=PLACE_RETRY_MS,
            ) from None

    def _leave(self, stream: asyncio.Task[Any]) -> None:
        self._streams.pop(stream, None)


class OpenGate(nullcontext[None]):
    """Admits every call, in every state."""

    def proof(self) -> None:
        """None."""

    def check(self) -> None:
        """Let in every call."""

    def place(self, _: PrincipalQuota | None) -> AbstractContextManager[None]:
        return self


Entrance = Gate | NewestGate | OpenGate
"""What admits calls to their handlers."""
