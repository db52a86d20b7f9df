"""What `.ci/run` says of tests that were skipped, and of those that pass at the second try."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def function(name: str) -> str:
    """A function of `.ci/run`."""
    found = re.search(rf"^{name}\(\) \{{.*?^\}}$", CI_RUN.read_text(), re.M | re.S)
    assert found is not None
    return found[0]


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
    script = f"{function('skipped_tests')}\nskipped_tests"
    lines = subprocess.run(
        ["bash", "-c", script], input=ended.stdout, capture_output=True, text=True, check=True
    ).stdout.splitlines()

    # Then it has a line for each reason
    assert sorted(lines) == [
        "1 skipped in test_some.py: no engine: nothing can be started",
        "3 skipped in test_some.py: node and npm are not here: nothing was run",
    ]


@pytest.mark.parametrize(
    ("results", "fails", "is_flaky"),
    [("0", False, False), ("1 0", True, True), ("1 1", True, False), ("137", True, False)],
    ids=["all pass", "pass alone", "fail twice", "out of time"],
)
def test_tests_that_pass_only_when_run_again_alone_fail_the_run_and_are_named_flaky(
    results: str, fails: bool, is_flaky: bool
) -> None:
    # Given what the first run of the tests and that of the failed ones end with
    script = f"""
        results=({results}) tests_log=/dev/null not_run=()
        within_time() {{
            local result=${{results[0]}}
            results=("${{results[@]:1}}")
            return $result
        }}
        {function("skipped_tests")}
        {function("tests")}
        tests test
    """
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True)

    assert bool(ended.returncode) is fails, ended.stderr
    assert ("FLAKY" in ended.stdout) is is_flaky


@pytest.mark.parametrize("word", ["test", "test-slow"])
def test_ci_runs_the_tests_of_both_words(word: str) -> None:
    assert re.search(rf"^step '.+' tests {word}$", CI_RUN.read_text(), re.MULTILINE)


LONG = ("bench", "compose-test", "faults", "fuzz", "mutants", "nightly", "proofs", "simulate")
"""Words of `make` that CI runs nothing of, or only short forms."""


@pytest.mark.parametrize("word", LONG)
def test_what_ci_has_no_time_for_is_named_at_its_end(word: str) -> None:
    ends = re.findall(r"^not_run\+=\(\n(.*?)^\)", CI_RUN.read_text(), re.M | re.S)

    assert f"(make {word})" in "".join([*ends, function("containers")])


def test_a_night_begins_with_worlds_of_its_own() -> None:
    tree = CI_RUN.parents[1]
    command = ["make", "--dry-run", "--silent", "nightly"]
    said = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout

    [first] = re.findall(r"-m tests\.simulation .*--first (\d+)", said)
    assert int(first) > 20_000_000, "a thousand worlds for each day since 1970"
    assert "-m tests.fuzz" in said


TOOLS = (
    "chromium-headless-shell",
    "docker-compose",
    "faketime",
    "kubectl",
    "prometheus",
    "promtool",
    "strace",
)
"""Without one of these, tests fail in CI."""


@pytest.mark.parametrize("tool", TOOLS)
def test_a_step_looks_for_each_tool_that_tests_need_in_ci(tool: str) -> None:
    steps = re.findall(r"^step '.+' (have_\w+)$", CI_RUN.read_text(), re.MULTILINE)

    assert [step for step in steps if re.search(rf"command -v [^>]*\b{tool}\b", function(step))]
