"""`make faults`: which long runs it has, and what it says of one that cannot run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.local_stack import REPOSITORY

FAULTS = [sys.executable, "-m", "tests.faults"]


def make_faults(folder: Path, forms: str = "") -> subprocess.CompletedProcess[str]:
    """What `make faults` does with `echo` as its Python, which fails for a form named `broken`."""
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@"\n[ "$3" != broken ]\n')
    python.chmod(0o755)
    for stamp in (".stack", ".complete"):
        (folder / stamp).touch()
    # Those of a `make test-slow` around it would be its own otherwise.
    command = ["make", "--silent", f"VENV={folder}", "ARGS=", "faults"]
    if forms:
        command.append(f"FAULTS={forms}")
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_make_faults_has_every_form(tmp_path: Path) -> None:
    usage = subprocess.run(
        [*FAULTS, "--help"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    listed = re.search(r"\{(kills[^}]*)\}", usage)
    assert listed is not None
    run = {line.split()[2] for line in make_faults(tmp_path).stdout.splitlines()}
    assert run == set(listed[1].split(","))


def test_a_form_that_fails_is_named_when_all_others_have_run(tmp_path: Path) -> None:
    done = make_faults(tmp_path, "'broken --seconds 1' rot")
    assert done.stdout.splitlines() == [
        "-m tests.faults broken --seconds 1",
        "-m tests.faults rot",
        "failed: broken --seconds 1",
    ]
    assert done.returncode != 0


@pytest.mark.parametrize("variables", [{}, {"CI": "true"}])
def test_a_form_whose_server_is_not_installed_says_so(
    variables: dict[str, str], tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    done = subprocess.run(
        [*FAULTS, "events", "--backend", "redis", "--publishes", "1"],
        cwd=REPOSITORY,
        env={**environment, **variables, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "events did not run: redis-server is not installed\n"
