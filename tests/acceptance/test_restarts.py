"""Everything dies at once, clocks step, and processes are killed for their memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from tests.faults import memory_limits
from tests.faults.mixed_work import judged
from tests.faults.restarts import STARVED, STEPPED, TOGETHER, faketime_library, run_restarts
from tests.faults.zombies import HISTORY
from tests.forms import proof

pytestmark = [pytest.mark.stack, pytest.mark.slow]


def leave_out(kind: str, reason: str) -> NoReturn:
    """Skip a kind of mishap; CI, which installs what is missing, must have it where it can."""
    is_due = kind == STEPPED or (kind == STARVED and memory_limits.is_permitted())
    if is_due and os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def lacking(kind: str) -> str:
    """Why a kind of mishap cannot be had on this machine; empty where it can."""
    if kind == STARVED:
        return memory_limits.lacking()
    if kind == STEPPED and not faketime_library():
        return "libfaketime is not installed"
    return ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make cgroups")
def test_cgroups_that_ci_could_have_fail_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Given a machine whose memory controller is not enabled
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(memory_limits, "V1", tmp_path / "absent")
    monkeypatch.setattr(memory_limits, "V2", tmp_path)
    reason = lacking(STARVED)
    assert "not enabled" in reason

    # Then CI fails, and where no cgroup can be made at all, it skips
    with pytest.raises(pytest.fail.Exception, match="not enabled"):
        leave_out(STARVED, reason)
    monkeypatch.setattr(memory_limits, "V2", tmp_path / "absent")
    with pytest.raises(pytest.skip.Exception):
        leave_out(STARVED, lacking(STARVED))


@pytest.mark.parametrize(
    ("kind", "rounds"), [(TOGETHER, 1), (STEPPED, 2), (STARVED, 1), proof(TOGETHER, 20)]
)
async def test_nothing_is_lost_or_repeated_when_all_members_suffer(
    kind: str, rounds: int, tmp_path: Path
) -> None:
    if reason := lacking(kind):
        leave_out(kind, reason)

    work, done = await run_restarts(tmp_path, rounds, seed=1, kinds=[kind])

    assert done == {kind: rounds}
    assert work.answered_count
    assert judged(tmp_path / HISTORY) == []
