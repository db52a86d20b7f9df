"""Where runs have their temporary files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from services.janitor.runs.folders import PREFIX, remove_left, run_folders
from tests.integration.ingest.server import ROOT

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The janitor's own folder for temporary files."""
    (folder := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_run_has_a_folder_of_its_own_for_python_and_java(temporary: Path) -> None:
    with run_folders({"SPARK_SUBMIT_OPTS": "-Da=b"}) as one, run_folders({}) as other:
        folders = [Path(variables["TMPDIR"]) for variables in (one, other)]
        assert sorted(folders) == sorted(temporary.iterdir())
        assert len(folders) == 2
        # What comes later wins.
        assert one["SPARK_SUBMIT_OPTS"] == f"-Djava.io.tmpdir={folders[0]} -Da=b"
        assert "SPARK_LOCAL_DIRS" not in one
        (folders[0] / "blockmgr-1").mkdir()
        (folders[0] / "blockmgr-1" / "shuffle.data").touch()

    assert list(temporary.iterdir()) == []


def test_shuffle_data_are_where_the_operator_wants_them_and_go_with_the_run(tmp_path: Path) -> None:
    disks = [tmp_path / "disks" / "1", tmp_path / "disks" / "2"]

    with run_folders({"SPARK_LOCAL_DIRS": ",".join(map(str, disks))}) as variables:
        folders = [Path(folder) for folder in variables["SPARK_LOCAL_DIRS"].split(",")]
        assert [list(disk.iterdir()) for disk in disks] == [[folder] for folder in folders]

    assert [list(disk.iterdir()) for disk in disks] == [[], []]


@pytest.mark.parametrize("name", ["JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS"])
def test_java_has_its_files_where_an_option_of_the_operator_says(name: str) -> None:
    with run_folders({name: "-Xss2m -Djava.io.tmpdir=/var/tmp"}) as variables:
        assert "SPARK_SUBMIT_OPTS" not in variables
    with run_folders({name: "-Xss2m"}) as variables:
        assert "SPARK_SUBMIT_OPTS" in variables


KILLED = """
import os, pathlib, signal
from services.janitor.runs.folders import run_folders
with run_folders(os.environ) as variables:
    pathlib.Path(variables["TMPDIR"], "file").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_killed_janitors_have_left_is_removed_and_what_is_in_use_stays(
    tmp_path: Path, temporary: Path
) -> None:
    # Given folders of a janitor that was killed, one of a run, and what only looks like one
    (disk := tmp_path / "disk").mkdir()
    environ = {**os.environ, "TMPDIR": str(temporary), "SPARK_LOCAL_DIRS": str(disk)}
    killed = subprocess.run([sys.executable, "-c", KILLED], env=environ, cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    (left,) = temporary.iterdir()
    assert list(left.iterdir())
    (other := tmp_path / "other").mkdir()
    (link := temporary / f"{PREFIX}link").symlink_to(other)
    (file := temporary / f"{PREFIX}file").touch()
    with run_folders({}) as variables:
        # When a janitor starts
        remove_left(environ)

        # Then only the first ones are removed
        assert set(temporary.iterdir()) == {Path(variables["TMPDIR"]), link, file}
        assert list(disk.iterdir()) == []
        assert other.exists()


def test_a_folder_that_another_janitor_takes_for_one_that_was_left_is_replaced(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a janitor that starts just when another one has made a folder
    made: list[str] = []

    def make(**where: Any) -> str:
        made.append(mkdtemp(**where))
        if len(made) == 1:
            remove_left({})
        return made[-1]

    mkdtemp = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", make)

    # Then that run has another folder
    with run_folders({}) as variables:
        assert [variables["TMPDIR"]] == made[1:] == [str(one) for one in temporary.iterdir()]


def test_no_run_waits_for_the_removal_of_what_killed_janitors_have_left(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a folder that takes long to remove
    (left := temporary / f"{PREFIX}left").mkdir()
    may_remove = threading.Event()

    def remove(path: Path, ignore_errors: bool) -> None:
        if path == left:
            may_remove.wait(WAIT_S)
        rmtree(path, ignore_errors=ignore_errors)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", remove)

    # When a run begins and ends
    with run_folders({}) as variables:
        assert set(temporary.iterdir()) == {Path(variables["TMPDIR"]), left}

    # Then its own folder is gone, and the other one goes later
    assert list(temporary.iterdir()) == [left]
    may_remove.set()
    until_s = time.monotonic() + WAIT_S
    while left.exists():
        assert time.monotonic() < until_s
        time.sleep(0.01)
