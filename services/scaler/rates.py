"""How many messages a second come into each queue, from looks at their totals."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

RATE_S: Final = 60.0
"""A rate is that of the last minute, or of longer where there was no look since: as steady as the
number of replicas should be."""

RATE_S_MIN: Final = 1.0
"""Between the two looks that make a rate; the first question about a queue takes as long."""

LOOKS_KEPT_S: Final = 600.0
"""A queue that was not looked at for so long is forgotten."""


class Look(NamedTuple):
    """How many messages have come into a queue since its broker started.

    Attributes:
        at_s: When, by a clock that never steps.
        created_at_ms: When the queue was created.
        entered_count: So many.
    """

    at_s: float
    created_at_ms: int
    entered_count: int


class Rates:
    def __init__(self) -> None:
        self._looks: dict[str, deque[Look]] = {}

    def add(self, queue_id: str, look: Look) -> None:
        """Keep a look, and of those before it what the rate needs."""
        if queue_id not in self._looks:
            self._forget(look.at_s - LOOKS_KEPT_S)
        looks = self._looks.setdefault(queue_id, deque())
        if looks and not _continues(looks[-1], look):
            looks.clear()
        looks.append(look)
        while len(looks) > 2 and looks[1].at_s <= look.at_s - RATE_S:
            looks.popleft()

    def rate(self, queue_id: str) -> float | None:
        """Messages a second, of a queue with a look; None: another look is needed, later."""
        first, last = self._looks[queue_id][0], self._looks[queue_id][-1]
        seconds = last.at_s - first.at_s
        if seconds < RATE_S_MIN:
            return None
        return (last.entered_count - first.entered_count) / seconds

    def __len__(self) -> int:
        """The queues that are known."""
        return len(self._looks)

    def _forget(self, before_s: float) -> None:
        for queue_id, looks in list(self._looks.items()):
            if looks[-1].at_s < before_s:
                del self._looks[queue_id]


def _continues(before: Look, look: Look) -> bool:
    """Whether both are of one queue, and of one start of its broker."""
    return look.created_at_ms == before.created_at_ms and look.entered_count >= before.entered_count
