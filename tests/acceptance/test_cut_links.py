"""Links between processes that are cut, delayed, swallow data and become half-open."""

from pathlib import Path

import pytest

from tests.faults.cut_links import DELAY, run_network
from tests.faults.mixed_work import judged
from tests.faults.network import Kind
from tests.faults.zombies import HISTORY
from tests.forms import proof

pytestmark = [pytest.mark.stack, pytest.mark.slow]

KINDS = {DELAY, *(kind.value for kind in Kind if kind is not Kind.PASS)}


@pytest.mark.parametrize(("seconds", "least"), [(10.0, 0), proof(180.0, 1)])
async def test_troubles_of_links_lose_nothing_and_repeat_nothing(
    tmp_path: Path, seconds: float, least: int
) -> None:
    # When links are in trouble, two at a time, for a while
    work, met = await run_network(tmp_path, seconds, seed=1)

    # Then each trouble met connections, and the history is without a fault
    assert set(met) <= KINDS
    assert sum(met.values()) > 0
    assert all(met.get(kind, 0) >= least for kind in KINDS), met
    assert work.answered_count
    assert judged(tmp_path / HISTORY) == []
