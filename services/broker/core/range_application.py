"""A range of a log, or a piece of a replay, brought into its queues in steps. Pure, like the shard.

    begin: what is refused; replays, cursor ──► step ──► step ──► … ──► done ──► a commit may begin

The cursor moves first. So what other commands do between two steps meets a range that is routed: a
queue made then begins behind it, and a quarantine leaves to a replay what comes behind it. What was
begun must be brought to its end, since no commit may have a part of it: see `ShardOwner.apply`.

After each step but the last the records of its queues are encoded (`Shard.drain_early`): for ten
thousand queues a commit would take as long for that as their messages took to come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from libs.storage.records.queues import AvailableMessage
from services.broker.core.commands import Assignment
from services.broker.core.queue import Queue
from services.broker.core.settings import DEFAULT_PRIORITY
from services.broker.core.waiting.bucket import Columns
from services.broker.core.waiting.lane import READY_BUCKET_MAX

STEP_MATCHES: Final = 4 * READY_BUCKET_MAX
"""Messages that one step brings into queues at most: some 6 ms where each has its own priority."""

STEP_QUEUES: Final = 64
"""Queues that one step changes at most: some 6 ms, with their records."""


class RangeApplication:
    """What is left of a range to be brought into queues."""

    def __init__(self, queues: Mapping[str, Queue], assignments: Iterable[Assignment]) -> None:
        """Applies these to the queues that exist now, except to those that are deleted meanwhile.

        `queues` are those of the shard, by ID: it is looked at again in each step.
        """
        self._queues = queues
        self._left = deque((queues[one.queue_id], one) for one in assignments)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left."""
        return not self._left

    def step(self, now_ms: int) -> list[Queue]:
        """Brings STEP_MATCHES messages into STEP_QUEUES queues at most; gives these queues."""
        left = self._left
        room, changed = STEP_MATCHES, dict[Queue, None]()
        while left and room and len(changed) < STEP_QUEUES:
            queue, assignment = left.popleft()
            if self._queues.get(queue.queue_id) is not queue:
                continue
            now, later = assignment.split(room)
            bring_in(queue, now, now_ms)
            changed[queue] = None
            room -= len(now.message_ids)
            if later is not None:
                left.appendleft((queue, later))
        return list(changed)


def bring_in(queue: Queue, assignment: Assignment, now_ms: int) -> None:
    """Brings messages into their queue."""
    _, ids, priorities, deadlines, visible = assignment
    if not (priorities or visible) and (not deadlines or min(deadlines) > queue.seen_until(now_ms)):
        queue.add_new(Columns(ids, DEFAULT_PRIORITY, deadlines), now_ms)
        return
    count = len(ids)
    seen_until_ms = queue.seen_until(now_ms)
    ready: dict[int, list[AvailableMessage]] = {}
    rows = zip(
        ids,
        priorities or (DEFAULT_PRIORITY,) * count,
        deadlines or (0,) * count,
        visible or (0,) * count,
        strict=True,
    )
    for message_id, priority, deadline_ms, visible_at_ms in rows:
        if 0 < deadline_ms <= seen_until_ms:
            queue.expired_count += 1
            continue
        item = AvailableMessage(message_id, priority, visible_at_ms, deadline_ms, 0)
        if visible_at_ms > seen_until_ms:
            queue.add_delayed(priority, item)
        else:
            ready.setdefault(priority, []).append(item)
    for priority, items in ready.items():
        queue.add_ready(priority, items, now_ms)
