"""Answers on file:// stand for what is on the disk: judged from the system calls themselves."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind

ROOT = Path(__file__).parents[3]
WRITER = [sys.executable, "-m", "tests.integration.storage.committing_writer"]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _trace(folder: Path, log: Path) -> list[str]:
    strace = shutil.which("strace")
    if strace is None:
        message = "strace is absent: that answers wait for the disk is not checked"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    calls = "trace=write,link,linkat,rename,renameat,renameat2,syncfs,fsync,fdatasync"
    subprocess.run(
        [strace, "-f", "-e", calls, "-s", "200", "-o", log, *WRITER, folder.as_uri(), "20", "1"],
        cwd=ROOT,
        env=_environment(),
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=240,
    )
    return log.read_text().splitlines()


_WAL_MADE = re.compile(r"(?:link|linkat|rename|renameat2?)\(.*/wal/\d+\.sst")


@pytest.mark.slow
@pytest.mark.strace
def test_every_answer_comes_after_a_sync_that_came_after_its_wal_object(tmp_path: Path) -> None:
    """Slow: every system call of the writer is traced."""
    lines = _trace(tmp_path / "data", tmp_path / "trace")

    answers = unsynced_wal = wal_since_answer = 0
    began_with = 0
    syncing: dict[str, int] = {}
    wal_made = synced_through = 0
    for line in lines:
        thread = line.split()[0]
        if _WAL_MADE.search(line) and "= -1" not in line:
            wal_made += 1
        elif "syncfs(" in line:
            syncing[thread] = wal_made
            if line.rstrip().endswith("= 0"):
                synced_through = max(synced_through, syncing.pop(thread))
        elif "syncfs resumed" in line:
            assert line.rstrip().endswith("= 0")
            synced_through = max(synced_through, syncing.pop(thread))
        elif 'write(1, "row-' in line:
            answers += 1
            unsynced_wal += wal_made > synced_through
            wal_since_answer += wal_made > began_with
            began_with = wal_made

    assert answers == 20
    assert wal_since_answer == 20, "each answer of a lone client has a WAL object of its own"
    assert unsynced_wal == 0, "an answer went out before its WAL object was on the disk"


def _rows_confirmed_by_a_killed_writer(url: str, before_kill: int) -> list[bytes]:
    with subprocess.Popen(
        [*WRITER, url, "0", "16"], cwd=ROOT, env=_environment(), stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        confirmed = [writer.stdout.readline() for _ in range(before_kill)]
        writer.send_signal(signal.SIGKILL)
        confirmed += writer.stdout.readlines()
    return [line[:-1] for line in confirmed if line.endswith(b"\n")]


@pytest.mark.slow
@pytest.mark.parametrize("before_kill", [1, 40, 400])
async def test_a_killed_writer_loses_no_confirmed_row(tmp_path: Path, before_kill: int) -> None:
    """Slow: starts a process for each round."""
    confirmed = _rows_confirmed_by_a_killed_writer(tmp_path.as_uri(), before_kill)
    assert len(confirmed) >= before_kill

    database = await open_root(tmp_path.as_uri()).database("ingest/0", Kind.INGEST)
    found = await database.get_many(confirmed, durable=True)
    assert found == [key * 10 for key in confirmed]
    await database.close()
