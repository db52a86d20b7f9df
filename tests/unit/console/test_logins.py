"""Logins: how many are checked, and how many wait for it."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest

from services.console import clients as logins
from services.console.clients import LOGINS_MAX, LOGINS_WAITING_MAX, Clients
from services.console.config import ConsoleConfig
from slatemq.errors import ResourceExhausted, SlateMQError


async def test_a_login_behind_too_many_is_refused_at_once_and_one_that_waits_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given an instance that takes connections and does not answer
    silent = socket.create_server(("127.0.0.1", 0))
    clients = Clients(ConsoleConfig(endpoint=f"127.0.0.1:{silent.getsockname()[1]}"))

    async def log_in() -> None:
        with suppress(SlateMQError):
            await clients.check("smq_wrong")

    working = [asyncio.create_task(log_in()) for _ in range(LOGINS_MAX)]
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(log_in()) for _ in range(LOGINS_WAITING_MAX)]
    await asyncio.sleep(0)

    # When as many wait as may, then one more is refused
    with pytest.raises(ResourceExhausted) as caught:
        await clients.check("smq_right")
    assert caught.value.reason == "TOO_MANY_LOGINS"

    # And where one waits too long, although none before it has its answer
    waiting.pop().cancel()
    await asyncio.sleep(0)
    monkeypatch.setattr(logins, "LOGIN_WAIT_S", 0.0)
    with pytest.raises(ResourceExhausted):
        await clients.check("smq_right")

    for task in (*working, *waiting):
        task.cancel()
    await asyncio.gather(*working, *waiting, return_exceptions=True)
    await clients.close()
    silent.close()
