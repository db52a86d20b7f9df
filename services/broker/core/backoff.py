"""How long a message waits after a failed attempt. Pure: jitter comes from the lease's token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

BACKOFF_MS_MAX = 43_200_000
"""12 h: as long as the longest delay of a nack."""

MULTIPLIER_DEFAULT = 2.0
MULTIPLIER_MAX = 100.0

_JITTER_STEPS = 256
"""Different waits by jitter: more would spread what fails together over that many records."""

_SPREAD = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, and odd: the top bits of a product depend on all of a token."""


def _step_of(token: int) -> int:
    """One of the jitter steps, by the whole token: its last bits only count a claim's leases."""
    return (token * _SPREAD & (1 << 64) - 1) >> 56


class BackoffKind(Enum):
    """How the wait grows with the attempts; values are stored."""

    FIXED = "fixed"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"


@dataclass(frozen=True, slots=True)
class Backoff:
    """The rule of a queue. `jitter` is the share of the wait, 0 to 1, that is random."""

    kind: BackoffKind
    initial_ms: int
    max_ms: int = BACKOFF_MS_MAX
    multiplier: float = MULTIPLIER_DEFAULT
    jitter: float = 0.0

    def wait_ms(self, attempts: int, token: int) -> int:
        """The wait after this many failed attempts, from 1; the token is of the last lease."""
        wait_ms = self._longest_ms(attempts)
        if not self.jitter:
            return wait_ms
        chance = _step_of(token) / (_JITTER_STEPS - 1)
        return math.ceil(wait_ms * (1 - self.jitter * chance))

    def _longest_ms(self, attempts: int) -> int:
        match self.kind:
            case BackoffKind.FIXED:
                return self.initial_ms
            case BackoffKind.LINEAR:
                return min(self.initial_ms * attempts, self.max_ms)
            case BackoffKind.EXPONENTIAL:
                try:
                    grown = self.initial_ms * self.multiplier ** (attempts - 1)
                except OverflowError:
                    return self.max_ms
                return int(min(grown, self.max_ms))

    def text(self) -> str:
        """The stored form: `<kind> <initial ms> <longest ms> <multiplier> <jitter>`."""
        return (
            f"{self.kind.value} {self.initial_ms} {self.max_ms} {self.multiplier!r} {self.jitter!r}"
        )

    @classmethod
    def parse(cls, text: str) -> Backoff:
        kind, initial_ms, max_ms, multiplier, jitter = text.split(" ")
        return cls(
            BackoffKind(kind), int(initial_ms), int(max_ms), float(multiplier), float(jitter)
        )


DEFAULT_BACKOFF = Backoff(BackoffKind.EXPONENTIAL, 1_000, 600_000, multiplier=5.0, jitter=0.5)
"""For queues whose owner sets none: 1, 5, 25 and 125 s. The five default attempts then take at
least 78 s, so what a worker needs may be down for a minute before messages become dead letters."""
