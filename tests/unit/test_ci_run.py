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


FLAKY_MAX = 2


@pytest.mark.parametrize(
    ("results", "broken", "fails", "flaky"),
    [
        ("0", 0, False, 0),
        ("1 0", FLAKY_MAX, False, FLAKY_MAX),
        ("1 0", FLAKY_MAX + 1, True, FLAKY_MAX + 1),
        ("1 0", 0, True, 0),
        ("1 1", 1, True, 0),
        ("137", 1, True, 0),
    ],
    ids=["pass", "pass alone", "too many do", "the run failed", "fail twice", "out of time"],
)
def test_tests_that_pass_only_when_run_again_alone_are_named_and_few_of_them_fail_nothing(
    results: str, broken: int, fails: bool, flaky: int, tmp_path: Path
) -> None:
    # Given what the first run of the tests and that of the failed ones end with
    log = tmp_path / "log"
    names = [f"tests/test_it.py::test[a name {number}]" for number in range(broken)]
    log.write_text("".join(f"FAILED {name} - assert 1 - 1\n" for name in names))
    script = f"""
        results=({results}) tests_log={log} not_run=() flaky=() FLAKY_MAX={FLAKY_MAX}
        within_time() {{
            local result=${{results[0]}}
            results=("${{results[@]:1}}")
            return $result
        }}
        {function("skipped_tests")}
        {function("broken_tests")}
        {function("tests")}
        tests test
        result=$?
        printf 'FLAKY %s\n' "${{flaky[@]}}"
        exit $result
    """
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True)

    assert bool(ended.returncode) is fails, ended.stderr
    named = re.findall(r"^FLAKY (.+)$", ended.stdout, re.MULTILINE)
    assert named == names[:flaky]


def test_ci_lets_as_many_flaky_tests_pass_as_these_do() -> None:
    assert f"\nFLAKY_MAX={FLAKY_MAX}\n" in CI_RUN.read_text()


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
