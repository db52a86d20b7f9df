"""How much a shard has to do, for the choice of the shard of a new queue.

Counted from memory: many clients may ask. A burst of creations sees each queue at once; messages
are summed up once a second, and the processor time is that of the last half minute.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from services.broker.core.queue import Queue

QUEUES: Final = 10_000
"""What one shard takes well: each of these is a load of 1."""

MESSAGES: Final = 10_000_000

STEPS: Final = 10
"""The processor's share is rounded down to a tenth: idle brokers must not differ by it."""

SAMPLE_S: Final = 5.0
SAMPLES: Final = 6
"""The processor's share is that of half a minute: what a burst costs is soon forgotten."""

COUNT_EVERY_S: Final = 1.0
"""The sum over ten thousand queues takes some milliseconds."""


class ShardLoad:
    """Clocks are in seconds; the processor's counts what this process has used."""

    def __init__(
        self,
        queues: Mapping[str, Queue],
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.process_time,
    ) -> None:
        self._queues = queues
        self._clock = clock
        self._processor = processor
        self._samples = deque([(clock(), processor())], maxlen=SAMPLES + 1)
        self._messages_count = 0
        self._counted_at = float("-inf")

    @property
    def queues_count(self) -> int:
        return len(self._queues)

    @property
    def messages_count(self) -> int:
        """Messages in all lists of all queues, a second old at most."""
        if self._clock() - self._counted_at >= COUNT_EVERY_S:
            self._messages_count = sum(map(_messages_of, self._queues.values()))
            self._counted_at = self._clock()
        return self._messages_count

    @property
    def processor_share(self) -> float:
        """Of one core, over the last half minute; 0 in the first seconds."""
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0

    def load(self) -> float:
        """The sum of the shares of what one shard takes well."""
        processor = int(self.processor_share * STEPS) / STEPS
        return self.queues_count / QUEUES + self.messages_count / MESSAGES + processor

    def sample(self) -> None:
        self._samples.append((self._clock(), self._processor()))

    async def run(self) -> None:
        """Samples until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample()


def _messages_of(queue: Queue) -> int:
    waiting_count = sum(lane.count for lane in queue.waiting.by_name.values())
    return waiting_count + queue.leases.count + queue.done.count + queue.failed.count
