"""The deliveries of tasks that a consumer has not finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

D = TypeVar("D")


class HeldTasks(Generic[D]):
    """Deliveries by task. A task may be delivered again while it is held: each has its own end."""

    def __init__(self) -> None:
        self._held: dict[str, list[D]] = {}

    def add(self, task_id: str, delivery: D) -> None:
        self._held.setdefault(task_id, []).append(delivery)

    def of(self, task_id: str) -> Sequence[D]:
        return self._held.get(task_id, ())

    def first(self, task_id: str) -> D | None:
        """The delivery to finish next; None when none is held."""
        return next(iter(self.of(task_id)), None)

    def drop(self, task_id: str) -> None:
        """Remove the first one: the server has confirmed its end."""
        deliveries = self._held[task_id]
        del deliveries[0]
        if not deliveries:
            del self._held[task_id]

    def __iter__(self) -> Iterator[D]:
        return (delivery for deliveries in self._held.values() for delivery in deliveries)
