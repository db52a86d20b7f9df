"""Runs a random history on brokers that restart at random points."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from libs.storage.database.roots import open_root
from services.broker.shard import lost_time, owner
from tests.integration.broker.core.differential import Differential
from tests.integration.broker.rig import Disk, Ingest, running
from tests.manual_clock import ManualClock

COMPARED_EVERY = 100


async def run_history(
    folder: Path,
    seed: int,
    commands: int,
    restarts: int,
    report: Callable[[int], None] = lambda done: None,
) -> int:
    """Gives how many commands were run; raises AssertionError where broker and model differ."""
    with pytest.MonkeyPatch.context() as patch:
        # The histories' time is their own: a busy machine gives no lease more of it.
        patch.setattr(lost_time, "STANDSTILL_S", math.inf)
        patch.setattr(owner, "OVERDUE_MS", math.inf)
        return await _run(folder, seed, commands, restarts, report)


async def _run(
    folder: Path, seed: int, commands: int, restarts: int, report: Callable[[int], None]
) -> int:
    history = Differential(seed)
    clock, ingest = ManualClock(), Ingest()
    chosen = random.Random(seed)
    ends = [*sorted(chosen.sample(range(1, commands), restarts)), commands]
    for end in ends:
        disk = Disk()
        root = open_root(folder.as_uri())
        root.durability = disk
        clock.advance(1)
        async with running(root, clock, ingest, disk, history.pushes) as rig:
            await history.use(rig)
            while history.done_count < end:
                await history.steps(min(COMPARED_EVERY, end - history.done_count))
                await history.compare()
                report(history.done_count)
    return history.done_count
