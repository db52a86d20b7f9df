"""Which error a call raises that was tried until its time was over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from slatemq import Push
from slatemq._consume.commands import execute
from slatemq._rpc import peers
from slatemq._rpc.peers import NOT_CONNECTED, Peers
from slatemq.errors import DeadlineExceeded, SlateMQError, Unavailable
from tests.manual_clock import ManualSeconds

pytestmark = pytest.mark.asyncio

DOWN = Unavailable("broker 0 is down", reason="BROKER_DOWN")
UNSENT = Unavailable("refused", reason=NOT_CONNECTED)


class Slept(ManualSeconds):
    """A clock that moves by pauses alone, and by each as much more as it takes too long."""

    late_s = 0.0

    async def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s + self.late_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Slept:
    clock = Slept()
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(peers, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": clock.sleep}))
    return clock


async def test_pushes_alone_are_repeated_on_the_broker_that_may_have_run_them() -> None:
    asked = list[int]()
    homes = iter([0, 1])

    async def shard_of(queue_id: str) -> int:
        return next(homes)

    async def broker(shard: int) -> None:
        asked.append(shard)
        raise DOWN

    async def call(attempt: Callable[[float], Awaitable[object]]) -> None:
        for _ in range(2):
            with pytest.raises(Unavailable):
                await attempt(1.0)

    locations: Any = SimpleNamespace(
        shard_of=shard_of, peers=SimpleNamespace(broker=broker, call=call)
    )
    await execute(locations, [Push("q", b"x")])

    assert asked == [0, 0]


async def test_an_attempt_that_is_over_before_its_time_is_repeated(clock: Slept) -> None:
    # As of partitions whose brokers start: one says so, and the next is not waited for for long.
    errors = iter([DOWN, DeadlineExceeded("no answer yet"), DeadlineExceeded("no answer yet")])

    async def attempt(_: float) -> str:
        await clock.sleep(0.01)
        if (error := next(errors, None)) is not None:
            raise error
        return "there"

    calls = Peers(["127.0.0.1:1"])
    assert await calls.call(attempt, call_s=30.0, attempt_s=30.0) == "there"


async def error_of(clock: Slept, first: SlateMQError, last: SlateMQError) -> SlateMQError:
    """What a call raises whose first try fails at once, and whose second takes the time left."""
    errors = iter([first])

    async def attempt(timeout: float) -> None:
        if (error := next(errors, None)) is not None:
            raise error
        await clock.sleep(timeout)
        raise last

    with pytest.raises(SlateMQError) as raised:
        await Peers(["127.0.0.1:1"]).call(attempt, call_s=0.5)
    return raised.value


async def test_a_last_try_that_ran_out_of_time_does_not_hide_why_those_before_it_failed(
    clock: Slept,
) -> None:
    assert await error_of(clock, DOWN, DeadlineExceeded("Stream removed")) is DOWN


async def test_an_error_of_the_last_try_that_says_more_is_raised(clock: Slept) -> None:
    full = Unavailable("full", reason="DISK_FULL")
    assert await error_of(clock, DOWN, full) is full


async def test_a_call_that_may_have_taken_effect_is_not_said_to_have_not_been_sent(
    clock: Slept,
) -> None:
    late = DeadlineExceeded("late")
    assert await error_of(clock, UNSENT, late) is late


@pytest.mark.parametrize(("late_s", "tries"), [(0.0, 3), (0.1, 2)])
async def test_no_try_begins_that_could_only_run_out_of_time(
    clock: Slept, monkeypatch: pytest.MonkeyPatch, late_s: float, tries: int
) -> None:
    # Given a pause after which a tenth of a second would be left for a fourth try, or a third one
    clock.late_s = late_s
    monkeypatch.setattr(peers, "pause_s", lambda *_: 0.3)
    timeouts_s: list[float] = []

    async def attempt(timeout: float) -> None:
        timeouts_s.append(timeout)
        raise UNSENT

    with pytest.raises(Unavailable):
        await Peers(["127.0.0.1:1"]).call(attempt, call_s=1.0)
    assert len(timeouts_s) == tries
    assert min(timeouts_s) >= peers.LAST_TRY_S


async def test_a_call_whose_server_may_wait_is_tried_again_though_a_pause_took_too_long(
    clock: Slept, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a pause after which the time for a call without a wait is over
    clock.late_s = 1.0
    monkeypatch.setattr(peers, "pause_s", lambda *_: 0.3)
    errors = iter([DOWN])

    async def attempt(timeout: float) -> str:
        if (error := next(errors, None)) is not None:
            raise error
        return "answered"

    assert await Peers(["127.0.0.1:1"]).call(attempt, call_s=1.0, wait_s=4.0) == "answered"
