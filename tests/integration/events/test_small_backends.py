"""Backends that take no message as large as an event or a task may be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

import slatemq
from libs.events.settings import QueueSettings
from libs.events.tasks import ERROR_BYTES_MAX, encode_task
from libs.storage.database.roots import open_root
from libs.storage.objects.small_objects import Objects
from libs.storage.objects.task_folders import task_folder
from services.ingest.tasks.bodies import within_task
from slatemq.events.envelope import Event
from slatemq.v1.ingest_pb2 import PublishRun
from tests.integration.events.backends.servers import Server
from tests.integration.events.backends.slatemq_server import SlatemqServer
from tests.integration.events.backends.test_conformance import a_task
from tests.integration.events.conftest import Rig, eventually, next_task, served
from tests.integration.events.tasks.queued_ingest import LARGE, queue_settings, queued
from tests.integration.events.tasks.queued_ingest import eventually as until
from tests.integration.ingest.server import message, serving

pytestmark = pytest.mark.slow

BYTES_MAX = 65_536
RABBITMQ_BYTES_MAX = 128 << 20
"""Its default."""

LARGE_HEADERS = {f"h{n}": "v" * 30_000 for n in range(4)}
"""Of 120,000 bytes, which an event has where its backend takes them."""


@pytest.fixture(scope="module", params=["slatemq", "rabbitmq", "amqp-1.0"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server]]:
    """A backend that takes 64 KiB."""
    if request.param == "slatemq":
        stack = SlatemqServer(tmp_path_factory.mktemp("slatemq"))
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("SLATEMQ_PAYLOAD_BYTES_MAX", str(BYTES_MAX))
            stack.start()
        try:
            yield "slatemq", stack
        finally:
            stack.kill()
        return
    with contextmanager(served)(request, tmp_path_factory) as (backend, started):
        limit_messages(started, BYTES_MAX)
        try:
            yield backend, started
        finally:
            limit_messages(started, RABBITMQ_BYTES_MAX)


def limit_messages(rabbitmq: Any, bytes_max: int) -> None:
    """How large a message may be on a channel that is opened from now on."""
    rabbitmq.control("eval", f"application:set_env(rabbit, max_message_size, {bytes_max}).")


async def test_an_event_whose_headers_are_too_large_goes_without_them(rig: Rig) -> None:
    consumer, events = await rig.backend(), list[Event]()

    async def keep(event: Event) -> None:
        events.append(event)
        await consumer.acknowledge(event.id)

    await consumer.subscribe([], keep)
    settings = replace(QueueSettings(enabled=True), backend=rig.name, **{rig.name: rig.settings})
    async with serving(queue=settings) as ingest:
        ids = await ingest.publish(
            message(b"a", queue="orders"),
            PublishRun(payloads=[b"b"], headers=LARGE_HEADERS),
            message(b"c", queue="orders"),
        )
        ids += await ingest.send(b"d")
        await eventually(lambda: set(ids) <= {event.data["message_id"] for event in events})

    first: dict[int, dict[str, Any]] = {}
    for event in events:
        first.setdefault(event.data["message_id"], event.data)
    assert list(first) == ids
    headers = [first[one]["headers"] for one in ids]
    assert headers == [{"queue": "orders"}, {}, {"queue": "orders"}, {}]
    assert [first[one]["headers_omitted"] for one in ids] == [False, True, False, False]


class NotedBodies(Objects):
    """A real store that counts the bodies of tasks that are put."""

    def __init__(self, objects: Objects) -> None:
        vars(self).update(vars(objects))
        self.put_count = 0

    async def put(self, path: str, data: bytes) -> None:
        self.put_count += path.startswith(task_folder(0))
        await super().put(path, data)


SMALL = [message(bytes(40_000))]
LARGER = {
    "a payload": [message(bytes(49_000))],
    "together": [message(b"%d" % n * 10_000) for n in range(10)],
    "headers": [PublishRun(payloads=[b"x"], headers=LARGE_HEADERS)],
}
"""Publishes whose tasks the backend takes without their bodies alone."""


@pytest.mark.parametrize("consistency", ["async", "sync"])
async def test_a_publish_whose_task_is_too_large_has_its_body_in_an_object(
    rig: Rig, consistency: Any
) -> None:
    root = open_root("memory:///")
    root.objects = bodies = NotedBodies(root.objects)

    async def none_is_left() -> bool:
        return not await bodies.list(task_folder(0))

    async with queued(queue_settings(rig.name, rig.server, consistency), root) as ingest:
        for messages in (SMALL, *LARGER.values()):
            answer = await ingest.enqueue(*messages)
            ids = list(answer.message_ids)
            if answer.task_id:
                ids = await ingest.applied(answer.task_id)
            found = await ingest.payloads(*ids)
            assert found == [one.payloads[0] for one in messages]

        # One object for each but the first, until it is applied
        assert bodies.put_count == len(LARGER)
        await until(none_is_left)


@pytest.mark.parametrize("server", ["slatemq"], indirect=True)
async def test_a_task_goes_to_an_ingest_that_runs_with_a_smaller_bound_than_its_instance(
    rig: Rig,
) -> None:
    # Given an instance whose settings were raised, and whose ingest was not restarted
    async with slatemq.connect(rig.settings.endpoint) as client:
        await client.update_instance({"payload_bytes_max": 2 * BYTES_MAX})
    async with queued(queue_settings(rig.name, rig.server)) as ingest:
        task_id = await ingest.send_task(bytes(80_000))
        assert await ingest.payloads(*await ingest.applied(task_id)) == [bytes(80_000)]


async def test_publishes_beside_one_whose_task_is_too_large_are_not_refused(rig: Rig) -> None:
    """On a channel of RabbitMQ, or a connection of AMQP 1.0, they share its refusal."""
    async with queued(queue_settings(rig.name, rig.server)) as ingest:

        async def publish(payload: bytes) -> None:
            async def accept() -> None:
                tasks.append(await ingest.send_task(payload))

            await until(accept)  # one that is interrupted is repeated

        tasks = list[str]()
        payloads = [LARGE, bytes(49_000), b"small"] * 8
        await asyncio.gather(*map(publish, payloads))
        for task_id in tasks:
            await ingest.applied(task_id)


async def test_a_task_is_a_dead_letter_though_its_error_makes_it_too_large(rig: Rig) -> None:
    backend = await rig.backend()
    body = within_task(bytes(BYTES_MAX * 3 // 4 - 2300))
    task = replace(a_task(max_retries=0), payload=body)
    assert BYTES_MAX - ERROR_BYTES_MAX < len(encode_task(task)) < BYTES_MAX
    await backend.enqueue_task(task)

    # When it fails, perhaps again since its delivery was lost with the connection
    while not await backend.fail_task((await next_task(backend)).task_id, "!" * ERROR_BYTES_MAX):
        pass

    # Then it is there with the beginning of its error, and can be retried
    (dead,) = await backend.failed_tasks(10)
    assert dead.name == task.task_id
    assert dead.error.startswith("!" * 100)
    assert await backend.retry_failed_tasks() == 1
    assert (await next_task(backend)).payload == body
