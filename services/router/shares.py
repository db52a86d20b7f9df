"""Filters that hold up a log together, each within its own bounds: the costliest are left out.

A filter alone has an allowance (`libs/filters/allowance.py`), in which short evaluations are free;
many of them add up. So the time of each queue is summed up for as long as a window lasts. At its
end the costliest queues come into quarantine if all of this holds:

- filters took over `SHARE` of the time in which this link had the event loop, or nothing to judge;
- they took over `MESSAGE_NS` of the processor for each message: less is the work of routing much,
  or of a machine that others keep busy;
- a log is behind, and no less than at the beginning of the window: it does not catch up.

How long messages wait is known by two clocks, ingest's and this machine's, so a log is behind that
waits for longer than it lately did. So the backlog with which a router starts is none that filters
are at fault for, before it grows; nor is for long what a clock that was set adds.

Those go whose part of the filters' time makes up a `STEP`, and no more before the next window:
where a little was too much, few lose their place. Replays are judged by rules of their own, at
times of their own: neither counts here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from libs.filters import TooSlow

WINDOW_NS: Final = 10_000_000_000

SHARE: Final = 0.5
"""Of the time, the part that filters may take while a log waits."""

MESSAGE_NS: Final = 1_000_000
"""For each message, the processor time that filters may take: a router routes some 900 messages a
second then."""

BEHIND_MS: Final = 2_000
"""A log is behind whose messages wait for over this much longer than they lately did: one without
matches is held for a second anyway."""

WINDOWS: Final = 30
"""The windows of which the least waits are kept together, and then for as many more: what counts
as lately is five to ten minutes, or more."""

STEP: Final = 0.25
"""The part of the filters' time that the costliest queues must have had to go at once."""


class FilterShare:
    """What the filters of one broker shard's queues take in one window."""

    def __init__(self, waits_ms: Mapping[int, int], before: FilterShare | None = None) -> None:
        """Begin, after the window `before`, with how long the oldest message of each log waits."""
        self._waits_ms = dict(waits_ms)
        self._least_ms: dict[int, int] = {}
        self._earlier_ms: dict[int, int] = {}
        self._over_count = 0  # Not those that ended early, as the broker was lost.
        if before is not None:
            self._least_ms, self._earlier_ms = dict(before._least_ms), before._earlier_ms
            self._over_count = before._over_count + before.is_over
        if self._over_count == WINDOWS:
            self._least_ms, self._earlier_ms, self._over_count = {}, self._least_ms, 0
        for log, wait_ms in waits_ms.items():
            self._least_ms[log] = min(wait_ms, self._least_ms.get(log, wait_ms))
        self._time_ns = self._judging_ns = self._processor_ns = 0
        self._messages_count = 0

    def add_judging(self, messages_count: int, time_ns: int, processor_ns: int) -> None:
        """Count time in which this many messages were judged, and what it had of the processor."""
        self._messages_count += messages_count
        self._time_ns += time_ns
        self._judging_ns += time_ns
        self._processor_ns += processor_ns

    def add_pause(self, time_ns: int) -> None:
        """Count time in which there was nothing to judge."""
        self._time_ns += time_ns

    @property
    def is_over(self) -> bool:
        """Whether this window has ended."""
        return self._time_ns >= WINDOW_NS

    def too_slow(self, spent_ns: Mapping[str, int], waits_ms: Mapping[int, int]) -> list[TooSlow]:
        """The queues to leave out, by what each has spent and how long messages wait by now."""
        filters_ns = sum(spent_ns.values())
        share = filters_ns / self._time_ns
        processor_part = self._processor_ns / max(self._judging_ns, 1)
        message_ns = filters_ns * processor_part / max(self._messages_count, 1)
        if share <= SHARE or message_ns <= MESSAGE_NS or not self._is_behind(waits_ms):
            return []
        costliest, left_ns = [], STEP * filters_ns
        for queue_id in sorted(spent_ns, key=lambda one: (-spent_ns[one], one)):
            if left_ns <= 0:
                break
            left_ns -= spent_ns[queue_id]
            part = spent_ns[queue_id] / filters_ns
            costliest.append(
                TooSlow(
                    queue_id,
                    f"filters and priorities took {message_ns / 1e6:.1f} ms for each message, "
                    f"{share:.0%} of the router's time, while a log was behind; {part:.0%} of that "
                    "was this queue's, among the costliest",
                )
            )
        return costliest

    def _is_behind(self, waits_ms: Mapping[int, int]) -> bool:
        return any(
            wait_ms >= self._waits_ms[log] and wait_ms - self._lately_ms(log) > BEHIND_MS
            for log, wait_ms in waits_ms.items()
            if log in self._waits_ms
        )

    def _lately_ms(self, log: int) -> int:
        least_ms = self._least_ms[log]
        return min(least_ms, self._earlier_ms.get(log, least_ms))
