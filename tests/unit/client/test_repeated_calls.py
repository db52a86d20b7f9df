"""Which error a call raises that was tried until its time was over."""

from __future__ import annotations

import asyncio
import time

import pytest

from slatemq._rpc.peers import NOT_CONNECTED, Peers
from slatemq.errors import DeadlineExceeded, SlateMQError, Unavailable

pytestmark = pytest.mark.asyncio

DOWN = Unavailable("broker 0 is down", reason="BROKER_DOWN")


async def error_of(first: SlateMQError, cut_short: SlateMQError) -> SlateMQError:
    """What a call raises whose tries fail with `first`, and the last, at its end, otherwise."""
    ends = time.monotonic() + 0.3

    async def attempt(timeout: float) -> None:
        if time.monotonic() + 0.15 < ends:
            raise first
        await asyncio.sleep(timeout)
        raise cut_short

    with pytest.raises(SlateMQError) as raised:
        await Peers(["127.0.0.1:1"]).call(attempt, call_s=0.3)
    return raised.value


async def test_a_last_try_that_ran_out_of_time_does_not_hide_why_those_before_it_failed() -> None:
    assert await error_of(DOWN, DeadlineExceeded("Stream removed")) is DOWN


async def test_an_error_of_the_last_try_that_says_more_is_raised() -> None:
    assert (await error_of(DOWN, Unavailable("full", reason="DISK_FULL"))).reason == "DISK_FULL"


async def test_a_call_that_may_have_taken_effect_is_not_said_to_have_not_been_sent() -> None:
    unsent = Unavailable("refused", reason=NOT_CONNECTED)
    assert isinstance(await error_of(unsent, DeadlineExceeded("late")), DeadlineExceeded)
