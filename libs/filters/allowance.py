"""How much processor time the expressions of one queue may take.

The check of an expression bounds the cost of an evaluation, but only roughly: it depends on the
headers, which any producer chooses. So the time of long evaluations is added up for each queue, and
the part of the sum above a share of the time is a debt. A queue with more than `DEBT_MAX_NS` is
left out of routing until its expressions change.

    debt = Σ processor time of evaluations over FREE_NS − time × SHARE, never below 0

Time in which an evaluation did not have the processor costs nothing. The thread's clock, a system
call, is read only for evaluations that were long by the wall clock, and compared with a reading at
most `FREE_NS` before the evaluation: a short one costs two reads of the wall clock, 0.1 µs.

What all evaluations of a queue take by the wall clock, short ones too, is added up beside that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

FREE_NS: Final = 500_000
"""Shorter evaluations are free; most take a hundredth of this."""

DEBT_MAX_NS: Final = 100_000_000
"""A tenth of a second, for which one queue may hold up others, once."""

CHARGE_MAX_NS: Final = 25_000_000
"""No evaluation takes longer than some 20 ms; the rest is the garbage collector, which may run
whenever objects are made."""

SHARE: Final = 0.05
"""The share of the time that the long evaluations of a queue may take permanently."""


class TooSlow(Exception):
    """The expressions of a queue took more time than they may; stop evaluating them.

    Attributes:
        queue_id: The queue of the expressions.
        reason: The time they took, for people.
    """

    def __init__(self, queue_id: str, reason: str) -> None:
        super().__init__(f"queue {queue_id}: {reason}")
        self.queue_id = queue_id
        self.reason = reason


class Allowance:
    """The debts of the queues of one set of rules.

    Wrap an evaluation in::

        began_ns = allowance.now_ns()
        if began_ns - allowance.mark_ns > FREE_NS:
            allowance.mark(began_ns)
        ...
        allowance.spend(queue_id, allowance.now_ns() - began_ns)

    Attributes:
        now_ns: The wall clock.
        mark_ns: When the processor time was read last.
    """

    def __init__(
        self,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
        debt_max_ns: float = DEBT_MAX_NS,
        process: str = "router",
    ) -> None:
        self._process = process
        self._debt_max_ns = debt_max_ns
        self.now_ns = now_ns
        self.mark_ns = self._mark_cpu_ns = 0
        self._cpu_ns = cpu_ns
        self._debts: dict[str, tuple[float, int]] = {}
        self._spent_ns: dict[str, int] = {}

    def mark(self, now_ns: int) -> None:
        """Read the processor time, from which later evaluations count."""
        self.mark_ns, self._mark_cpu_ns = now_ns, self._cpu_ns()

    def spend(self, queue_id: str, took_ns: int) -> None:
        """Count an evaluation that took so long by the wall clock. Raises TooSlow."""
        spent_ns = min(took_ns, CHARGE_MAX_NS)
        self._spent_ns[queue_id] = self._spent_ns.get(queue_id, 0) + spent_ns
        if took_ns > FREE_NS:
            self.charge(queue_id)

    def take_spent(self) -> dict[str, int]:
        """What the evaluations of each queue took by the wall clock since this was called last."""
        spent_ns, self._spent_ns = self._spent_ns, {}
        return spent_ns

    def charge(self, queue_id: str) -> None:
        """Owe for an evaluation that took over `FREE_NS` by the wall clock. Raises TooSlow."""
        took_ns = self._cpu_ns() - self._mark_cpu_ns
        self.mark_ns = 0
        if took_ns > 2 * FREE_NS:  # Up to FREE_NS of it was before the evaluation.
            self._owe(queue_id, min(took_ns, CHARGE_MAX_NS), self.now_ns())

    def forget(self, queue_id: str) -> None:
        """Clear the debt of a queue that has other expressions, or is gone."""
        self._debts.pop(queue_id, None)
        self._spent_ns.pop(queue_id, None)

    def _owe(self, queue_id: str, took_ns: int, now_ns: int) -> None:
        debt_ns, since_ns = self._debts.get(queue_id, (0.0, now_ns))
        debt_ns = max(0.0, debt_ns - SHARE * (now_ns - since_ns)) + took_ns
        self._debts[queue_id] = debt_ns, now_ns
        if debt_ns > self._debt_max_ns:
            raise TooSlow(
                queue_id,
                f"its filter or priority took {took_ns / 1e6:.1f} ms for one message, and more "
                f"than {SHARE:.0%} of the {self._process}'s time",
            )
