"""What is in `examples/` runs, as people run it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.local_stack import REPOSITORY, LocalStack
from tests.forms import proof, shortly
from tests.integration.events.backends.servers import program

pytestmark = pytest.mark.stack


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=dict(os.environ) | environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def demo(folder: Path, *arguments: str) -> tuple[int, Any]:
    ended = run("-m", "examples.demo", "--json", *arguments, TMPDIR=str(folder))
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


SECURED = ("--secured",)


@pytest.mark.slow  # Forgotten messages come back after their lease.
@pytest.mark.parametrize("form", shortly([(), SECURED], ()))
def test_the_demo_accounts_for_every_entry_and_leaves_nothing_behind(
    form: tuple[str, ...], tmp_path: Path
) -> None:
    code, result = demo(tmp_path, "--messages", "800", *form)

    assert (code, result["ok"], result["faults"]) == (0, True, [])
    assert (result["published"], result["lost"]) == (800, 0)
    for queue in result["queues"].values():
        assert queue["routed"] == queue["acked"] + queue["failed"] > 0
    assert sum(queue["redelivered"] for queue in result["queues"].values()) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.proof
def test_the_demo_fails_when_one_delivery_is_dropped_from_the_notes(tmp_path: Path) -> None:
    """Its short form is that of the judge, in tests/unit/examples/test_demo_judge.py."""
    code, result = demo(tmp_path, "--messages", "200", "--sabotage")

    assert (code, result["ok"], result["lost"]) == (1, False, 1)


@pytest.mark.slow  # Two servers are killed; what a dead one had comes again after 30 s.
@pytest.mark.parametrize(
    ("backend", "form"), [("redis", SECURED), proof("redis", ()), proof("slatemq", ())]
)
def test_the_demo_of_tasks_loses_nothing_and_stores_nothing_twice(
    backend: str, form: tuple[str, ...], tmp_path: Path
) -> None:
    if backend == "redis":
        program("redis-server")
    code, result = demo(tmp_path, "--events", "--backend", backend, "--messages", "300", *form)

    assert (code, result["ok"], result["faults"]) == (0, True, [])
    assert result["backend"] == backend
    assert (result["published"], result["lost"], result["doubled"]) == (300, 0, 0)
    assert result["applied"] == result["arrived"] == 300
    # A repeated request of a task that is applied already is none.
    assert 20 <= result["tasks"] <= 30
    assert [phase["published"] > 0 for phase in result["phases"].values()] == [True] * 3
    assert list(tmp_path.iterdir()) == []


def test_the_quick_start_publishes_and_consumes(stack: LocalStack) -> None:
    first = run("examples/quickstart.py", stack.endpoint)
    again = run("examples/quickstart.py", SLATEMQ_ENDPOINT=stack.endpoint)

    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.splitlines()[-2:] == ["processed 'anvil'", "processed 'tunnel paint'"]
    assert (again.returncode, again.stderr) == (0, "")
    assert "from an earlier run" in again.stdout


@pytest.mark.parametrize("arguments", [("127.0.0.1:1",), ()])
def test_the_quick_start_says_in_a_line_that_no_server_is_there(arguments: tuple[str, ...]) -> None:
    ended = run("examples/quickstart.py", *arguments, SLATEMQ_ENDPOINT="127.0.0.1:1")

    assert ended.returncode == 1
    assert "127.0.0.1:1 is not reachable" in ended.stderr
    assert "`make up` starts a stack" in ended.stderr
    assert "Traceback" not in ended.stderr
