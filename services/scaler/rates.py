"""How many messages a second come into each queue, from samples of their totals."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

RATE_S: Final = 60.0
"""A rate is that of the last minute, or of longer where there was no sample since: as steady as the
number of replicas should be."""

RATE_S_MIN: Final = 1.0
"""Between the two samples that make a rate; the first question about a queue takes as long."""

SAMPLES_KEPT_S: Final = 600.0
"""A queue that was not looked at for so long is forgotten."""


class Sample(NamedTuple):
    """How many messages have come into a queue since its broker started.

    Attributes:
        at_s: When it was asked for, by a clock that never steps.
        created_at_ms: When the queue was created.
        entered_count: Messages that had entered the queue by then.
    """

    at_s: float
    created_at_ms: int
    entered_count: int


class Rates:
    def __init__(self) -> None:
        self._samples: dict[str, deque[Sample]] = {}

    def add(self, queue_id: str, sample: Sample) -> None:
        """Keep a sample, and of those before it what the rate needs; not one that comes late."""
        if queue_id not in self._samples:
            self._forget(sample.at_s - SAMPLES_KEPT_S)
        samples = self._samples.setdefault(queue_id, deque())
        if samples and sample.at_s < samples[-1].at_s:
            return  # A smaller count than the newest would look like a broker's restart.
        if samples and not _continues(samples[-1], sample):
            samples.clear()
        samples.append(sample)
        while len(samples) > 2 and samples[1].at_s <= sample.at_s - RATE_S:
            samples.popleft()

    def rate(self, queue_id: str) -> float | None:
        """Messages a second, of a queue with a sample; None: another sample is needed, later."""
        first, last = self._samples[queue_id][0], self._samples[queue_id][-1]
        seconds = last.at_s - first.at_s
        if seconds < RATE_S_MIN:
            return None
        return (last.entered_count - first.entered_count) / seconds

    def __len__(self) -> int:
        """The queues that are known."""
        return len(self._samples)

    def _forget(self, before_s: float) -> None:
        for queue_id, samples in list(self._samples.items()):
            if samples[-1].at_s < before_s:
                del self._samples[queue_id]


def _continues(before: Sample, now: Sample) -> bool:
    """Whether both are of one queue, and of one start of its broker."""
    return now.created_at_ms == before.created_at_ms and now.entered_count >= before.entered_count
