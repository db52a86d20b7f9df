"""Tasks in Redis whose ends, or whose hand-over, are lost on the way."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from redis import asyncio as aioredis
from redis.asyncio.connection import AbstractConnection, Connection

from libs.events.backend import QueueBackend
from libs.events.backends import open_backend
from libs.events.redis.backend import RedisBackend
from libs.events.redis.connection import READ_COUNT
from libs.events.redis.dead_letters import DeadLetters
from libs.events.redis.delayed_tasks import SOLE_READ_COUNT
from libs.events.redis.streams import Group
from libs.events.tasks import FailedTask, WriteTask, decode_failed_task, encode_task
from slatemq._admin.task_ids import TaskIds
from slatemq.errors import Unavailable
from slatemq.events.envelope import encode_event
from tests import timed_uvloop
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import Certificate, Server, running
from tests.integration.events.backends.test_conformance import a_task, created
from tests.integration.events.conftest import SERVERS

pytestmark = pytest.mark.slow  # A real server.


@pytest.fixture(params=["redis", "redis-lists"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with running(SERVERS[request.param][1](tmp_path)) as started:
        yield started


async def dequeued(backend: QueueBackend) -> WriteTask:
    async with asyncio.timeout(60):
        while (task := await backend.dequeue_task()) is None:
            pass
    return task


async def test_events_and_dead_letters_are_in_the_streams_that_the_page_names(
    server: Server,
) -> None:
    settings = server.settings("slatemq")
    backend = open_backend("redis")
    await backend.connect(settings)
    event, task = created("a"), a_task(max_retries=0)

    # When an event is published, and a task fails
    await backend.publish(event)
    await backend.enqueue_task(task)
    await dequeued(backend)
    await backend.fail_task(task.task_id, "no room")

    # Then any client finds them
    async with aioredis.from_url(settings.url) as client:
        ((_, entry),) = await client.xrange("slatemq:events")
        assert entry == {b"type": b"object.created", b"data": encode_event(event)}
        ((_, entry),) = await client.xrange("slatemq:dead-letter")
        assert entry[b"kind"] == b"task"
        assert decode_failed_task(entry[b"data"]).error == "no room"
    await backend.close()


async def test_a_task_is_completed_by_the_call_that_repeats_one_in_an_outage(
    server: Server,
) -> None:
    backend = open_backend("redis")
    await backend.connect(server.settings("once"))
    task = a_task()
    await backend.enqueue_task(task)
    await dequeued(backend)
    await asyncio.to_thread(server.kill)
    with pytest.raises(Unavailable):
        await backend.complete_task(task.task_id)
    await asyncio.to_thread(server.start)
    await backend.complete_task(task.task_id)
    assert (await backend.stats()).pending_tasks == 0
    await backend.close()


async def test_a_sole_consumer_takes_at_once_what_the_one_before_it_had(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("streams", "list_tasks"):
        monkeypatch.setattr(f"libs.events.redis.{module}.HOLD_MS", 3_600_000)
    killed = RedisBackend(is_sole_consumer=True)
    await killed.connect(server.settings("sole"))
    tasks = [a_task() for _ in range(35)]
    for task in tasks:
        await killed.enqueue_task(task)
    taken = [await dequeued(killed) for _ in range(25)]
    assert len({task.task_id for task in taken}) == 25
    await killed.disconnect()

    successor = open_backend("redis", is_sole_consumer=True)
    await successor.connect(server.settings("sole"))
    again = [await dequeued(successor) for _ in tasks]
    assert {task.task_id for task in again} == {task.task_id for task in tasks}
    for task in again:
        await successor.complete_task(task.task_id)
    assert (await successor.stats()).pending_tasks == 0
    await successor.close()


@pytest.mark.parametrize("is_enqueued_first", [True, False])
async def test_a_sole_consumer_whose_redis_lost_its_data_before_its_first_read_gets_tasks(
    server: Server, is_enqueued_first: bool
) -> None:
    backend = open_backend("redis", is_sole_consumer=True)
    settings = server.settings("empty")
    await backend.connect(settings)
    async with aioredis.Redis.from_url(settings.url) as client:
        await client.flushall()
    task = a_task()
    if not is_enqueued_first:
        assert await backend.dequeue_task() is None
    await backend.enqueue_task(task)
    assert await dequeued(backend) == task
    await backend.close()


async def test_a_consumer_that_holds_a_task_as_redis_loses_its_data_gets_the_next_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("streams", "list_tasks"):
        monkeypatch.setattr(f"libs.events.redis.{module}.KEEP_S", 0)
    backend = open_backend("redis")
    settings = server.settings("holds")
    await backend.connect(settings)
    held, next_one = a_task(), a_task()
    await backend.enqueue_task(held)
    assert await dequeued(backend) == held
    async with aioredis.Redis.from_url(settings.url) as client:
        await client.flushall()
    await backend.enqueue_task(next_one)
    assert await dequeued(backend) == next_one
    await backend.close()


async def test_a_task_stays_with_its_consumer_however_long_that_works_on_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a consumer that works on a task, and one that dies later with another one
    monkeypatch.setattr("libs.events.redis.delayed_tasks.KEEP_S", 0.05)
    for module in ("streams", "list_tasks"):
        monkeypatch.setattr(f"libs.events.redis.{module}.HOLD_MS", 5_000)
        monkeypatch.setattr(f"libs.events.redis.{module}.KEEP_S", 0.05)
        monkeypatch.setattr(f"libs.events.redis.{module}.RECLAIM_S", 0)
    before = asyncio.all_tasks()
    working, killed, other = backends = [RedisBackend() for _ in range(3)]
    for backend in backends:
        await backend.connect(server.settings("works"))
    held, left = (a_task(task_id=TaskIds(0).make(number)) for number in range(2))
    await working.enqueue_task(held)
    assert await dequeued(working) == held
    await working.enqueue_task(left)
    assert await dequeued(killed) == left
    await killed.disconnect()

    # When a third one has waited for so long that it gets what the dead one had
    assert await dequeued(other) == left
    await other.complete_task(left.task_id)

    # Then the first one still has its task, until it leaves
    assert await other.dequeue_task() is None
    await working.close()
    assert await dequeued(other) == held

    # And of those that are closed, nothing goes on
    for backend in backends:
        await backend.close()
    assert asyncio.all_tasks() == before


async def test_a_list_of_dead_letters_does_not_hold_their_bodies(server: Server) -> None:
    settings = server.settings("bodies")
    body = "A" * (700 << 10)
    async with aioredis.from_url(settings.url) as client:
        dead_letters = DeadLetters(client, settings.stream_prefix)
        tasks = [replace(a_task(), payload={"body": body}) for _ in range(64)]
        for task in tasks:
            await client.execute_command(*dead_letters.task_command(task, "no room"))
        tracemalloc.start()
        try:
            found = await dead_letters.tasks(1_000)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert [one.task.task_id for one in found if isinstance(one, FailedTask)] == [
        task.task_id for task in tasks
    ]
    assert peak_bytes < len(tasks) * len(body)


async def test_a_consumer_that_is_cancelled_as_a_command_is_sent_ends(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend("redis")
    await backend.connect(server.settings("cancelled"))
    sent = asyncio.Event()
    send = AbstractConnection._send_packed_command

    async def send_and_cancel(connection: AbstractConnection, command: Any) -> None:
        await send(connection, command)
        if not sent.is_set():
            sent.set()
            consuming.cancel()

    async def consume() -> None:
        while True:
            await backend.dequeue_task()

    # When a consumer is cancelled in the step of the event loop in which a command is sent
    monkeypatch.setattr(AbstractConnection, "_send_packed_command", send_and_cancel)
    consuming = asyncio.create_task(consume())

    # Then it ends, though redis-py may go on
    await asyncio.wait([consuming], timeout=30)
    assert consuming.cancelled()
    await backend.close()


async def test_nothing_stays_connected_of_a_backend_whose_closing_is_cancelled(
    server: Server,
) -> None:
    settings = server.settings("closing")
    backend = open_backend("redis")
    await backend.connect(settings)
    assert await backend.dequeue_task() is None
    async with aioredis.Redis.from_url(settings.url) as client, asyncio.timeout(60):
        own = await client.client_id()

        async def others(blocked: bool = False) -> list[Any]:
            found = [one for one in await client.client_list() if int(one["id"]) != own]
            return [one for one in found if "b" in one["flags"]] if blocked else found

        # Given idle connections, and writes that the server holds, two waiting for the first
        await asyncio.gather(*(backend.stats() for _ in range(4)))
        assert len(await others()) == 4
        await client.execute_command("CLIENT PAUSE 60000 WRITE")
        enqueues = [asyncio.create_task(backend.enqueue_task(a_task())) for _ in range(3)]
        while not await others(blocked=True):
            await asyncio.sleep(0.01)
        # And a closing that waits, too
        closing = asyncio.create_task(backend.close())
        while len(await others(blocked=True)) < 2:
            await asyncio.sleep(0.01)

        # When that is cancelled, as a service does that has waited for a second
        closing.cancel()
        await asyncio.wait([closing, *enqueues])

        # Then the writes fail, and no connection is left or made
        assert closing.cancelled()
        assert [type(one.exception()) for one in enqueues] == [Unavailable] * 3
        while await others():
            await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="closed"):
            await backend.stats()
        assert not await others()


def test_a_server_that_goes_as_it_is_written_to_is_down(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = Connection._connect

    async def connect_and_lose(connection: Connection) -> None:
        await connect(connection)
        assert connection._writer is not None
        connection._writer.transport.abort()
        await asyncio.sleep(0)

    async def enqueue() -> None:
        backend = open_backend("redis")
        settings = server.settings("gone")
        await backend.connect(settings)
        monkeypatch.setattr(Connection, "_connect", connect_and_lose)
        with pytest.raises(Unavailable) as gone:
            await asyncio.gather(backend.stats(), backend.stats())
        assert gone.value.reason == "BACKEND_DOWN"
        await backend.close()

    # On the event loop that services have
    with asyncio.Runner(loop_factory=timed_uvloop.Loop) as runner:
        runner.run(enqueue())


async def test_each_delivery_of_a_task_has_its_own_end(server: Server) -> None:
    backend = open_backend("redis")
    await backend.connect(server.settings("twice"))
    task = a_task()
    for _ in range(2):
        await backend.enqueue_task(task)
    assert [await dequeued(backend) for _ in range(2)] == [task, task]
    for left in (1, 0):
        await backend.complete_task(task.task_id)
        assert (await backend.stats()).pending_tasks == left
    await backend.close()


async def test_tasks_whose_move_was_never_heard_of_come_again_in_order(tmp_path: Path) -> None:
    with running(SERVERS["redis-lists"][1](tmp_path)) as server:
        backend = open_backend("redis")
        settings = server.settings("moved")
        await backend.connect(settings)
        held, *lost = [a_task(task_id=TaskIds(0).make(number)) for number in range(4)]
        await backend.enqueue_task(held)
        assert await dequeued(backend) == held
        # Given tasks that the server has moved for this consumer, whose answer was lost
        async with aioredis.Redis.from_url(settings.url) as client:
            key = "moved:tasks"
            (processing,) = [one async for one in client.scan_iter(f"{key}:processing:*")]
            for task in lost:
                await client.rpush(processing, encode_task(task))
        # Then they come again in their order, and the one that is held does not
        assert [await dequeued(backend) for _ in lost] == lost
        for task in (held, *lost):
            await backend.complete_task(task.task_id)
        assert (await backend.stats()).pending_tasks == 0
        await backend.close()


@pytest.mark.parametrize("fault", [ConnectionError, asyncio.CancelledError])
async def test_tasks_of_a_read_whose_answer_is_lost_come_before_newer_ones(
    server: Server, monkeypatch: pytest.MonkeyPatch, fault: type[BaseException]
) -> None:
    backend = open_backend("redis", is_sole_consumer=True)
    await backend.connect(server.settings("lost"))
    tasks = [a_task(task_id=TaskIds(0).make(number)) for number in range(5)]
    await backend.enqueue_task(tasks[0])
    assert await dequeued(backend) == tasks[0]
    read_response = AbstractConnection.read_response

    async def lose(connection: AbstractConnection, *args: Any, **kwargs: Any) -> Any:
        response = await read_response(connection, *args, **kwargs)
        if tasks[1].task_id in str(response):
            monkeypatch.undo()
            raise fault
        return response

    # Given a task that is held, and two of a read that Redis has executed, whose answer was lost
    for task in tasks[1:3]:
        await backend.enqueue_task(task)
    monkeypatch.setattr(AbstractConnection, "read_response", lose)
    with pytest.raises((Unavailable, asyncio.CancelledError)):
        await dequeued(backend)

    # When newer ones follow, then all come in their order, and none twice
    for task in tasks[3:]:
        await backend.enqueue_task(task)
    assert [await dequeued(backend) for _ in tasks[1:]] == tasks[1:]
    for task in tasks:
        await backend.complete_task(task.task_id)
    assert (await backend.stats()).pending_tasks == 0
    await backend.close()


async def test_lists_look_at_no_keys_but_their_own(tmp_path: Path) -> None:
    with running(SERVERS["redis-lists"][1](tmp_path)) as server:
        settings = server.settings("own")
        backend = open_backend("redis")
        await backend.connect(settings)
        # When tasks are taken, counted and listed, and those of dead consumers looked for
        await backend.enqueue_task(a_task())
        await dequeued(backend)
        assert (await backend.stats()).pending_tasks == 1
        assert len(await backend.pending_tasks(10)) == 1
        await backend.close()
        # Then it takes as long beside any number of keys of others
        async with aioredis.Redis.from_url(settings.url) as client:
            statistics = await client.info("commandstats")
            assert not {"cmdstat_scan", "cmdstat_keys"} & statistics.keys()


async def test_a_task_taken_from_a_redis_that_lost_its_data_outlives_its_consumer(
    server: Server,
) -> None:
    settings = server.settings("emptied")
    killed, successor = RedisBackend(), open_backend("redis", is_sole_consumer=True)
    await killed.connect(settings)
    await successor.connect(settings)
    # Given a consumer that was there before Redis lost its data, and dies with a newer task
    assert await killed.dequeue_task() is None
    async with aioredis.Redis.from_url(settings.url) as client:
        await client.flushall()
    task = a_task()
    await successor.enqueue_task(task)
    assert await dequeued(killed) == task
    await killed.disconnect()
    # Then the next one gets it
    assert await dequeued(successor) == task
    await successor.close()


async def test_a_consumer_of_lists_is_forgotten_long_after_its_tasks_went_back(
    tmp_path: Path,
) -> None:
    with running(SERVERS["redis-lists"][1](tmp_path)) as server:
        settings = server.settings("forgets")
        backend = open_backend("redis")
        await backend.connect(settings)
        async with aioredis.Redis.from_url(settings.url) as client:
            # Given tasks of three consumers, which fell silent one after the other
            tasks = [a_task(task_id=TaskIds(0).make(number)) for number in range(3)]
            key, now_s = "forgets:tasks", (await client.time())[0]
            silent_s = {"first": 7200, "second": 60, "third": 40}
            for task, (name, seconds) in zip(tasks, silent_s.items(), strict=True):
                await client.rpush(f"{key}:processing:{name}", encode_task(task))
                await client.zadd(f"{key}:consumers", {name: (now_s - seconds) * 1000})
            # When another one takes them, the oldest first
            assert [await dequeued(backend) for _ in tasks] == tasks
            # Then the one that has been silent for hours is forgotten
            names = {name.decode() for name in await client.zrange(f"{key}:consumers", 0, -1)}
            assert len(names) == 3
            assert names >= {"second", "third"}
        await backend.close()


async def test_what_comes_at_once_is_sent_together_and_a_lost_connection_is_reported_to_all(
    server: Server,
) -> None:
    backend = open_backend("redis")
    settings = server.settings("together")
    await backend.connect(settings)
    async with aioredis.Redis.from_url(settings.url) as client:
        # When a hundred tasks come at once
        tasks = [a_task(task_id=TaskIds(0).make(number)) for number in range(100)]
        await asyncio.gather(*(backend.enqueue_task(task) for task in tasks))

        # Then few connections were opened, and they are there in their order
        assert (await client.info("clients"))["connected_clients"] <= 4
        assert [await dequeued(backend) for _ in tasks] == tasks
        await asyncio.gather(*(backend.complete_task(task.task_id) for task in tasks))
        assert (await backend.stats()).pending_tasks == 0

        # And all who share a connection learn that it is lost, before it is made again
        await asyncio.to_thread(server.kill)
        lost = await asyncio.gather(
            *(backend.enqueue_task(task) for task in tasks[:10]), return_exceptions=True
        )
        assert [type(error) for error in lost] == [Unavailable] * 10
        await asyncio.to_thread(server.start)
        await backend.enqueue_task(tasks[0])
        assert (await backend.stats()).pending_tasks == 1
    await backend.close()


async def test_tasks_that_come_while_a_sole_consumer_rests_are_read_together(
    server: Server,
) -> None:
    producer = open_backend("redis")
    consumer = open_backend("redis", is_sole_consumer=True, gather_ms=1_000)
    settings = server.settings("rests")
    for backend in (producer, consumer):
        await backend.connect(settings)
    tasks = [a_task(task_id=TaskIds(0).make(number)) for number in range(30)]

    # Given a task that was read at once, when others come one after the other
    await producer.enqueue_task(tasks[0])
    assert await dequeued(consumer) == tasks[0]

    async def take() -> list[WriteTask]:
        return [await dequeued(consumer) for _ in tasks[1:]]

    taking = asyncio.create_task(take())
    for task in tasks[1:]:
        await producer.enqueue_task(task)

    # Then they are there in order, and only a few reads brought them
    assert await taking == tasks[1:]
    async with aioredis.Redis.from_url(settings.url) as client:
        statistics = await client.info("commandstats")
    if settings.task_structure == "lists":
        # By the script that takes tasks; the other one moves those that are due, each second.
        scripts, others = (statistics[f"cmdstat_{name}"] for name in ("evalsha", "zrangebyscore"))
        reads_count = scripts["calls"] - others["calls"]
    else:
        reads_count = statistics["cmdstat_xreadgroup"]["calls"]
    assert 0 < reads_count < len(tasks) / 2
    for backend in (producer, consumer):
        await backend.close()


async def test_a_sole_consumer_reads_few_tasks_at_once_where_they_are_large(
    server: Server,
) -> None:
    backend = open_backend("redis", is_sole_consumer=True)
    settings = server.settings("large")
    await backend.connect(settings)
    large = {"body": "A" * (200 << 10)}
    for number in range(150):
        payload = large if number >= SOLE_READ_COUNT else {}
        await backend.enqueue_task(a_task(task_id=TaskIds(0).make(number), payload=payload))
    # Given a read of small ones, one of as many large ones, and the next one
    while (await backend.stats()).pending_tasks > 150 - 2 * SOLE_READ_COUNT:
        await backend.complete_task((await dequeued(backend)).task_id)

    await dequeued(backend)

    # Then that takes as many as fit
    async with aioredis.Redis.from_url(settings.url) as client:
        key = f"{settings.stream_prefix}:tasks"
        if settings.task_structure == "lists":
            (processing,) = [one async for one in client.scan_iter(f"{key}:processing:*")]
            taken = await client.llen(processing)
        else:
            taken = (await client.xpending(key, settings.consumer_group))["pending"]
    assert taken <= 2 * READ_COUNT
    await backend.close()


async def test_entries_that_were_removed_do_not_hold_up_those_behind(tmp_path: Path) -> None:
    with running(SERVERS["redis"][1](tmp_path)) as server:
        client = aioredis.Redis.from_url(server.settings("any").url)
        gone, alive = (Group(client, "stream", "group", name) for name in ("gone", "alive"))
        # Given what a consumer that left had, of which the first page was removed from the stream
        await gone.create("0")
        for number in range(25):
            await client.xadd("stream", {"number": number})
        entries = [*await gone.read(), *await gone.read(), *await gone.read()]
        await gone.leave()
        await client.xdel("stream", *(entry.entry_id for entry in entries[:READ_COUNT]))

        # When another consumer takes over, then it looks on at once
        found = [entry.entry_id for _ in range(4) for entry in await alive.reclaim()]
        assert found == [entry.entry_id for entry in entries[READ_COUNT:]]
        await client.aclose()


async def test_rediss_connects_by_tls_to_a_server_whose_certificate_is_trusted(
    tmp_path: Path,
) -> None:
    certificate = Certificate(tmp_path)
    with running(RedisServer(tmp_path, "streams", certificate)) as server:
        settings = server.settings("encrypted")
        url = settings.url.replace("redis://", "rediss://")
        trusting = open_backend("redis")
        await trusting.connect(replace(settings, url=f"{url}?ssl_ca_certs={certificate.file}"))
        task = a_task()
        await trusting.enqueue_task(task)
        assert await dequeued(trusting) == task
        await trusting.complete_task(task.task_id)
        await trusting.close()
