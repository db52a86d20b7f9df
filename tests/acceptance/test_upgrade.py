"""A rolling upgrade under load, from the last tag."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.mixed_work import judged
from tests.faults.upgrade import NoUpgrade, last_version, run_upgrade, unpack
from tests.faults.zombies import HISTORY

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.mark.proof
async def test_a_rolling_upgrade_under_load_loses_nothing(tmp_path: Path) -> None:
    try:
        work = await run_upgrade(tmp_path, last_version(), seed=1)
    except NoUpgrade as reason:
        pytest.skip(str(reason))

    assert work.answered_count
    assert judged(tmp_path / HISTORY) == []


def test_a_commit_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoUpgrade, match="no-such-commit is not in this checkout"):
        unpack("no-such-commit", tmp_path)
