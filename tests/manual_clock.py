"""Clocks that move only when a test says so."""

from __future__ import annotations


class ManualClock:
    """Implements `libs.storage.database.clocks.Clock`; milliseconds since the Unix epoch."""

    def __init__(self, now_ms: int = 1_767_225_600_000) -> None:
        self._now_ms = now_ms
        self.stepped_ms = 0

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, by_ms: int) -> None:
        assert by_ms >= 0, "this clock never goes back, as the real one"
        self._now_ms += by_ms

    def step(self, by_ms: int) -> None:
        """Follows a step of the wall clock."""
        self.advance(by_ms)
        self.stepped_ms += by_ms


class ManualSeconds:
    """In place of `time.monotonic`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
