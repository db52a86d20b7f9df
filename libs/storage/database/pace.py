"""How long a commit waits after the last one began: where commits are paid, time saves money.

`FixedPace`    always as long
`BudgetPace`   as long as a budget for requests asks for
`LatencyPace`  as long as a latency goal permits
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

MONTH_S: Final = 30 * 86_400

INTERVAL_S_MAX: Final = 4.0
"""No answer waits longer, whatever was set: some calls wait 5 s for a commit of another process,
and no longer."""

LOOK_S: Final = 10.0
"""How often spending is checked, at most: reading SlateDB's counts takes 3 ms."""

SAVED_S_MAX: Final = 3600.0
"""Unspent budget carries over for at most this long."""

RISE: Final = 0.25
FALL: Final = 0.01
"""How fast `LatencyPace` follows commits that took longer, or less long, than it expects. Where one
in 26 takes longer, both even out."""


class Pace(Protocol):
    """Decides when the next commit begins."""

    def interval_s(self) -> float:
        """The least time from the start of a commit, which is now, to the next one's, in s."""

    def took(self, duration_s: float) -> None:
        """Note how long a commit took to be durable."""

    @property
    def note(self) -> str:
        """What it does now, for people; empty where that is no more than what was set."""


class FixedPace:
    """The same time before each commit."""

    note = ""

    def __init__(self, interval_ms: int = 0) -> None:
        self._interval_s = interval_ms / 1000

    def interval_s(self) -> float:
        return self._interval_s

    def took(self, duration_s: float) -> None:
        """It does not depend on that."""


class BudgetPace:
    """Commits as often as a budget allows, which pays for all requests of the process.

    The budget accrues; what is left of it, up to that of an hour, is saved. At the *even* interval
    a commit costs what accrues meanwhile. With nothing saved, commits are that far apart, and the
    more is saved, the closer; where more was spent than has accrued, they are further apart. So the
    sum never runs away from the budget, and a burst after a quiet hour does not wait.
    """

    def __init__(
        self,
        budget_usd: float,
        commit_usd: float,
        spent_usd: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`budget_usd` is for a month, `commit_usd` what a commit costs at least.

        `spent_usd` gives what all requests of the process cost so far; it never falls.
        """
        self._a_second_usd = budget_usd / MONTH_S
        self._saved_usd_max = SAVED_S_MAX * self._a_second_usd
        self._even_s = commit_usd / self._a_second_usd
        self._budget_usd = budget_usd
        self._spent_usd = spent_usd
        self._clock = clock
        self._begun_s = self._looked_s = clock()
        self._begun_usd = self._seen_usd = spent_usd()
        self._saved_usd = 0.0

    def interval_s(self) -> float:
        if self._clock() - self._looked_s >= LOOK_S:
            self._look()
        saved = self._saved_usd / self._saved_usd_max
        return min(self._even_s * (1 - saved), INTERVAL_S_MAX)

    def took(self, duration_s: float) -> None:
        """It does not depend on that."""

    @property
    def note(self) -> str:
        interval_s = self.interval_s()
        hours = (self._looked_s - self._begun_s) / 3600
        spent_usd = self._seen_usd - self._begun_usd
        too_little = ", the longest: the budget is too small for more" * (
            interval_s == INTERVAL_S_MAX
        )
        return (
            f"at most one commit every {interval_s * 1000:,.0f} ms, to spend no more than "
            f"${self._budget_usd:g} a month{too_little}; ${spent_usd:,.4f} in {hours:,.1f} h"
        )

    def _look(self) -> None:
        now_s, spent_usd = self._clock(), self._spent_usd()
        accrued_usd = (now_s - self._looked_s) * self._a_second_usd
        self._saved_usd += accrued_usd - (spent_usd - self._seen_usd)
        self._saved_usd = min(self._saved_usd, self._saved_usd_max)
        self._looked_s, self._seen_usd = now_s, spent_usd


class LatencyPace:
    """Commits as seldom as a goal permits: what comes is durable within that time.

    What comes just after the start of a commit waits for the next one, and for that to be durable.
    So the interval is what the goal leaves beside a slow commit: one that few are slower than.
    """

    def __init__(self, goal_ms: int) -> None:
        self._goal_s = goal_ms / 1000
        self._slow_s = 0.0

    def interval_s(self) -> float:
        return max(self._goal_s - self._slow_s, 0.0)

    def took(self, duration_s: float) -> None:
        off_s = duration_s - self._slow_s
        self._slow_s += off_s * (RISE if off_s > 0 else FALL)

    @property
    def note(self) -> str:
        goal_ms, slow_ms = self._goal_s * 1000, self._slow_s * 1000
        if slow_ms >= goal_ms:
            return f"commits at once, and takes {slow_ms:,.0f} ms: the goal is {goal_ms:,.0f} ms"
        return (
            f"at most one commit every {self.interval_s() * 1000:,.0f} ms, to be durable within "
            f"{goal_ms:,.0f} ms; a slow commit takes {slow_ms:,.0f} ms"
        )
