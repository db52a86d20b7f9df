"""The janitor's side of the process that a run has."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.janitor.runs import child
from services.janitor.runs.child import Child
from tests import timed_uvloop
from tests.integration.ingest.server import ROOT
from tests.integration.janitor.runs.janitors import WAIT_S, until

SAYS = 'import sys; sys.stdin.readline(); print(\'{"progress": 1}\\n{"end": "done"}\')'


def test_files_opened_after_a_run_stay_open_when_what_it_read_with_is_collected() -> None:
    async def run_and_open() -> None:
        # Given runs that have ended
        for _ in range(3):
            heard: list[object] = []
            end = await Child([sys.executable, "-c", SAYS], heard.append).work({"job": "any"})
            assert (end, heard) == ({"end": "done"}, [{"progress": 1}])
        # When other files get the numbers of its pipes, and the rest of it is collected
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
        gc.collect()
        await asyncio.sleep(0.1)
        # Then those are still open
        for file in files:
            os.close(file)

    with asyncio.Runner(loop_factory=timed_uvloop.Loop) as runner:
        runner.run(run_and_open())


class SlowlyTasked(Child):
    """Its task is written only once the test says so."""

    def __init__(self, command: list[str], heard: list[object]) -> None:
        super().__init__(command, heard.append)
        self.writes, self.may_write = threading.Event(), threading.Event()

    def _send(self, line: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.writes.set()
            self.may_write.wait()
        super()._send(line)


ECHOES = """
import json, sys
print(json.dumps({"heard": sys.stdin.readline()}), flush=True)
print(json.dumps({"end": sys.stdin.readline()}), flush=True)
"""


async def test_a_run_that_is_cancelled_while_its_task_is_written_gets_the_task_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child, "CANCEL_S", WAIT_S)
    heard: list[object] = []
    run = SlowlyTasked([sys.executable, "-c", ECHOES], heard)
    work = asyncio.create_task(run.work({"job": "any"}))
    await asyncio.to_thread(run.writes.wait)

    run.cancel()
    run.may_write.set()

    assert await work == {"end": "cancel\n"}
    assert heard == [{"heard": '{"job": "any"}\n'}]


STARTS = """
import json, subprocess, sys
sys.stdin.readline()
started = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdin=subprocess.PIPE)
print(json.dumps({"pid": started.pid}))
print('{"end": "done"}')
"""
"""Starts another process in its group, which gets the end of its stdin when this one ends."""

REMOVES = """
import pathlib, sys, time
sys.stdin.read()
time.sleep(0.2)
pathlib.Path(sys.argv[1]).rmdir()
"""


async def test_what_a_child_has_started_may_remove_its_files_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "EXIT_S", WAIT_S)
    (folder := tmp_path / "files").mkdir()

    end = await Child([sys.executable, "-c", STARTS, REMOVES, str(folder)], print).work({})

    assert end == {"end": "done"}
    assert not folder.exists()


async def test_what_a_child_has_started_is_killed_when_it_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child, "EXIT_S", 0.5)
    heard: list[Mapping[str, Any]] = []
    stays = "import time\nwhile True: time.sleep(60)"

    await Child([sys.executable, "-c", STARTS, stays], heard.append).work({})

    await until(lambda: state_of(heard[0]["pid"]) in ("", "Z"))


def state_of(pid: int) -> str:
    """The state of a process as the kernel abbreviates it; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


DIES = """
import os, pathlib, signal, sys, tempfile
sys.stdin.readline()
(folder := pathlib.Path(tempfile.gettempdir())).joinpath("file").touch()
print('{"folder": "%s"}' % folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_temporary_files_of_a_run_that_dies_go_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    heard: list[Mapping[str, Any]] = []

    end = asyncio.run(Child([sys.executable, "-c", DIES], heard.append).work({}))

    assert end["end"] == "lost"
    assert Path(heard[0]["folder"]).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


FIRST = """
import asyncio, ctypes, os, sys
from services.janitor.runs.child import Child
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
asyncio.run(Child([sys.executable, "-c", *sys.argv[1:]], print).work({}))
os.waitpid(-1, os.WNOHANG)
"""
"""Gets the orphans of its processes, as the first process of a container does."""


@pytest.mark.skipif(sys.platform != "linux", reason="no other system has such a process")
def test_no_process_is_left_of_a_run_of_a_janitor_that_is_the_first_process(tmp_path: Path) -> None:
    (folder := tmp_path / "files").mkdir()

    command = [sys.executable, "-c", FIRST, STARTS, REMOVES, str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert ended.stderr.endswith("ChildProcessError: [Errno 10] No child processes\n"), ended.stderr


class SlowFolders:
    """Makes temporary folders only once the test says so."""

    def __init__(self) -> None:
        self.makes, self.may_make = threading.Event(), threading.Event()
        self.made: list[Path] = []
        self._mkdtemp = tempfile.mkdtemp

    def make(self, **where: Any) -> str:
        self.makes.set()
        self.may_make.wait()
        self.made.append(Path(self._mkdtemp(**where)))
        return str(self.made[-1])


@pytest.fixture
def slow_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlowFolders:
    folders = SlowFolders()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "mkdtemp", folders.make)
    return folders


async def test_no_folder_is_left_of_a_run_whose_work_is_cancelled_while_it_is_made(
    slow_folders: SlowFolders,
) -> None:
    # Given a run that is cancelled, and again while it waits for its folder to be removed
    work = asyncio.create_task(Child(["false"], print).work({}))
    await asyncio.to_thread(slow_folders.makes.wait)
    work.cancel()
    await asyncio.sleep(0)
    work.cancel()
    await asyncio.wait([work])
    assert work.cancelled()

    # When its folder is made only now
    slow_folders.may_make.set()

    # Then it is removed
    await until(lambda: slow_folders.made and not slow_folders.made[0].exists())


async def test_a_run_that_is_cancelled_while_its_folders_are_made_starts_no_process(
    slow_folders: SlowFolders,
) -> None:
    run = Child(["/no/such/program"], print)
    work = asyncio.create_task(run.work({}))
    await asyncio.to_thread(slow_folders.makes.wait)

    run.cancel()
    slow_folders.may_make.set()

    assert await work == {"end": "cancelled"}
    assert not slow_folders.made[0].exists()
