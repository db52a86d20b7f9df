"""How long a service that died stays down before it is started again."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_SECONDS = 0.2
"""Long enough for the port to be free again; short, since most deaths are single ones."""

LONGEST_SECONDS = 5.0
"""What keeps dying costs little then, and is back soon after its cause is gone."""

HEALTHY_SECONDS = 60.0
"""Having served for so long, the next death counts as a first one."""


@dataclass
class Backoff:
    """Doubles from death to death until one comes after a healthy minute. Times in seconds."""

    first: float = FIRST_SECONDS
    longest: float = LONGEST_SECONDS
    healthy: float = HEALTHY_SECONDS
    _next: float = 0.0

    def after(self, served_seconds: float) -> float:
        """The wait after a death that came `served_seconds` after the service began to serve."""
        if served_seconds >= self.healthy or self._next == 0.0:
            self._next = self.first
        wait = self._next
        self._next = min(self.longest, wait * 2)
        return wait
