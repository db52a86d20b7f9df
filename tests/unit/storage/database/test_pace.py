"""How long commits wait: within a budget, or a latency goal. Time is the tests' own."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from libs.storage.database.pace import (
    INTERVAL_S_MAX,
    MONTH_S,
    SAVED_S_MAX,
    BudgetPace,
    FixedPace,
    LatencyPace,
)

PUT_USD = 5e-6


class World:
    """A process whose commits cost money, at a time that the test sets."""

    def __init__(self, budget_usd: float, a_commit_usd: float = PUT_USD) -> None:
        self.now_s = 1_000.0
        self.spent_usd = 0.3  # Of the start: it is over.
        self.commits_count = 0
        self._a_commit_usd = a_commit_usd
        self.pace = BudgetPace(budget_usd, PUT_USD, lambda: self.spent_usd, lambda: self.now_s)

    def run(self, seconds: float, gap_s: Callable[[], float]) -> list[float]:
        """Commit for so long, `gap_s` after the last commit or when the pace permits; the waits."""
        ends_s, waits = self.now_s + seconds, []
        while self.now_s < ends_s:
            interval_s, wanted_s = self.pace.interval_s(), gap_s()
            waits.append(max(interval_s - wanted_s, 0.0))
            self.now_s += max(interval_s, wanted_s)
            self.spent_usd += self._a_commit_usd
            self.commits_count += 1
        return waits


def busy() -> float:
    """As fast as a store takes commits."""
    return 0.05


@pytest.mark.parametrize("a_commit_usd", [PUT_USD, 1.1 * PUT_USD, 3 * PUT_USD])
def test_a_busy_process_spends_its_budget_whatever_else_a_commit_costs(a_commit_usd: float) -> None:
    world = World(20.0, a_commit_usd)
    world.run(86_400, busy)
    spent_a_month = (world.spent_usd - 0.3) / 86_400 * MONTH_S
    assert 0.9 * 20 < spent_a_month < 1.1 * 20


def test_a_process_below_its_budget_soon_does_not_wait() -> None:
    world = World(20.0)
    world.run(2 * SAVED_S_MAX, lambda: 60.0)
    assert world.pace.interval_s() < 0.05


def test_a_burst_after_a_quiet_hour_spends_what_was_saved_and_no_more() -> None:
    world = World(20.0)
    world.now_s += 100 * SAVED_S_MAX  # far more than may be saved
    before = world.commits_count
    waits = world.run(SAVED_S_MAX, busy)
    an_hour = 20.0 / MONTH_S * SAVED_S_MAX / PUT_USD
    assert waits[1] == 0.0
    assert world.commits_count - before < 2.1 * an_hour
    assert waits[-1] > waits[1]


def test_the_sum_never_runs_from_the_budget_under_any_load() -> None:
    for seed in range(5):
        chances, world, hours = random.Random(seed), World(50.0), 30
        for _ in range(hours):
            mean_s = chances.choice([0.02, 0.1, 1.0, 100.0])
            world.run(3600, partial(chances.expovariate, 1 / mean_s))
        a_second_usd = 50.0 / MONTH_S
        # What accrued, what may have been saved before, and what one look is late.
        assert world.spent_usd - 0.3 < a_second_usd * (hours + 1.2) * 3600


def test_a_budget_that_is_too_small_says_so_and_no_caller_waits_for_ever() -> None:
    world = World(0.5)
    waits = world.run(3600, busy)
    assert max(waits) <= INTERVAL_S_MAX
    assert "the budget is too small" in world.pace.note


def test_the_note_says_what_is_done_and_what_was_spent() -> None:
    world = World(20.0)
    world.run(7200, busy)
    note = world.pace.note
    assert note.startswith("at most one commit every ")
    assert "$20 a month" in note
    assert "in 2.0 h" in note
    assert f"${world.spent_usd - 0.3:.3f}"[:5] in note


def test_requests_without_a_price_are_not_waited_for() -> None:
    assert BudgetPace(1.0, 0.0, lambda: 0.0, lambda: 0.0).interval_s() == 0.0


def test_a_goal_leaves_what_a_slow_commit_does_not_need() -> None:
    pace, chances = LatencyPace(200), random.Random(1)
    late = 0
    for number in range(5_000):
        duration_s = 0.03 if chances.random() > 0.02 else 0.09
        if number > 500:
            late += pace.interval_s() + duration_s > 0.2
        pace.took(duration_s)
    # Few are durable later than the goal, even of those that waited the whole interval
    assert late < 0.05 * 4_500
    assert pace.interval_s() > 0.1
    assert "to be durable within 200 ms" in pace.note


def test_a_goal_follows_a_store_that_becomes_slower_and_faster() -> None:
    pace = LatencyPace(100)
    for _ in range(50):
        pace.took(0.02)
    fast_s = pace.interval_s()
    for _ in range(50):
        pace.took(0.5)
    assert pace.interval_s() == 0.0
    assert "the goal is 100 ms" in pace.note
    for _ in range(2_000):
        pace.took(0.02)
    assert pace.interval_s() == pytest.approx(fast_s, abs=0.01)


def test_a_fixed_pace_has_nothing_to_say() -> None:
    pace = FixedPace(100)
    pace.took(5.0)
    assert (pace.interval_s(), pace.note, FixedPace().interval_s()) == (0.1, "", 0.0)
