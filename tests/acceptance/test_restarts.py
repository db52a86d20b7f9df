"""Everything dies at once, clocks step, and processes are killed for their memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults import memory_limits
from tests.faults.mixed_work import judged
from tests.faults.restarts import STARVED, STEPPED, TOGETHER, faketime_library, run_restarts
from tests.faults.zombies import HISTORY
from tests.forms import proof

pytestmark = [pytest.mark.stack, pytest.mark.slow]


def lacking(kind: str) -> str:
    """Why a kind of mishap cannot be had on this machine; empty where it can."""
    if kind == STARVED:
        return memory_limits.lacking()
    if kind == STEPPED and not faketime_library():
        return "libfaketime is not installed"
    return ""


@pytest.mark.parametrize(
    ("kind", "rounds"), [(TOGETHER, 1), (STEPPED, 2), (STARVED, 1), proof(TOGETHER, 20)]
)
async def test_nothing_is_lost_or_repeated_when_all_members_suffer(
    kind: str, rounds: int, tmp_path: Path
) -> None:
    if reason := lacking(kind):
        if kind == STEPPED and os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)

    work, done = await run_restarts(tmp_path, rounds, seed=1, kinds=[kind])

    assert done == {kind: rounds}
    assert work.answered
    assert judged(tmp_path / HISTORY) == []
