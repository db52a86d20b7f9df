"""How much time the expressions of one queue may take from all others.

What one evaluation may cost is bounded when an expression is checked, but only roughly: it depends
on the headers, which anybody publishes. So what evaluations take that are not short is added up,
queue by queue, and what the sum is above a share of the time is a debt. Beyond `DEBT_MAX_NS` the
queue is to be left out of routing until its expressions are others.

    debt = Σ processor time of evaluations over FREE_NS − time × SHARE, never below 0

An evaluation that was kept off the processor costs nothing. That is read from the thread's clock,
by a system call, for evaluations that were long by the wall clock alone, against a reading that is
at most `FREE_NS` older than the evaluation: a short one costs two looks at the clock, 0.1 µs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["Allowance", "TooSlow"]

FREE_NS: Final = 500_000
"""Evaluations up to so long are not looked at: most take a hundredth of that."""

DEBT_MAX_NS: Final = 100_000_000
"""A tenth of a second: for so long others may be held up by one queue, once."""

CHARGE_MAX_NS: Final = 25_000_000
"""No evaluation takes longer than some 20 ms; what is above was the collector's, which runs in the
middle of whatever makes objects."""

SHARE: Final = 0.05
"""Of the time, what a queue's long evaluations may take for as long as it likes."""


class TooSlow(Exception):
    """The expressions of a queue took more time than they may; stop evaluating them.

    Attributes:
        queue_id: Whose expressions these are.
        reason: What they took, for people.
    """

    def __init__(self, queue_id: str, reason: str) -> None:
        super().__init__(f"queue {queue_id}: {reason}")
        self.queue_id = queue_id
        self.reason = reason


class Allowance:
    """The debts of the queues of one set of rules.

    Around an evaluation goes::

        began_ns = allowance.now_ns()
        if began_ns - allowance.mark_ns > FREE_NS:
            allowance.mark(began_ns)
        ...
        if allowance.now_ns() - began_ns > FREE_NS:
            allowance.charge(queue_id)

    Attributes:
        now_ns: The wall clock.
        mark_ns: When the processor time was read.
    """

    def __init__(
        self,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
        debt_max_ns: float = DEBT_MAX_NS,
    ) -> None:
        self._debt_max_ns = debt_max_ns
        self.now_ns = now_ns
        self.mark_ns = self._mark_cpu_ns = 0
        self._cpu_ns = cpu_ns
        self._debts: dict[str, tuple[float, int]] = {}

    def mark(self, now_ns: int) -> None:
        """Read the processor time: evaluations from now on count from here."""
        self.mark_ns, self._mark_cpu_ns = now_ns, self._cpu_ns()

    def charge(self, queue_id: str) -> None:
        """An evaluation has taken more than `FREE_NS`, by the wall clock. Raises TooSlow."""
        took_ns = self._cpu_ns() - self._mark_cpu_ns
        self.mark_ns = 0
        if took_ns > 2 * FREE_NS:  # Up to one of them was spent before the evaluation.
            self._owe(queue_id, min(took_ns, CHARGE_MAX_NS), self.now_ns())

    def forget(self, queue_id: str) -> None:
        """The queue has other expressions now, or is gone."""
        self._debts.pop(queue_id, None)

    def _owe(self, queue_id: str, took_ns: int, now_ns: int) -> None:
        debt_ns, since_ns = self._debts.get(queue_id, (0.0, now_ns))
        debt_ns = max(0.0, debt_ns - SHARE * (now_ns - since_ns)) + took_ns
        self._debts[queue_id] = debt_ns, now_ns
        if debt_ns > self._debt_max_ns:
            raise TooSlow(
                queue_id,
                f"its filter or priority took {took_ns / 1e6:.1f} ms for one message, and more "
                f"than {SHARE:.0%} of the router's time",
            )
