"""Backups as people ask for them: from a janitor, and by `python -m services.janitor backup`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from libs.storage.database.roots import open_root
from services.janitor.backup.catalogue import Catalogue
from services.janitor.backup.command import main
from services.janitor.verify.command import verify_stopped
from slatemq.v1 import janitor_pb2
from tests.integration.janitor.instances import instance
from tests.integration.janitor.runs.janitors import QUIET, Janitor, Run, janitor


async def test_a_janitor_takes_a_backup_of_what_serves_without_spark(tmp_path: Path) -> None:
    url = (tmp_path / "backups").as_uri()
    async with instance(tmp_path) as made:
        await made.client.create_queue("orders", filter='headers.queue == "orders"')
        await made.publish("orders", 20)
        await made.routed()
        settings = (*QUIET, "--backup-root", url)
        async with janitor(tmp_path, *settings, own_jobs=False) as one:
            counted = await one.done(await one.run("backup", dry_run=True))
            run = await one.done(await one.run("backup"))
            assert one.started("java") == []

    assert counted.state == Run.STATE_DONE, counted
    assert run.state == Run.STATE_DONE, run
    assert run.counts["objects_copied"] == run.counts["objects"] > 0
    assert [one.phase for one in run.phases] == ["copies", "payloads", "snapshots", "tables"]
    (backup_id,) = await Catalogue(open_root(url).objects).ids()
    assert [*run.artifacts] == [f"{url}/backups/{backup_id}"]


async def test_a_janitor_without_a_backup_root_says_what_to_do(tmp_path: Path) -> None:
    async with janitor(tmp_path) as one:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await one.run("backup")
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "--backup-root URL" in str(refused.value.details())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await one.stub.RunJob(janitor_pb2.RunJobRequest(job="backup", queue_ids=["orders"]))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("--backup-schedule", "1d"), "set backup_root too"),
        (("--backup-root", "ftp://x"), "backup_root: root URL: unknown scheme"),
        (("--backup-root", "{root}/below"), "neither below the instance's root"),
    ],
)
async def test_a_wrong_backup_root_ends_the_janitor(
    tmp_path: Path, settings: tuple[str, ...], said: str
) -> None:
    root = (tmp_path / "data").as_uri()
    one = Janitor(tmp_path, *(text.format(root=root) for text in settings))
    try:
        assert await one.refused() == 2
        assert said in one.log.read_text()
    finally:
        await one.close()


@pytest.mark.parametrize("command", [("ls",), ("restore", "--root", "{root}")])
def test_a_folder_of_backups_that_is_not_there_is_named_and_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    folder, root = tmp_path / "bakcups", (tmp_path / "data").as_uri()
    words = [word.format(root=root) for word in command]
    assert main(["backup", *words, "--backups", folder.as_uri()], {}) == 2
    assert capsys.readouterr().err == f"there is no folder {folder}\n"
    assert [*tmp_path.iterdir()] == []


def test_a_folder_without_backups_is_said_to_have_none(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "services.janitor", "backup", "ls", "--backups", tmp_path.as_uri()],
        capture_output=True,
        text=True,
        check=False,
    )
    said = f"no backups in {tmp_path.as_uri()}\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", said)


async def test_an_instance_is_made_again_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, backups = (tmp_path / "data").as_uri(), (tmp_path / "backups").as_uri()
    async with instance(tmp_path) as made:
        await made.client.create_queue("orders", filter='headers.queue == "orders"')
        published = await made.publish("orders", 20, payload=b"x" * 70_000)
        await made.routed()

    def run(*arguments: str) -> dict[str, Any]:
        ended = subprocess.run(
            [sys.executable, "-m", "services.janitor", "backup", *arguments, "--json"],
            env={**os.environ, "SLATEMQ_BACKUP_ROOT": backups},
            umask=0o022,
            capture_output=True,
            check=True,
        )
        (act,) = (line for line in ended.stderr.decode().splitlines() if "slatemq.audit" in line)
        assert f'act="backup {arguments[0]}"' in act
        assert f"root={arguments[-1]}, backups={backups}," in act
        assert "outcome=OK" in act
        answer: dict[str, Any] = json.loads(ended.stdout)
        return answer

    created = await asyncio.to_thread(run, "create", "--root", root)
    listed = ["backup", "ls", "--json"]
    assert await asyncio.to_thread(main, listed, {"SLATEMQ_BACKUP_ROOT": backups}) == 0
    assert json.loads(capsys.readouterr().out) == created
    new = tmp_path / "new"
    restored = await asyncio.to_thread(run, "restore", "--root", (new / "data").as_uri())
    # Written for their user alone, as services write
    copies = [one for folder in ("backups", "new") for one in (tmp_path / folder).rglob("*")]
    assert {oct(one.stat().st_mode & 0o777) for one in copies} == {"0o600", "0o700"}
    assert (await verify_stopped(open_root((new / "data").as_uri()))).all() == []
    assert restored["queues"] == 1
    assert restored["backup_id"] == created["backup_id"]
    async with instance(new) as made:
        assert {one.message_id for one in await made.claim("orders", published)} == published


async def test_the_command_removes_backups_only_where_a_number_that_stays_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with instance(tmp_path):
        pass
    backups = (tmp_path / "backups").as_uri()
    environ = {"SLATEMQ_ROOT": (tmp_path / "data").as_uri(), "SLATEMQ_BACKUP_ROOT": backups}
    create = ["backup", "create", "--json"]

    async def taken(argv: Sequence[str], environ: Mapping[str, str]) -> str:
        assert await asyncio.to_thread(main, argv, environ) == 0
        backup_id: str = json.loads(capsys.readouterr().out)["backup_id"]
        return backup_id

    async def listed() -> list[str]:
        return [*await Catalogue(open_root(backups).objects).ids()]

    # Given more backups than a janitor keeps by itself
    ids = [await taken(create, environ) for _ in range(16)]
    assert await listed() == ids[::-1]

    # When the setting of the janitor, or the option, has a number, then so many stay
    ids.append(await taken(create, {**environ, "SLATEMQ_BACKUPS_KEPT": "16"}))
    assert await listed() == ids[:0:-1]
    ids.append(await taken([*create, "--kept", "2"], {**environ, "SLATEMQ_BACKUPS_KEPT": "16"}))
    assert await listed() == ids[:-3:-1]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("ls",), 2, "--backups or SLATEMQ_BACKUP_ROOT is required"),
        (("restore", "--backups", "file:///x"), 2, "--root or SLATEMQ_ROOT is required"),
        (("create", "--backups", "file:///x", "--root", "file:///y", "--kept", "0"), 2, "--kept"),
        (("restore", "--backups", "file:///x/y", "--root", "file:///x"), 2, "must not lie one in"),
        (("create", "--backups", "{b}", "--root", "{r}"), 2, "there is no folder"),
        (("ls", "--backups", "http://x"), 2, "unknown scheme"),
        (("restore", "20200101-000000-000", "--backups", "{b}", "--root", "{r}"), 1, "20200101-"),
    ],
)
def test_wrong_usage_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    (tmp_path / "b").mkdir()
    urls = {"b": (tmp_path / "b").as_uri(), "r": (tmp_path / "r").as_uri()}
    command = ["backup", *(text.format(**urls) for text in arguments)]
    try:
        ended: Any = main(command, {})
    except SystemExit as error:
        ended = error.code
    assert ended == code
    assert said in capsys.readouterr().err
    assert (tmp_path / "r").exists() == (code == 1)  # made for what may be restored there
