"""Owners that stand still for longer than the store keeps what they last read."""

from pathlib import Path

import pytest

from tests.faults.frozen import run_frozen
from tests.faults.mixed_work import judged
from tests.faults.zombies import HISTORY
from tests.forms import proof

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.mark.parametrize(("rounds", "seconds"), [(2, 0.0), proof(2, 120.0)])
async def test_a_replaced_owner_whose_wal_was_collected_answers_nothing_and_loses_nothing(
    tmp_path: Path, rounds: int, seconds: float
) -> None:
    # When owners, and the router, are frozen until the WAL of the owner has gone
    work = await run_frozen(tmp_path, rounds, seconds)

    # Then they have ended as fenced, the router goes on, and every answered message came
    assert work.answered_count
    assert judged(tmp_path / HISTORY) == []
