"""Where the waiters of a queue stand in line."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from services.broker.queue_machine import Queue
from services.broker.waiters import Waiter
from slatemq.errors import SlateMQError

LOOK_AHEAD = 10_000
"""Messages looked at, and fetched, for the claims of one queue at a time: as many as an ingest
gives at once, and as one claim may ask for."""


class Desk:
    """The waiters of one queue, in line."""

    __slots__ = ("again", "away", "impatient", "line", "queue", "stuck", "task", "timer")

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.line: OrderedDict[Waiter, None] = OrderedDict()
        self.impatient: set[Waiter] = set()
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.again = False
        self.stuck = False  # there were messages at the last look, and none could be claimed
        self.away: SlateMQError | None = None

    def wanted(self) -> int:
        """How many messages to look at for those in line."""
        # No more than there are: most who wait, wait on a queue that has none.
        most = min(self.queue.ready_count + self.queue.timed_count, LOOK_AHEAD)
        wanted = 0
        for waiter in self.line:
            if wanted >= most:
                return most
            wanted += waiter.wants
        return min(wanted, most)
