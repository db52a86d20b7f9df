"""What `.ci/run` says of tests that were skipped: they were not run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CI_RUN = Path(__file__).parents[2] / ".ci" / "run"

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_tool(number):
    pytest.skip("node and npm are not here: nothing was run")

@pytest.mark.skip(reason="no engine: nothing can be started")
def test_marked():
    assert False

def test_runs():
    print("SKIPPED of no interest")
"""


def test_each_reason_of_skipped_tests_is_a_line_of_what_was_not_run(tmp_path: Path) -> None:
    # Given pytest's output of tests that were skipped, and of others
    (tmp_path / "test_some.py").write_text(TESTS)
    options = ("-ra", "-p", "no:cacheprovider", "--rootdir", str(tmp_path))
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_some.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    # When `.ci/run` looks for them
    found = re.search(r"^skipped_tests\(\) \{$.*?^\}$", CI_RUN.read_text(), re.M | re.S)
    assert found is not None
    script = f"{found[0]}\nskipped_tests"
    lines = subprocess.run(
        ["bash", "-c", script], input=ended.stdout, capture_output=True, text=True, check=True
    ).stdout.splitlines()

    # Then it has a line for each reason
    assert sorted(lines) == [
        "1 skipped in test_some.py: no engine: nothing can be started",
        "3 skipped in test_some.py: node and npm are not here: nothing was run",
    ]
