"""A login of the store, in the environment, comes out in no command and in no run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slatemq.v1 import janitor_pb2
from tests.integration.janitor.runs.janitors import QUIET, Run, janitor

STORE = "s3://b/p?allow_http=true"
SECRET = "it's-SECRET"
ENVIRON = {
    "AWS_ENDPOINT_URL": f"http://key:{SECRET}@127.0.0.1:1",
    "AWS_REGION": "x",
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
}


@pytest.mark.parametrize(
    "command",
    [
        ("verify", "--root", STORE),
        ("give-up", "--yes", "broker/1", "--root", STORE),
        ("move-wals", "--root", STORE, "--to", "s3://c?allow_http=true"),
        ("backup", "create", "--root", STORE, "--backups", "s3://c?allow_http=true"),
        ("backup", "ls", "--backups", STORE),
    ],
)
def test_a_command_names_the_store_that_is_down_without_its_login(command: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "services.janitor", *command],
        env={**os.environ, **ENVIRON},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 1, ended.stderr
    assert "http://***@127.0.0.1:1/" in ended.stderr
    assert SECRET not in ended.stdout + ended.stderr


async def test_a_run_that_fails_says_why_without_the_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    async with janitor(tmp_path, *QUIET, "--backup-root", STORE, own_jobs=False) as one:
        run = await one.done(await one.run("backup"))
        listed = await one.stub.ListRuns(janitor_pb2.ListRunsRequest())
        got = await one.get(run.run_id)

    assert run.state == Run.STATE_FAILED
    assert "http://***@127.0.0.1:1/" in got.error
    assert [answer.error for answer in listed.runs] == [run.error] == [got.error]
    (history,) = (tmp_path / "data" / "janitor" / "runs").glob("*.json")
    for file in (history, one.log):
        assert SECRET not in file.read_text()
