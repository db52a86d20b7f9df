"""That a world is the consequence of its seed: shrinking rests on it, and every report of a fault.

A mishap that is left out must be all that differs between two runs. So neither the command line nor
the addresses of objects, nor the hashes of texts, may be in the order of what the services do.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forms import proof
from tests.simulation.seeds import Settings, run_seed

BUSY = Settings(messages=20, mishaps=2.0)

SEEDS = ("4", proof("9"))
"""The first has a janitor and events; both have replays, redrives or commands."""

CLOCKS = "(time|monotonic|perf_counter|process_time|thread_time|clock_gettime)(_ns)?"

LEFT = """
import inspect, time
from tests.simulation.chance import install
install("4")
print(*(name for name in dir(time) if inspect.isbuiltin(getattr(time, name))))
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_takes_the_same_way_by_other_hashes_and_in_other_memory(
    seed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    first = run_seed(seed, BUSY)
    assert first["violation"] == ""
    assert first["mishaps"], "nothing happened"
    # Other arguments and variables move all of a process's memory, beside what the system moves.
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    monkeypatch.setenv("MOVES_MEMORY", "x" * 5000)
    trace = tmp_path / "trace"
    second = run_seed(seed, BUSY, [9999], ["--log", "ERROR", "--trace", str(trace)])
    assert first == second
    assert len(trace.read_text().splitlines()) == first["steps"]


def test_a_world_reads_no_clock_of_this_machine() -> None:
    command = [sys.executable, "-c", LEFT]
    left = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    assert "sleep" in left
    assert [name for name in left if re.fullmatch(CLOCKS, name)] == []
