"""A range of a log, or a piece of a replay, applied to its queues in steps. Pure, like the shard.

    begin: refusals; replays, cursor ──► step ──► step ──► … ──► done ──► a commit may begin

The cursor moves first, so commands between two steps see the range as routed: a queue created then
begins behind it, and a quarantine leaves to a replay what comes behind it. What was begun must be
finished, since no commit may have a part of it: see `ShardOwner.apply`.

After each step but the last the records of its queues are encoded (`Shard.drain_early`): for ten
thousand queues that takes as long as adding their messages did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from services.broker.core.commands import Assignment
from services.broker.core.queue import Queue
from services.broker.core.waiting.lane import READY_BUCKET_MAX

STEP_MATCHES: Final = 4 * READY_BUCKET_MAX
"""Messages that one step adds to queues at most: some 6 ms if each has its own priority."""

STEP_QUEUES: Final = 64
"""Queues that one step changes at most: some 6 ms, with their records."""


class RangeApplication:
    """What is left of a range to be added to queues."""

    def __init__(self, queues: Mapping[str, Queue], assignments: Iterable[Assignment]) -> None:
        """Apply these to the queues that exist now, except those deleted meanwhile.

        `queues` are those of the shard, by ID; each step looks at them again.
        """
        self._queues = queues
        self._left = deque((queues[one.queue_id], one) for one in assignments)

    @property
    def is_done(self) -> bool:
        return not self._left

    def step(self, now_ms: int) -> list[Queue]:
        """Adds at most STEP_MATCHES messages to STEP_QUEUES queues; returns these queues."""
        left = self._left
        room, changed = STEP_MATCHES, dict[Queue, None]()
        while left and room and len(changed) < STEP_QUEUES:
            queue, assignment = left.popleft()
            if self._queues.get(queue.queue_id) is not queue:
                continue
            now, later = assignment.split(room)
            queue.waiting.assign(*now[1:], now_ms)
            changed[queue] = None
            room -= len(now.message_ids)
            if later is not None:
                left.appendleft((queue, later))
        return list(changed)
