"""The long runs of `python -m tests.faults events`, in their short form."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.events.settings import Consistency
from tests.faults.event_runs import BACKEND, INGEST, run_events, victims_of
from tests.faults.verified import faults_below
from tests.forms import proof

pytestmark = pytest.mark.slow  # Processes are killed and started again.


@pytest.mark.parametrize(
    ("mode", "victims"),
    [
        # Kills in write-through are in test_write_through, and of an ingest in test_async_kills.
        proof("write-through", (INGEST, BACKEND)),
        ("async", (BACKEND,)),
    ],
)
def test_kills_lose_and_double_nothing(
    mode: Consistency, victims: tuple[str, ...], tmp_path: Path
) -> None:
    run = run_events(tmp_path, mode, "redis", 400, victims, down_s=1)
    assert [*run.faults(), *faults_below(tmp_path)] == []
    assert run.failed_calls or mode == "write-through"


@pytest.mark.proof
@pytest.mark.parametrize("backend", ["redis", "redis-lists", "slatemq", "rabbitmq", "kafka"])
@pytest.mark.parametrize("mode", ["write-through", "async", "sync"])
def test_many_kills_lose_and_double_nothing(
    mode: Consistency, backend: str, tmp_path: Path
) -> None:
    run = run_events(tmp_path, mode, backend, 2_000, victims_of(3, seed=1), down_s=5)
    assert [*run.faults(), *faults_below(tmp_path)] == []


def test_a_run_that_left_no_instance_is_not_taken_for_one_without_faults(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        faults_below(tmp_path)
