"""Cancellations that client libraries lose, and those that they make up."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from importlib import import_module

import pytest

from libs.events.cancellations import keeping_cancellations
from slatemq.errors import Unavailable

TRANSLATING = (
    *("activemq.connection", "kafka.connection", "rabbitmq.connection", "redis.connection"),
    "slatemq.queues",
)
"""The modules of libs.events that turn the errors of a client library into ours."""


async def test_a_cancellation_that_a_call_swallows_is_raised_after_it() -> None:
    async def call(outcome: Exception | None) -> None:
        with keeping_cancellations():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3_600)
            if outcome is not None:
                raise outcome

    for outcome in (None, Unavailable("lost", reason="BACKEND_DOWN")):
        calling = asyncio.create_task(call(outcome))
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling


async def test_a_task_that_was_cancelled_before_may_still_call() -> None:
    async def clean_up() -> str:
        try:
            await asyncio.sleep(3_600)
        except asyncio.CancelledError:
            with keeping_cancellations():
                await asyncio.sleep(0)
            return "cleaned up"
        return "not cancelled"

    cleaning = asyncio.create_task(clean_up())
    await asyncio.sleep(0)
    cleaning.cancel()
    assert await cleaning == "cleaned up"


@pytest.mark.parametrize("module", TRANSLATING)
async def test_a_cancellation_that_is_not_of_the_task_is_a_backend_that_is_down(
    module: str,
) -> None:
    # Given a call that the client library ends with CancelledError, as aiormq does
    if module.startswith("activemq"):
        pytest.importorskip("proton", reason="requirements/activemq.txt is not installed")
    translated = import_module(f"libs.events.{module}").translated
    confirm: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    confirm.set_exception(asyncio.CancelledError())

    # Then it is an error that callers wait out, also within a timeout
    async def call() -> None:
        async with asyncio.timeout(3_600):
            with translated():
                await confirm

    with pytest.raises(Unavailable):
        await call()


async def test_a_timeout_around_a_call_stays_one() -> None:
    async def call() -> None:
        async with asyncio.timeout(0):
            with keeping_cancellations():
                await asyncio.sleep(3_600)

    with pytest.raises(TimeoutError):
        await call()
