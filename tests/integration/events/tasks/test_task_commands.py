"""Tasks on the command line: published, shown, waited for, failed and retried."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from libs.events.settings import QueueSettings
from libs.storage.database.roots import open_root
from tests.integration.cli import ready_command
from tests.integration.cli.stack import RUN_SECONDS
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
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
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "server").mkdir()
    with running(RedisServer(tmp_path / "server", "streams")) as started:
        yield started


@asynccontextmanager
async def commands(
    settings: QueueSettings, folder: Path
) -> AsyncIterator[Callable[..., Awaitable[CompletedProcess[str]]]]:
    """Runs `slatemq` on an ingest with these settings."""
    flags = ("--config", str(write_config(folder, settings)))
    root = (folder / "data").as_uri()
    async with process(root, folder / "ready", *flags) as (_, address):

        async def slate(*words: str, stdin: bytes = b"") -> CompletedProcess[str]:
            environ = {**os.environ, "SLATEMQ_ENDPOINT": address}
            done = await asyncio.to_thread(ready_command.run, words, environ, stdin, RUN_SECONDS)
            return CompletedProcess(
                words, done.returncode, done.stdout.decode(), done.stderr.decode()
            )

        yield slate


async def test_tasks_are_shown_waited_for_and_retried_by_command(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings = queue_settings("redis", redis, max_retries=0)
    async with commands(settings, tmp_path) as slate:
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
        await open_root((tmp_path / "data").as_uri()).objects.put(path, BACK)
        assert "1 task is retried" in (await slate("task", "retry")).stderr
        assert (await slate("task", "wait", poison)).returncode == 0
        assert (await slate("task", "failed", "--json")).stdout == ""

        # And wrong IDs, and a time that is over, have their own ends
        assert (await slate("task", "show", poison[:-1] + "!")).returncode == 2
        unissued = await slate("task", "show", new_task_id())
        assert "never given out" in unissued.stderr, unissued
        pending = await slate("task", "wait", new_task_id(), "--for", "1s")
        assert pending.returncode == 3
        assert "still pending" in pending.stderr
        assert "task pending" in pending.stderr


async def test_a_retry_says_how_many_tasks_it_is_of_though_an_ingest_is_down(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings = queue_settings("redis", redis, max_retries=0)
    async with commands(settings, tmp_path) as slate:
        # Given a failed task, and another ingest that is down
        flags = ("--config", str(tmp_path / "slatemq.yaml"), "--shard", "1")
        async with process((tmp_path / "data").as_uri(), tmp_path / "other", *flags):
            pass
        task_id = new_task_id()
        await enqueue(settings, task_id, {"content_length": 4, "data_ref": body_path(task_id)})
        assert (await slate("task", "wait", task_id)).returncode == 1

        # When what failed is retried, then the number is there, and the error
        retried = await slate("task", "retry", "--json", "--timeout", "10s")
        assert json.loads(retried.stdout.splitlines()[0]) == {"retried_count": 1}, retried
        assert retried.returncode == 3


async def test_lines_and_queue_files_count_what_is_stored_not_what_is_accepted(
    redis: RedisServer, tmp_path: Path
) -> None:
    file = tmp_path / "jobs.tq"
    file.write_text("- third\n- fourth\n")
    lines = ("publish", "--jsonl", "-", "--json")
    async with commands(queue_settings("redis", redis), tmp_path) as slate:
        # Given a backend that takes tasks and gives none
        redis.control("ACL", "SETUSER", "default", "-xreadgroup")
        redis.control("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        # When lines and entries are published, then none counts as stored
        for words in (lines, ("import", str(file), "--publish")):
            waiting = await slate("--timeout", "3s", *words, stdin=b"first\nsecond\n")
            assert waiting.returncode == 3, waiting
            assert "still pending" in waiting.stderr, waiting
            if words == lines:
                assert json.loads(waiting.stdout)["durable_count"] == 0
        assert file.read_text() == "- third\n- fourth\n"
        assert len((await slate("task", "pending")).stdout.splitlines()) == 2 + 1, "tasks, a title"

        # When they are applied, then the same commands go on, and store nothing twice
        redis.control("ACL", "SETUSER", "default", "+xreadgroup")
        again = await slate(*lines, stdin=b"first\nsecond\n")
        assert json.loads(again.stdout)["durable_count"] == 2, again
        imported = await slate("import", str(file), "--publish", "--json")
        counts = json.loads(imported.stdout)
        assert (counts["imported_count"], counts["duplicate_count"]) == (0, 2), imported
        assert file.read_text() == "= third\n= fourth\n"
        stored = await slate("publish", "fifth", "--json")
        last = json.loads(
            (await slate("task", "wait", json.loads(stored.stdout)["task_id"], "--json")).stdout
        )
        assert last["message_ids"] == ["5"]
