"""Owners whose disk is full for a while."""

from pathlib import Path

import pytest

from tests.faults.full_disk import run_full_disk
from tests.faults.mixed_work import judged
from tests.faults.zombies import HISTORY
from tests.forms import proof

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.mark.parametrize(("rounds", "settled_s"), [(1, 0.0), proof(10, 8.0)])
async def test_a_full_disk_ends_owners_loudly_and_loses_nothing_that_was_answered(
    tmp_path: Path, rounds: int, settled_s: float
) -> None:
    # When a disk is full while messages flow, and there is room again once the owner has ended
    work = await run_full_disk(tmp_path, rounds, seed=1, settled_s=settled_s)

    # Then the shard has opened again, and every answered message came, stored once
    assert work.answered_count
    assert judged(tmp_path / HISTORY) == []
