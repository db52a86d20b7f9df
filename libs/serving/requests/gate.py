"""Whether calls are let in."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import TracebackType

from libs.serving.process.ownership import Standstill
from slatemq import errors


class Gate:
    """Admits calls, but not before the service has started, nor once it drains.

    A context manager around each call: entering it counts the call or raises why not.

    Attributes:
        calls_count: Calls in flight.
        standstill: Holds calls back after a standstill, where the process owns a shard.
    """

    def __init__(self, calls_max: int) -> None:
        self.calls_count = 0
        self.standstill: Standstill | None = None
        self._calls_max = calls_max
        self._closed: tuple[str, str] | None = ("STARTING", "the service is starting")
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self) -> None:
        self._closed = None

    def close(self, reason: str, message: str) -> None:
        """Refuse new calls with UNAVAILABLE and this reason; calls in flight go on."""
        self._closed = (reason, message)

    async def idle(self) -> None:
        await self._idle.wait()

    def proof(self) -> asyncio.Future[None] | None:
        return None if self.standstill is None else self.standstill.proof()

    def __enter__(self) -> None:
        if self._closed is not None:
            reason, message = self._closed
            raise errors.Unavailable(message, reason=reason)
        if self.calls_count >= self._calls_max:
            raise errors.ResourceExhausted(
                f"{self._calls_max} calls are in flight", reason="TOO_MANY_CALLS"
            )
        self.calls_count += 1
        self._idle.clear()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.calls_count -= 1
        if not self.calls_count:
            self._idle.set()


class OpenGate(nullcontext[None]):
    """Admits every call, in every state."""

    def proof(self) -> None:
        """None."""


Entrance = Gate | OpenGate
"""What admits calls to their handlers."""
