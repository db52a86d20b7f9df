"""What each principal takes of this process, held to the limits of the policy.

A limit is of one process: with N ingests a principal may publish N times as much. Refused calls get
ResourceExhausted with the time after which to try again; they wait nowhere, so that what one
principal asks for beyond its limits takes no memory from others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from libs.access.policy import Limits
from slatemq.errors import ResourceExhausted

__all__ = ["PrincipalQuota", "RateQuota"]

RETRY_MS_MAX: Final = 60_000


class RateQuota:
    """So many a second. What passes may exceed what is left, and is then paid off by waiting.

    So a batch that is larger than the limit passes once nothing is owed, and costs as many seconds.
    """

    def __init__(self, per_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._clock_s = clock_s
        self._left = per_s
        self._since_s = clock_s()

    def wait_ms(self) -> int:
        """How long to wait until something may pass; 0: now."""
        now_s = self._clock_s()
        self._left = min(self._per_s, self._left + (now_s - self._since_s) * self._per_s)
        self._since_s = now_s
        return 0 if self._left > 0 else int(-self._left / self._per_s * 1000) + 1

    def take(self, count: float) -> None:
        """Count what passes; after `wait_ms` gave 0."""
        self._left -= count


class PrincipalQuota:
    """What one principal takes.

    Attributes:
        refused_count: Refused calls, by the limit that they met.
    """

    def __init__(
        self, name: str, limits: Limits, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._clock_s = clock_s
        self.refused_count: Counter[str] = Counter()
        self._limits = Limits()
        self._rates: dict[str, RateQuota] = {}
        self.set_limits(limits)

    def set_limits(self, limits: Limits) -> None:
        """Hold to these limits from now on."""
        if limits == self._limits:
            return  # What was published a moment ago still counts.
        self._limits = limits
        self._rates = {
            name: RateQuota(per_s, self._clock_s)
            for name in ("publish_messages_per_s", "publish_bytes_per_s")
            if (per_s := getattr(limits, name)) is not None
        }

    @property
    def is_idle(self) -> bool:
        """Whether nothing would be lost with this object."""
        return all(not rate.wait_ms() for rate in self._rates.values())

    def publish(self, messages_count: int, bytes_count: int) -> None:
        """Count a publish, or raise ResourceExhausted and count nothing."""
        if not self._rates:
            return
        for name, rate in self._rates.items():
            if wait_ms := rate.wait_ms():
                raise self._refused(name, min(wait_ms, RETRY_MS_MAX))
        for name, rate in self._rates.items():
            rate.take(messages_count if name == "publish_messages_per_s" else bytes_count)

    def _refused(self, limit: str, retry_after_ms: int) -> ResourceExhausted:
        self.refused_count[limit] += 1
        return ResourceExhausted(
            f"{self._name!r} has reached its limit {limit} = {getattr(self._limits, limit)}",
            retry_after_ms=retry_after_ms,
            reason="PRINCIPAL_LIMIT",
            metadata={"limit": limit},
        )
