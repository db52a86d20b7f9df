"""The permissions on the pages of Redis and RabbitMQ suffice for all that a backend does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from libs.events.backend import BackendStats
from libs.events.backends import open_backend
from slatemq.events.envelope import Event
from tests.integration.events.backends.rabbitmq_server import RabbitmqServer
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
from tests.integration.events.backends.test_conformance import a_task, created, eventually_stats
from tests.integration.events.conftest import eventually, next_task

pytestmark = pytest.mark.slow  # Real servers.

PAGES = Path(__file__).resolve().parents[4] / "docs/how-to"


def commands_of_page(backend: str, begin: str) -> list[list[str]]:
    """The arguments of each command on the page of a backend that begins so."""
    page = (PAGES / f"backend-{backend}.md").read_text(encoding="utf-8")
    found = re.findall(rf"^\$ {begin} (.*)$", page, re.MULTILINE)
    assert found
    return [shlex.split(one) for one in found]


async def work(name: str, settings: Any) -> None:
    """Do all that a backend does: events and tasks, their attempts, and dead letters of both."""
    backend = open_backend(name, is_sole_consumer=True)
    try:
        await backend.connect(msgspec.structs.replace(settings, max_retries=1))
        refused: list[str] = []

        async def refuse(event: Event) -> None:
            refused.append(event.id)
            if event.data["key"] == "good":
                await backend.acknowledge(event.id)

        await backend.subscribe([], refuse)
        good, poison = created("good"), created("poison")
        await backend.publish_batch([good, poison])
        await eventually(lambda: refused.count(poison.id) == 2)
        await eventually_stats(backend, lambda stats: stats == BackendStats(0, 1))

        tasks = [a_task(max_retries=1), a_task(max_retries=1)]
        for task in tasks:
            await backend.enqueue_task(task)
        for _ in range(2 * len(tasks)):
            await backend.fail_task((await next_task(backend)).task_id, "no room")
        assert len(await backend.failed_tasks(10)) == len(tasks)
        assert await backend.retry_failed_tasks() == len(tasks)
        for _ in tasks:
            task = await next_task(backend)
            assert len(await backend.pending_tasks(10))
            await backend.complete_task(task.task_id)
        await eventually_stats(backend, lambda stats: stats == BackendStats(0, 1))
        assert refused.count(good.id) == 1
    finally:
        await backend.close()


@pytest.mark.parametrize("structure", ["streams", "lists"])
async def test_the_user_of_the_page_of_redis_does_all(
    tmp_path: Path, structure: Literal["streams", "lists"]
) -> None:
    with running(RedisServer(tmp_path, structure)) as server:
        for arguments in commands_of_page("redis", "redis-cli ACL SETUSER"):
            assert server.control("ACL", "SETUSER", *arguments) == "OK"
        settings = server.settings("slatemq.ingest-0")
        url = settings.url.replace("redis://", "redis://app:PASSWORD@")
        await work("redis", msgspec.structs.replace(settings, url=url))


async def test_the_user_of_the_page_of_rabbitmq_does_all(rabbitmq: RabbitmqServer) -> None:
    for command in ("add_user", "set_permissions"):
        for arguments in commands_of_page("rabbitmq", f"rabbitmqctl {command}"):
            rabbitmq.control(command, *arguments)
    settings = rabbitmq.settings("slatemq.ingest-0")
    url = settings.url.replace("guest:guest@", "app:PASSWORD@")
    await work("rabbitmq", msgspec.structs.replace(settings, url=url))
