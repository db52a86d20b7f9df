"""The clients of persons: none is closed while anyone waits for its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.metrics import NoOpMeter
from starlette.requests import Request

from services.console import live
from services.console.clients import CLIENTS_MAX, Clients
from services.console.config import ConsoleConfig
from services.console.live import Watch, Watches
from services.console.rendering import client_of
from services.console.sessions import Session
from slatemq import Caller, Client
from slatemq._admin.instance import Status
from slatemq.errors import ResourceExhausted, Unavailable

DURATIONS = NoOpMeter("console").create_histogram("durations")

WAIT_S = 60.0


class Answering:
    """A client of an instance that answers, until it is closed."""

    def __init__(self) -> None:
        self.is_closed = False

    async def get_callers(self) -> dict[int, Caller]:
        await asyncio.sleep(0)
        if self.is_closed:
            raise Unavailable("this client is closed", reason="CLIENT_CLOSED")
        return {0: Caller("someone", ["inspect"], ("*",))}

    async def status(self, **_: object) -> Status:
        await self.get_callers()
        return Status([], [], [], [])

    async def close(self) -> None:
        self.is_closed = True


class AnsweringClients(Clients):
    """Those of that instance; `made` has all of them."""

    def __init__(self) -> None:
        super().__init__(ConsoleConfig())
        self.made: list[Answering] = []

    def _made(self, token: str) -> Client:
        self.made.append(Answering())
        one: Any = self.made[-1]
        return one  # type: ignore[no-any-return]


@asynccontextmanager
async def request_of(clients: Clients, token: str) -> AsyncIterator[Request]:
    """A request until its answer is sent."""
    app = SimpleNamespace(state=SimpleNamespace(console=SimpleNamespace(clients=clients)))
    async with AsyncExitStack() as place:
        yield Request(
            {"type": "http", "app": app, "state": {"session": Session(token), "place": place}}
        )


async def test_of_more_persons_than_may_be_those_who_look_go_on_and_others_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "SAMPLE_S", 0.0)
    monkeypatch.setattr(live, "SAMPLE_SHARE", 0)
    clients = AnsweringClients()
    watches = Watches(clients, DURATIONS)
    try:
        async with asyncio.timeout(WAIT_S):
            opened = await asyncio.gather(
                *(watches.of(f"smq_{number}") for number in range(80)), return_exceptions=True
            )
            looking = [one for one in opened if isinstance(one, Watch)]
            refused = [one for one in opened if isinstance(one, ResourceExhausted)]
            for _ in range(3):
                await asyncio.gather(*(watch.next_sample() for watch in looking))
    finally:
        await watches.close()

    assert (len(looking), len(refused)) == (CLIENTS_MAX, 80 - CLIENTS_MAX)
    assert str(CLIENTS_MAX) in refused[0].message
    assert len(clients.made) == CLIENTS_MAX
    assert not any(one.is_closed for one in clients.made)
    await clients.close()


async def test_who_has_left_makes_room_for_who_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SAMPLE_S", 0.0)
    monkeypatch.setattr(live, "SAMPLE_SHARE", 0)
    clients = AnsweringClients()
    watches = Watches(clients, DURATIONS)
    try:
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(watches.of(f"smq_{number}") for number in range(CLIENTS_MAX)))
            monkeypatch.setattr(live, "IDLE_S", 0.0)
            while watches.viewers_count:
                await asyncio.sleep(0)
            await watches.of("smq_new")
    finally:
        await watches.close()

    assert [one.is_closed for one in clients.made] == [True] + [False] * CLIENTS_MAX
    await clients.close()


async def test_a_client_is_kept_until_the_answer_to_its_request_is_sent() -> None:
    clients = AnsweringClients()
    async with request_of(clients, "smq_first") as request:
        client = await client_of(request)
        for number in range(CLIENTS_MAX + 1):
            async with request_of(clients, f"smq_{number}") as other:
                await client_of(other)

        assert await client.get_callers()
    assert not clients.made[0].is_closed
    assert clients.made[1].is_closed
    await clients.close()
