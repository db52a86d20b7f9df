"""The waiters of each queue, in line."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence, Set

from services.broker.core.queue import Queue
from services.broker.delivery.message_cache import FETCH_BYTES, OVERHEAD_BYTES, FetchResult
from services.broker.delivery.waiters import Waiter, packed_shards
from slatemq.errors import SlateMQError

LOOK_AHEAD = 10_000
"""Messages examined, and fetched, for the claims of one queue at a time: as many as one response of
an ingest has, and as one claim may ask for."""

AHEAD = 1000
"""Messages fetched at a time at most where fewer are asked for: of a long backlog a fetch costs
half a millisecond, however few messages it is for."""

AHEAD_BYTES = 1 << 20
"""The most bytes to fetch ahead, judged by the size of earlier messages."""

FIRST_BYTES = 4 << 20
"""Asked for at most where nothing is known of the messages of a queue."""

FETCH_BYTES_MIN = 64 << 10
"""Asked for at least: messages may be larger than those before."""

PAUSE = 32
"""Fetches without more than is asked for, once it was seen that more is forgotten again."""

AHEADS_MAX = 256
"""Queues that fetch ahead in turns; of more than these, each would only push the others out."""


class PrefetchWindow:
    """How many messages of a queue to fetch when some are missing."""

    __slots__ = ("_count", "_more", "_pause", "_size")

    def __init__(self) -> None:
        self._count = self._size = 0  # nothing is known of their sizes
        self._more: set[int] = set()
        self._pause = 0

    def count(self, first_id: int) -> int:
        """How many, where this is the first that is missing; 0: no more than are asked for."""
        if first_id in self._more:
            # It was fetched, and forgotten before it was its turn: memory is short.
            self._pause = PAUSE
        return 0 if self._pause else self._count

    def expected_bytes(self, count: int, most: int) -> int:
        """Bytes to ask for, for `count` messages: a quarter more than they had lately."""
        if not self._size:
            return min(FIRST_BYTES, most)
        return min(max(count * self._size * 5 // 4, FETCH_BYTES_MIN), FETCH_BYTES, most)

    def fetched(self, ids: Sequence[int], asked: int, fetched: FetchResult) -> None:
        """Notes that these were fetched, the first ones since they were asked for; what came."""
        self._pause = max(0, self._pause - 1)
        self._more = set(ids[asked:])
        if fetched.count:
            self._size = fetched.size_bytes // fetched.count + OVERHEAD_BYTES
            self._count = min(AHEAD, AHEAD_BYTES // self._size)


class PrefetchWindows:
    """The windows of the queues that fetched last: one may take 64 KB, and queues may be many."""

    def __init__(self) -> None:
        self._by_queue: OrderedDict[str, PrefetchWindow] = OrderedDict()

    def of(self, queue_id: str) -> PrefetchWindow:
        ahead = self._by_queue.setdefault(queue_id, PrefetchWindow())
        self._by_queue.move_to_end(queue_id)
        if len(self._by_queue) > AHEADS_MAX:
            self._by_queue.popitem(last=False)
        return ahead


class WaiterLine:
    """The waiters of one queue, in line."""

    __slots__ = (
        "again",
        "away",
        "cut",
        "has_awaiting",
        "impatient",
        "line",
        "queue",
        "short",
        "stuck",
        "task",
        "timer",
    )

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.line: OrderedDict[Waiter, None] = OrderedDict()
        self.impatient: set[Waiter] = set()
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.again = False
        self.cut = False  # a claim was cut at the end of a turn: it wants more now
        self.short = False  # there were messages, but too many of all queues are in flight
        self.stuck = False  # there were messages at the last look, and none could be claimed
        self.away: SlateMQError | None = None
        self.has_awaiting = False  # a waiter has a note of ingests that messages wait for

    def enter(self, waiter: Waiter) -> None:
        self.line[waiter] = None
        self.has_awaiting |= bool(waiter.awaited_shards)
        if not waiter.patient:
            self.impatient.add(waiter)

    def await_ingests(self, shards: Set[int]) -> None:
        """Notes with those in line for which ingests messages of the queue wait."""
        if not shards and not self.has_awaiting:
            return
        self.has_awaiting = bool(shards)
        awaited = packed_shards(shards)
        for waiter in self.line:
            if waiter.awaited_shards != awaited:
                waiter.await_ingests(awaited)

    def leave(self, waiter: Waiter) -> None:
        del self.line[waiter]
        self.impatient.discard(waiter)

    def wanted(self) -> int:
        """How many messages to examine for the waiters in line."""
        # No more than there are: most waiters wait on a queue without messages.
        most = min(self.queue.waiting.ready_count + self.queue.waiting.timed_count, LOOK_AHEAD)
        wanted = 0
        for waiter in self.line:
            if wanted >= most:
                return most
            wanted += waiter.wants
        return min(wanted, most)
