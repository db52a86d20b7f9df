"""What each principal takes of this process, held to the limits of the policy.

A limit is of one process: with N ingests a principal may publish N times as much. Refused calls get
ResourceExhausted, with the time after which to try again where waiting helps. They wait nowhere, so
that what one principal asks for beyond its limits takes no memory from others: only the answers of
a principal that is refused again and again are held back for a moment, and few of them. Calls that
are no publishes wait for their turns before their requests are read, for a second at most: to
refuse one costs nearly as much as to serve it, and a client whose ack waits puts more into the
next.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal

from libs.access.policy import Limits
from libs.access.principals import LIMIT_REASON, PLACE_RETRY_MS, SHARE_REASON
from slatemq.errors import ResourceExhausted

CallSlot = Literal["open_streams", "waiting_claims"]
"""What a call takes for as long as it lasts."""

Quantity = Literal["queues", "filter_cost", "filter_cost_sum"]
"""What stays with the broker, so that waiting does not help."""

RETRY_MS_MAX: Final = 60_000

PACED_MS_MAX: Final = 1_000
"""How long a call waits for its turn. So no more calls wait than a second has turns."""

PROMPT_REFUSALS_PER_S: Final = 20
"""Refusals that are answered at once. Clients that wait as asked have fewer."""

HELD_S_MAX: Final = 5.0
"""A refused call costs nearly as much as one that is served, most of it gRPC's. So a caller that
repeats it at once, with 100 calls at a time, gets no more refusals than are prompt."""

HELD_MAX: Final = 1_000
"""Answers held back at once for one cause and principal: some 20 MB. Beyond them it is answered at
once."""

_ADVICE: Final = {
    "open_streams": "close one first",
    "waiting_claims": "claim more messages, or wait for fewer tasks, at once",
    "in_flight": "ack some first",
    "queues": "delete one first",
    "filter_cost": "simplify the filter or the priority",
    "filter_cost_sum": "simplify filters and priorities, or delete queues",
}


class Usage:
    """What all principals take together, for metrics.

    Both are counted by the limit and by the entry of the policy that has it, whose number is
    bounded; that of principals is not.

    Attributes:
        refused: Refused calls; those beyond a share by its setting.
        open: Places that are taken now.
    """

    def __init__(self) -> None:
        self.refused: Counter[tuple[str, str]] = Counter()
        self.open: Counter[tuple[str, str]] = Counter()


class RateQuota:
    """N per second. What passes may exceed what is left, and is then paid off by waiting.

    So a batch that is larger than the limit passes once nothing is owed, and costs as many seconds.
    """

    def __init__(self, per_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._clock_s = clock_s
        self._left = per_s
        self._since_s = clock_s()
        self._last_count = 0.0
        self._promised_s = -math.inf

    def wait_ms(self) -> int:
        """How long to wait until something may pass; 0: now."""
        now_s = self._clock_s()
        self._left = min(self._per_s, self._left + (now_s - self._since_s) * self._per_s)
        self._since_s = now_s
        # A millisecond more than that, which rounding may take away.
        return 0 if self._left > 0 else math.ceil(-self._left / self._per_s * 1000) + 1

    def promise_ms(self) -> int:
        """How long one that is refused now is asked to wait, in place of `wait_ms`.

        Those that are refused get their turns one after the other, each as long as the last that
        passed would take: if all came back at once, all but the first would be refused again.
        """
        self.wait_ms()
        now_s, behind_s = self._since_s, self._promised_s + self._last_count / self._per_s
        turn_s = max(now_s - self._left / self._per_s, behind_s)
        wait_ms = min(int(1000 * (turn_s - now_s)) + 1, RETRY_MS_MAX)
        self._promised_s = min(turn_s, now_s + wait_ms / 1000)
        return wait_ms

    def take(self, count: float) -> None:
        """Count what passes; call it after `wait_ms` returned 0."""
        self._left -= count
        self._last_count = count


class Refusals:
    """The refusals of a principal by one cause: prompt at first, held back when there are many."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._prompt = RateQuota(PROMPT_REFUSALS_PER_S, clock_s)
        self._held_count = 0

    async def hold_back(self, most_s: float) -> None:
        """Delay an answer if there were many, for no longer than this."""
        wait_ms = self._prompt.wait_ms()
        if wait_ms <= HELD_S_MAX * 1000:
            self._prompt.take(1)
        if not wait_ms or self._held_count >= HELD_MAX:
            return
        held_s = wait_ms / 1000
        if held_s > HELD_S_MAX:
            # Those that came at the same moment do not come back so.
            held_s = HELD_S_MAX * random.uniform(0.5, 1)
        self._held_count += 1
        try:
            await asyncio.sleep(min(held_s, most_s))
        finally:
            self._held_count -= 1


class PrincipalQuota:
    """What one principal takes.

    Attributes:
        name: That of the principal.
    """

    def __init__(
        self,
        name: str,
        limits: Limits,
        clock_s: Callable[[], float] = time.monotonic,
        usage: Usage | None = None,
    ) -> None:
        """Hold the principal of this name to these limits; `usage` counts for all principals."""
        self.name = name
        self._clock_s = clock_s
        self._usage = usage or Usage()
        self._limits = Limits()
        self._rates: dict[str, RateQuota] = {}
        self._calls: RateQuota | None = None
        self._taken: Counter[CallSlot] = Counter()
        # By cause: many refusals by one make those by another no less prompt.
        self._refusals: dict[str, Refusals] = {}
        self.set_limits(limits)

    def set_limits(self, limits: Limits) -> None:
        """Hold to these limits from now on. What is open stays open."""
        if limits == self._limits:
            return  # What was published a moment ago still counts.
        self._limits = limits
        self._rates = {
            name: RateQuota(per_s, self._clock_s)
            for name in ("publish_messages_per_s", "publish_bytes_per_s")
            if (per_s := getattr(limits, name)) is not None
        }
        per_s = limits.calls_per_s
        self._calls = None if per_s is None else RateQuota(per_s, self._clock_s)

    @property
    def is_idle(self) -> bool:
        """Whether nothing would be lost with this object."""
        rates = [*self._rates.values(), *([self._calls] if self._calls is not None else ())]
        return not self._taken.total() and all(not rate.wait_ms() for rate in rates)

    def admit_publish(self) -> None:
        """Raise ResourceExhausted while the principal owes time for what it published."""
        for name, rate in self._rates.items():
            if rate.wait_ms():
                raise self._refused(name, rate.promise_ms())

    def publish(self, messages_count: int, bytes_count: int) -> None:
        """Count a publish, or raise ResourceExhausted and count nothing."""
        self.admit_publish()
        self._take(messages_count, bytes_count)

    def charge(self, bytes_count: int) -> None:
        """Count a publish that is refused for another reason: it was read and judged like others.

        Where something is owed already, it is not: its caller could never publish again.
        """
        if not any(rate.wait_ms() for rate in self._rates.values()):
            self._take(1, bytes_count)

    def _take(self, messages_count: int, bytes_count: int) -> None:
        for name, rate in self._rates.items():
            rate.take(messages_count if name == "publish_messages_per_s" else bytes_count)

    async def pace(self, most_s: float | None) -> None:
        """Wait for the turn of a call that is no publish, or raise ResourceExhausted.

        It waits for no longer than `most_s`, which None does not bound, and has its turn then also
        where it is cancelled.
        """
        if self._calls is None:
            return
        wait_ms = self._calls.wait_ms()
        most_ms = PACED_MS_MAX if most_s is None else min(PACED_MS_MAX, most_s * 1000)
        if wait_ms > most_ms:
            raise self._refused("calls_per_s", self._calls.promise_ms())
        self._calls.take(1)
        if wait_ms:
            await asyncio.sleep(wait_ms / 1000)

    @contextmanager
    def place(self, kind: CallSlot) -> Iterator[None]:
        """Take a place for as long as a call lasts, or raise ResourceExhausted."""
        most = getattr(self._limits, kind)
        if most is not None and self._taken[kind] >= most:
            raise self._refused(kind, PLACE_RETRY_MS)
        counted = kind, self._limits.entry
        self._taken[kind] += 1
        self._usage.open[counted] += 1
        try:
            yield
        finally:
            self._taken[kind] -= 1
            self._usage.open[counted] -= 1

    def hold(self, kind: Quantity, count: int, before_count: int = 0) -> None:
        """Raise ResourceExhausted where this grows beyond the limit."""
        most = getattr(self._limits, kind)
        if most is not None and before_count < count > most:
            raise self._refused(kind, None, f": {count} are wanted")

    @property
    def in_flight_max(self) -> int | None:
        """How many messages may be in flight that it claimed; None: any number."""
        return self._limits.in_flight

    def refuse_claim(self) -> ResourceExhausted:
        """The error, which counts as a refusal, of a claim beyond `in_flight_max`."""
        return self._refused("in_flight", PLACE_RETRY_MS)

    def refuse_share(self, setting: str, held: str) -> ResourceExhausted:
        """The error, which counts as a refusal, of a call beyond the share of a setting.

        `held` says what the principal holds.
        """
        self._usage.refused[setting, self._limits.entry] += 1
        return ResourceExhausted(
            f"{self.name!r} has {held}: let some end first; retry in {PLACE_RETRY_MS / 1000:.3g} s",
            retry_after_ms=PLACE_RETRY_MS,
            reason=SHARE_REASON,
            metadata={"limit": setting},
        )

    async def hold_back(self, cause: str, most_s: float) -> None:
        """Delay the answer of a call that a limit, or something else, refused, if there were many.

        Its caller may not wait itself. `most_s` bounds the delay.
        """
        refusals = self._refusals.get(cause)
        if refusals is None:
            refusals = self._refusals[cause] = Refusals(self._clock_s)
        await refusals.hold_back(most_s)

    def _refused(self, limit: str, retry_after_ms: int | None, more: str = "") -> ResourceExhausted:
        self._usage.refused[limit, self._limits.entry] += 1
        advice = f"; {_ADVICE[limit]}" if limit in _ADVICE else ""
        if retry_after_ms is not None:
            advice += f"; retry in {retry_after_ms / 1000:.3g} s"
        return ResourceExhausted(
            f"{self.name!r} has reached its limit {limit} = {getattr(self._limits, limit)}"
            f"{more}{advice}",
            retry_after_ms=retry_after_ms,
            reason=LIMIT_REASON,
            metadata={"limit": limit},
        )
