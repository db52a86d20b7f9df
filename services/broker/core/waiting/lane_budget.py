"""How much of all lanes together is in memory: one budget for any number of queues.

A lane keeps what it has until the budget is used up; then the lanes that were changed or read least
recently drop what is stored. It is read back when a claim needs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from services.broker.core.waiting.lane import Lane

BYTES_MAX = 128 << 20
"""For all lanes of a shard, unless the broker's settings say otherwise."""

COUNTED_FROM = 16
"""Lanes with fewer messages do not count: of ten thousand lanes most are smaller."""

SPARED = 64
"""The lanes noted last keep what they have: a command may be about to go on with them."""


class LaneBudget:
    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._by_lane: dict[Lane, int] = {}  # in the order in which they were last noted
        self._durable_generation = 0
        self._look_from = 0  # what could not be dropped at the last look

    def note(self, lanes: Iterable[Lane]) -> None:
        """Notes that these lanes were changed or read."""
        for lane in lanes:
            if lane.cached_count < COUNTED_FROM and lane not in self._by_lane:
                continue
            held = lane.held_bytes
            self.held_bytes += held - self._by_lane.pop(lane, 0)
            if held:
                self._by_lane[lane] = held

    def forget(self, lanes: Iterable[Lane]) -> None:
        for lane in lanes:
            self.held_bytes -= self._by_lane.pop(lane, 0)

    def was_read(self, lane: Lane, beside: Iterable[Lane]) -> None:
        """Notes a read of a lane; others may have to go, but none of those `beside` it."""
        self.note((lane,))
        self._shrink(beside)

    def durable(self, generation: int) -> None:
        """Notes that what was written up to this commit can be read back."""
        self._durable_generation = generation
        self._shrink()

    def _shrink(self, spared: Iterable[Lane] = ()) -> None:
        """Makes lanes drop what is stored until the rest fits, except those spared."""
        if self.held_bytes <= max(self.bytes_max, self._look_from):
            return
        kept = set(spared)
        kept.update(islice(reversed(self._by_lane), SPARED))
        for lane, before in list(self._by_lane.items()):
            if lane in kept:
                continue
            lane.evict(self._durable_generation)
            self._by_lane[lane] = held = lane.held_bytes
            self.held_bytes += held - before
            if self.held_bytes <= self.bytes_max:
                break
        # What claims are taking from, or is not stored yet, stays. The next look is when an eighth
        # more is held, so that not every commit looks at all of it.
        self._look_from = self.held_bytes + self.held_bytes // 8
