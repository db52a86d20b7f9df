"""What the queues of each owner add up to: their number, and the cost of their expressions."""

from __future__ import annotations

from collections import Counter

from services.broker.core.settings import QueueSettings


class OwnedQueues:
    """Sums by owner, of queues that have one; kept, so that asking costs nothing."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._costs: Counter[str] = Counter()

    def add(self, settings: QueueSettings) -> None:
        if settings.owner:
            self._counts[settings.owner] += 1
            self._costs[settings.owner] += settings.cost

    def remove(self, settings: QueueSettings) -> None:
        if not settings.owner:
            return
        self._counts[settings.owner] -= 1
        self._costs[settings.owner] -= settings.cost
        if not self._counts[settings.owner]:
            del self._counts[settings.owner], self._costs[settings.owner]

    def totals(self, owner: str) -> tuple[int, int]:
        """How many queues are this owner's, and their cost."""
        return self._counts[owner], self._costs[owner]
