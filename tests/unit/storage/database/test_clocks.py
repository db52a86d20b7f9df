from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.storage.database.clocks import LAST_MS, STEP_HOLD_S, HybridClock, wait_until_past
from libs.storage.errors import ClockOutOfRange


class _Hands:
    """A wall clock and a monotonic one, both set by the test (seconds)."""

    def __init__(self, wall: float = 1000.0) -> None:
        self.wall = wall
        self.monotonic = 5.0

    def clock(self, last_ms: int = 0) -> HybridClock:
        return HybridClock(last_ms, lambda: self.wall, lambda: self.monotonic)


def test_it_follows_the_wall_clock() -> None:
    hands = _Hands(wall=1000.0)
    clock = hands.clock()
    assert clock.now_ms() == 1_000_000
    hands.wall += 0.5
    assert clock.now_ms() == 1_000_500


def test_a_process_that_stands_still_between_two_readings_is_not_ahead_afterwards() -> None:
    hands, passed = _Hands(wall=1000.0), [0.0]

    def read_and_stand_still(name: str) -> float:
        """What a clock shows, and 40 ms pass before the caller goes on."""
        shown: float = getattr(hands, name)
        hands.wall += passed[0]
        hands.monotonic += passed[0]
        return shown

    clock = HybridClock(
        0, lambda: read_and_stand_still("wall"), lambda: read_and_stand_still("monotonic")
    )
    passed[0] = 0.04
    for _ in range(3):
        clock.now_ms()
    passed[0] = 0.0

    assert clock.now_ms() <= hands.wall * 1000 + 1


def test_a_wall_clock_that_jumps_back_is_bridged_by_the_monotonic_one() -> None:
    hands = _Hands(wall=1000.0)
    clock = hands.clock()
    assert clock.now_ms() == 1_000_000
    hands.wall -= 600
    hands.monotonic += 0.25
    assert clock.now_ms() == 1_000_250


def test_it_goes_on_from_the_last_value_of_the_process_before() -> None:
    hands = _Hands(wall=1000.0)
    clock = hands.clock(last_ms=1_050_000)
    assert clock.now_ms() == 1_050_000
    hands.monotonic += 1
    assert clock.now_ms() == 1_051_000


@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(0, 100)), max_size=50))
def test_it_never_goes_back_and_never_stands_still(steps: list[tuple[float, float]]) -> None:
    hands = _Hands(wall=10_000.0)
    clock = hands.clock()
    last = clock.now_ms()
    for wall_step, passed in steps:
        hands.wall += wall_step
        hands.monotonic += passed
        now = clock.now_ms()
        assert now >= last + int(passed * 1000) - 1
        assert now <= max(last + passed * 1000, hands.wall * 1000) + 1
        last = now
    hands.monotonic += STEP_HOLD_S
    clock.now_ms()
    hands.monotonic += STEP_HOLD_S
    assert clock.now_ms() >= int(hands.wall * 1000)


def test_a_step_of_the_wall_clock_that_is_taken_back_soon_is_not_followed() -> None:
    hands = _Hands(wall=1000.0)
    clock = hands.clock()
    hands.wall += 120
    for second in range(int(STEP_HOLD_S)):
        assert clock.now_ms() == 1_000_000 + 1000 * second
        hands.wall += 1
        hands.monotonic += 1

    hands.wall -= 120

    assert clock.now_ms() == 1_000_000 + 1000 * int(STEP_HOLD_S)
    assert clock.stepped_ms == 0


def test_a_step_of_the_wall_clock_that_lasts_is_followed_and_reported() -> None:
    hands = _Hands(wall=1000.0)
    clock = hands.clock()
    hands.wall += 120
    assert clock.now_ms() == 1_000_000
    hands.wall += STEP_HOLD_S
    hands.monotonic += STEP_HOLD_S

    assert clock.now_ms() == 1_120_000 + 1000 * STEP_HOLD_S
    assert clock.stepped_ms == 120_000


def test_each_step_lasts_for_itself() -> None:
    hands = _Hands(wall=1000.0)
    clock = hands.clock()
    for _ in range(5):
        hands.wall += 60
        clock.now_ms()
        hands.wall -= 60
        hands.monotonic += STEP_HOLD_S / 2
        hands.wall += STEP_HOLD_S / 2
        assert clock.now_ms() == int(hands.wall * 1000)
    assert clock.stepped_ms == 0


async def test_waiting_ends_once_the_wall_clock_is_past_the_last_tick() -> None:
    hands = _Hands(wall=1000.0)
    behind: list[int] = []
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        hands.wall += seconds

    await wait_until_past(1_002_500, behind.append, lambda: hands.wall, sleep)

    assert behind == [2500, 1500, 500]
    assert slept == [1.0, 1.0, 0.501]
    assert hands.wall * 1000 > 1_002_500


async def test_a_clock_that_is_ahead_of_the_last_tick_waits_for_nothing() -> None:
    async def sleep(seconds: float) -> None:
        raise AssertionError("must not sleep")

    await wait_until_past(999_999, lambda _: None, lambda: 1000.0, sleep)


def test_a_clock_beyond_the_last_time_is_refused_at_the_start() -> None:
    with pytest.raises(ClockOutOfRange, match=str(LAST_MS)):
        _Hands(wall=LAST_MS / 1000 + 1).clock()
    with pytest.raises(ClockOutOfRange):
        _Hands().clock(last_ms=LAST_MS + 1)


def test_a_step_beyond_the_last_time_is_never_followed() -> None:
    hands = _Hands(wall=1000.0)
    clock = hands.clock()
    hands.wall = LAST_MS / 1000 + 1
    for _ in range(3):
        hands.monotonic += STEP_HOLD_S
        clock.now_ms()
    assert clock.now_ms() == 1_000_000 + 3 * int(STEP_HOLD_S * 1000)
    assert clock.stepped_ms == 0


def test_it_never_passes_the_last_time() -> None:
    hands = _Hands(wall=LAST_MS / 1000 - 1)
    clock = hands.clock()
    hands.monotonic += 60
    assert clock.now_ms() == LAST_MS
