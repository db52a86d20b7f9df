"""Ranges applied whole, as by a caller that has the shard for itself."""

from __future__ import annotations

from collections.abc import Sequence

from services.broker.core.commands import Range
from services.broker.core.lists.replays import Counts
from services.broker.core.queue import Queue
from services.broker.core.shard import RangeApplication, Shard


def assign_all(shard: Shard, ranges: Sequence[Range], now_ms: int) -> list[bool]:
    """Applies those ranges that begin where their log's cursor is; gives which."""
    return [finished(shard, shard.begin(piece), now_ms) for piece in ranges]


def backfill_whole(shard: Shard, queue: Queue, piece: Range, counts: Counts, now_ms: int) -> bool:
    """Applies a piece of a queue's replay if it begins at the cursor; returns whether it did."""
    return finished(shard, shard.begin_backfill(queue, piece, counts), now_ms)


def finished(shard: Shard, application: RangeApplication | None, now_ms: int) -> bool:
    """Takes all steps of what was begun, if anything was."""
    while application is not None and not application.is_done:
        changed = application.step(now_ms)
        if not application.is_done:
            shard.drain_early(changed, now_ms)
    return application is not None
