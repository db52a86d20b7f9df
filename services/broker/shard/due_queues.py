"""Which queues have messages that fall due, without asking all of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from typing import Final

from libs.storage.layout.buckets import BucketKind, order_in_time, split_order
from services.broker.core.queue import Queue

SPARE: Final = 100
"""Entries beyond twice the live ones after which stale entries are cleaned up."""


class DueQueues:
    """Queues by the time at which something falls due that was not counted, or a lower bound."""

    def __init__(self, queues: Iterable[Queue], owns: Callable[[Queue], bool]) -> None:
        """Start with these; queues that are not owned any more are forgotten."""
        self._owns = owns
        self._at_ms: dict[Queue, int] = {}
        self._places: list[tuple[int, int, Queue]] = []
        self._numbers = count()  # so that queues are never compared
        self._clean_up_at = SPARE
        for queue in queues:
            self.note(queue)

    def note(self, queue: Queue) -> None:
        """Notes that the queue has changed."""
        at_ms = _next_ms(queue)
        if at_ms is None or at_ms >= self._at_ms.get(queue, at_ms + 1):
            return
        self._at_ms[queue] = at_ms
        heapq.heappush(self._places, (at_ms, next(self._numbers), queue))
        if len(self._places) > self._clean_up_at:
            self._clean_up()

    def take(self, now_ms: int) -> list[Queue]:
        """Removes and returns the queues whose time has come; note them again afterwards."""
        due = []
        while self._places and self._places[0][0] <= now_ms:
            at_ms, _, queue = heapq.heappop(self._places)
            if self._at_ms.get(queue) == at_ms:
                del self._at_ms[queue]
                due.append(queue)
        return [queue for queue in due if self._owns(queue)]

    def _clean_up(self) -> None:
        # The messages of a queue that was deleted may be due in a hundred years.
        self._at_ms = {queue: at_ms for queue, at_ms in self._at_ms.items() if self._owns(queue)}
        self._places = [place for place in self._places if self._at_ms.get(place[2]) == place[0]]
        heapq.heapify(self._places)
        self._clean_up_at = 2 * len(self._places) + SPARE


def _next_ms(queue: Queue) -> int | None:
    orders = [
        max(lane.earliest, lane.due_until + 1)
        for lane in queue.waiting.timed_lanes()
        if lane.count and lane.earliest is not None
    ]
    return split_order(order_in_time(BucketKind.TIMED, min(orders))).ms if orders else None
