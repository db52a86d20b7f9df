"""Cancellations that client libraries lose."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from libs.events.cancellations import keeping_cancellations
from slatemq.errors import Unavailable


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
