"""A backend of events in this process: its server outlives it, and is down when a test wants so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from libs.events.backend import BackendStats
from libs.events.settings import QueueSettings
from slatemq.errors import Unavailable
from slatemq.events.envelope import Event

EVENTUALLY_S = 30


class EventServer:
    """Has what was published, by whichever process.

    Attributes:
        events: All of them, in order, those that came again too.
        up: Whether it answers.
        gate: Closed, a publish is stored and not answered.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.up = True
        self.gate = asyncio.Event()
        self.gate.set()

    def use(self, monkeypatch: pytest.MonkeyPatch) -> QueueSettings:
        """Settings with which processes begun from now on publish to it."""
        monkeypatch.setattr("libs.serving.events.relay.open_backend", lambda *_: EventBackend(self))
        return QueueSettings(enabled=True, backend="redis")

    def received(self, *names: str) -> list[tuple[Any, ...]]:
        """The type and these members of each event that came for the first time."""
        first: dict[str, Event] = {}
        for event in self.events:
            first.setdefault(event.id, event)
        return [(one.type, *(one.data.get(name) for name in names)) for one in first.values()]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(EVENTUALLY_S):
            while not condition():
                await asyncio.sleep(0.005)

    async def has(self, count: int) -> None:
        """Wait until this many different events have come."""
        try:
            await self.until(lambda: len({event.id for event in self.events}) >= count)
        except TimeoutError:
            raise AssertionError(f"{count} events wanted: {self.received('queue')}") from None


class EventBackend:
    """One process's connection. See libs.events.backend.QueueBackend."""

    refusal = ""

    def __init__(self, server: EventServer) -> None:
        self._server = server

    async def connect(self, config: Any) -> None:
        self._check()

    async def close(self) -> None:
        """Nothing is open."""

    async def health_check(self) -> bool:
        return self._server.up

    async def stats(self) -> BackendStats:
        self._check()
        return BackendStats(0, 0)

    async def publish_batch(self, events: Sequence[Event]) -> None:
        self._check()
        self._server.events += events
        await self._server.gate.wait()

    def _check(self) -> None:
        if not self._server.up:
            raise Unavailable("the backend is down")
