"""Tasks on the command line: published, shown, waited for, failed and retried."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from libs.storage.database.roots import open_root
from tests.integration.cli import ready_command
from tests.integration.cli.stack import RUN_SECONDS
from tests.integration.events.backends.servers import Server, running
from tests.integration.events.conftest import SERVERS
from tests.integration.events.tasks.queued_ingest import (
    BACK,
    LARGE,
    body_path,
    enqueue,
    new_task_id,
    queue_settings,
    write_config,
)
from tests.integration.ingest.server import process

pytestmark = pytest.mark.slow  # Commands and an ingest in processes of their own.


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "server").mkdir()
    with running(SERVERS["redis"][1](tmp_path / "server")) as started:
        yield started


async def test_tasks_are_shown_waited_for_and_retried_by_command(
    redis: Server, tmp_path: Path
) -> None:
    settings = queue_settings("redis", redis, max_retries=0)
    flags = ("--config", str(write_config(tmp_path, settings)))
    root = (tmp_path / "data").as_uri()
    async with process(root, tmp_path / "ready", *flags) as (_, address):

        async def slate(*words: str, stdin: bytes = b"") -> CompletedProcess[str]:
            environ = {**os.environ, "SLATEMQ_ENDPOINT": address}
            done = await asyncio.to_thread(ready_command.run, words, environ, stdin, RUN_SECONDS)
            return CompletedProcess(
                words, done.returncode, done.stdout.decode(), done.stderr.decode()
            )

        # When a message is published, then its task is reported, and what became of it
        published = await slate("publish", "hello")
        task_id = published.stdout.strip()
        assert task_id.startswith("task_"), published
        assert "task wait" in published.stderr
        waited = await slate("task", "wait", task_id)
        assert waited.returncode == 0, waited
        assert "is applied" in waited.stdout
        shown = json.loads((await slate("task", "show", task_id, "--json")).stdout)
        assert shown["state"] == "applied"
        assert int(shown["message_ids"][0]) > 0
        again = json.loads((await slate("publish", "-", "--json", stdin=LARGE)).stdout)
        assert again["message_id"] is None
        assert (await slate("task", "wait", again["task_id"])).returncode == 0

        # Given a task whose body is gone
        poison = new_task_id()
        path = body_path(poison)
        await enqueue(settings, poison, {"content_length": 4, "data_ref": path})
        failed = await slate("task", "wait", poison)
        assert failed.returncode == 1
        assert "no object at" in failed.stdout + failed.stderr
        for _ in range(100):
            listed = (await slate("task", "failed", "--json")).stdout.splitlines()
            if listed:
                break
        assert [json.loads(line)["task_id"] for line in listed] == [poison]
        assert poison in (await slate("task", "failed")).stdout

        # When its cause is removed and it is retried, then it is applied
        await open_root(root).objects.put(path, BACK)
        assert "1 task is retried" in (await slate("task", "retry")).stderr
        assert (await slate("task", "wait", poison)).returncode == 0
        assert (await slate("task", "failed", "--json")).stdout == ""

        # And wrong IDs, and a time that is over, have their own ends
        assert (await slate("task", "show", poison[:-1] + "!")).returncode in (1, 2)
        pending = await slate("task", "wait", new_task_id(), "--for", "1s")
        assert pending.returncode == 3
        assert "still pending" in pending.stderr
