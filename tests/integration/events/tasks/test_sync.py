"""Publishes that wait for their tasks; a store that is down; several ingests on one backend."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import yaml
from redis import asyncio as aioredis

import slatemq
from libs.events.settings import Consistency
from libs.events.tasks import WriteTask
from libs.serving.peers.channels import open_channel
from libs.serving.peers.topology import CACHE_MS, TopologyDirectory
from libs.serving.process.exits import EXIT_STORE_DOWN
from libs.serving.process.healthprobe import probe
from libs.serving.process.store_watch import HUNG_MS
from libs.storage.database.roots import open_root
from libs.storage.objects.small_objects import Objects
from libs.storage.objects.topology_entries import FOLDER
from services.ingest.rpc import queued as queued_rpc
from services.ingest.tasks.backend import TaskBackend
from services.ingest.tasks.consumer import TaskConsumer
from services.ingest.tasks.outcomes import TaskOutcomes
from slatemq.errors import FailedPrecondition, Unavailable
from slatemq.v1 import ingest_pb2, task_pb2, topology_pb2, topology_pb2_grpc
from tests.faults.faulty_store import Fault, Outcome, faulty_store
from tests.forms import proof
from tests.integration.events.backends.servers import Server, running
from tests.integration.events.backends.slatemq_server import SlatemqServer
from tests.integration.events.conftest import SERVERS
from tests.integration.events.tasks.queued_ingest import (
    LARGE,
    QueuedIngest,
    eventually,
    queue_settings,
    queued,
    until_connected,
    write_config,
)
from tests.integration.ingest.server import message, process
from tests.integration.storage.s3_servers import CREDENTIALS, moto, root_url
from tests.integration.waiting import hang

pytestmark = pytest.mark.slow  # Real servers, and a store that is down for a while.


async def test_a_sync_publish_is_answered_as_a_direct_one(backend: tuple[str, Server]) -> None:
    async with queued(queue_settings(*backend, "sync")) as ingest:
        small, large = await asyncio.gather(
            ingest.enqueue(message(b"a"), message(b"b"), request_id="r"),
            ingest.enqueue(message(LARGE)),
        )
        for answer in (small, large):
            assert not answer.task_id
            assert answer.received_at_ms
        assert await ingest.payloads(*small.message_ids) == [b"a", b"b"]
        assert await ingest.payloads(*large.message_ids) == [LARGE]
        again = await ingest.enqueue(message(b"a"), message(b"b"), request_id="r")
        assert list(again.message_ids) == list(small.message_ids)


async def test_a_sync_publish_whose_task_fails_gets_its_error(
    backend: tuple[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = queue_settings(*backend, "sync", max_retries=0)
    both = asyncio.Barrier(2)
    enqueue = TaskBackend.enqueue

    async def enqueue_both(tasks: TaskBackend, task: WriteTask) -> None:
        await both.wait()
        await enqueue(tasks, task)

    # The second one is accepted before the first is stored, or it would be refused at once.
    monkeypatch.setattr(TaskBackend, "enqueue", enqueue_both)
    async with queued(settings) as ingest:
        # Given two requests of one ID at the same time, with other content
        answers = await asyncio.gather(
            *(ingest.enqueue(message(b"%d" % n), request_id="r") for n in range(2)),
            return_exceptions=True,
        )
        # Then one of them is stored, and the other one is told why not
        refused = [one for one in answers if isinstance(one, FailedPrecondition)]
        assert len(refused) == 1, answers
        assert "other content" in refused[0].message
        assert refused[0].reason == "TASK_FAILED"
        assert len(await ingest.stored()) == 1
        assert [one.task_id for one in await ingest.failed()] == [refused[0].metadata["task_id"]]


async def test_a_sync_publish_is_answered_in_time_though_its_backend_took_long(
    backend: tuple[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = queue_settings(*backend, "sync")
    order: list[str] = []
    enqueue = TaskBackend.enqueue

    async def enqueue_noted(tasks: TaskBackend, task: WriteTask) -> None:
        await enqueue(tasks, task)
        order.append("enqueued")

    def seconds_to_wait(context: object) -> float:
        order.append("waits")
        return 0.2

    # Given an ingest that does not come to its tasks, and a backend that is slow to take one
    monkeypatch.setattr(TaskConsumer, "_begin", hang)
    monkeypatch.setattr(TaskBackend, "enqueue", enqueue_noted)
    monkeypatch.setattr(queued_rpc, "seconds_to_wait", seconds_to_wait)
    async with queued(settings) as ingest, aioredis.Redis.from_url(settings.redis.url) as client:
        await client.client_pause(1000, all=False)
        # Then the call ends with its task, after a wait for the rest of its time
        answer = await ingest.stub.Publish(ingest_request(b"x"), timeout=60)
        assert answer.task_id
        assert order == ["enqueued", "waits"]


async def test_the_clients_publish_is_answered_with_its_task_before_its_own_time_is_over(
    backend: tuple[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an ingest that does not come to its tasks, and a client that does not wait for long
    monkeypatch.setattr(TaskConsumer, "_begin", hang)
    async with queued(queue_settings(*backend, "sync")) as ingest:
        topology = topology_pb2_grpc.TopologyServiceStub(ingest.channel)
        known = await topology.GetTopology(topology_pb2.GetTopologyRequest(), timeout=60)
        async with slatemq.connect(known.ingests[0].address, call_timeout=5) as client:
            # Then it has the task of the one publish that there was
            published = await client.publish(b"x")
            assert published.task_id in {one.task_id for one in await ingest.pending()}
            assert len(await ingest.pending()) == 1


@pytest.mark.parametrize("timeout_ms", [0, 600_000, (1 << 63) - 1])
async def test_a_publish_on_a_stream_is_answered_with_its_task_however_long_its_producer_waits(
    backend: tuple[str, Server], timeout_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TaskConsumer, "_begin", hang)
    monkeypatch.setattr(queued_rpc, "STREAM_WAIT_S", 0.2)
    async with queued(queue_settings(*backend, "sync")) as ingest:
        stream = ingest.stub.PublishStream(timeout=60)
        request = ingest_pb2.PublishStreamRequest(
            number=1, publish=ingest_request(b"x"), timeout_ms=timeout_ms
        )
        await stream.write(request)
        await stream.done_writing()
        (answer,) = [answer async for response in stream for answer in response.answers]
        assert answer.published.task_id


async def test_a_sync_publish_reads_no_record_of_its_task(
    backend: tuple[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a store that answers no read of a task's record
    monkeypatch.setattr(TaskOutcomes, "find", hang)
    async with queued(queue_settings(*backend, "sync")) as ingest:
        # Then a publish is answered once its task is applied
        answer = await ingest.enqueue(message(b"applied"))
        assert await ingest.payloads(*answer.message_ids) == [b"applied"]

        # And with its task before the deadline, where it is not
        monkeypatch.setattr(TaskConsumer, "_begin", hang)
        monkeypatch.setattr(queued_rpc, "seconds_to_wait", lambda context: 0.2)
        assert (await ingest.stub.Publish(ingest_request(b"x"), timeout=60)).task_id


class SilentTopology(Objects):
    """A real store that stops to answer what is asked of the topology."""

    def __init__(self, objects: Objects) -> None:
        vars(self).update(vars(objects))
        self.is_silent = False

    async def get(self, path: str) -> bytes:
        if self.is_silent and path.startswith(FOLDER):
            await asyncio.Event().wait()
        return await super().get(path)


@pytest.mark.parametrize("consistency", ["async", "sync"])
async def test_publishes_with_dedupe_keys_wait_for_no_reading_of_the_topology(
    backend: tuple[str, Server], consistency: Consistency, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = open_root("memory:///")
    store = root.objects = SilentTopology(root.objects)
    async with queued(queue_settings(*backend, consistency), root) as ingest:
        # Given a topology that was read once, and a store that hangs when it is to be read again
        await ingest.enqueue(keyed(b"before"))
        monkeypatch.setattr(TopologyDirectory, "_age_ms", lambda directory, read_at: CACHE_MS + 1)
        store.is_silent = True

        # Then publishes are answered nevertheless, however many there are
        names = [b"%d" % n for n in range(20)]
        answers = await asyncio.gather(*(ingest.enqueue(keyed(name)) for name in names))
        for answer in answers:
            if consistency == "async":
                await ingest.applied(answer.task_id)
        assert sorted(await ingest.stored()) == sorted([b"before", *names])


def keyed(payload: bytes) -> ingest_pb2.PublishRun:
    return ingest_pb2.PublishRun(payloads=[payload], dedupe_keys=[payload.decode()])


@pytest.mark.s3
@pytest.mark.parametrize(
    ("kind", "consistency"),
    [
        ("redis", "async"),
        proof("redis", "sync"),
        *(
            proof(kind, consistency)
            for kind in ("redis-lists", "slatemq")
            for consistency in ("async", "sync")
        ),
    ],
)
async def test_a_store_that_is_down_costs_latency_and_no_task(
    kind: str, consistency: Consistency, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, make = SERVERS[kind]
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "server").mkdir()
    with (
        moto() as port,
        faulty_store(port) as store,
        running(make(tmp_path / "server")) as server,
    ):
        settings = queue_settings(backend, server, consistency)
        flags = ("--config", str(write_config(tmp_path, settings)))
        root, ready = root_url(store.port, f"away-{kind}-{consistency}"), tmp_path / "ready"
        async with process(root, ready, *flags) as (_, address), open_channel(address) as channel:
            ingest = QueuedIngest(channel)
            await until_connected(ingest)
            before = await ingest.enqueue(message(b"before"))

            # When nothing reaches the store, then publishes are answered with their tasks
            store.set(Fault(Outcome.HOLD))
            held_at = time.monotonic()
            names = [b"away %d" % n for n in range(10)]
            tasks = await publish_in_time(ingest, names[:5], consistency)

            # But one whose body must be an object is refused, and is no task
            with pytest.raises(Unavailable, match="store is down"):
                await ingest.enqueue(message(LARGE))

            # And small ones still are when a process says that its store hangs: this one serves on
            await asyncio.sleep(max(0, HUNG_MS / 1000 + 2 - (time.monotonic() - held_at)))

            async def is_served() -> bool:
                return await asyncio.to_thread(probe, address) == ""

            await eventually(is_served)
            tasks += await publish_in_time(ingest, names[5:], consistency)

            # When it is back, then all are applied, once, without an attempt that counts
            store.set()
            for task_id in tasks:
                task = await ingest.wait(task_id)
                assert (task.state, task.attempts_count) == (task_pb2.TASK_STATE_APPLIED, 0)
            if before.task_id:
                await ingest.applied(before.task_id)
            assert sorted(await ingest.stored()) == sorted([b"before", *names])


@pytest.mark.s3
async def test_an_ingest_whose_store_refuses_accepts_tasks_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, make = SERVERS["redis"]
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "server").mkdir()
    with (
        moto() as port,
        faulty_store(port) as store,
        running(make(tmp_path / "server")) as server,
    ):
        flags = ("--config", str(write_config(tmp_path, queue_settings(backend, server, "async"))))
        root, ready = root_url(store.port, "refuses"), tmp_path / "ready"
        async with process(root, ready, *flags) as (refused, address):
            async with open_channel(address) as channel:
                ingest = QueuedIngest(channel)
                await until_connected(ingest)
                tasks = [await ingest.send_task(b"before")]

                # When the store refuses all, so that its database is lost
                store.set(Fault(Outcome.REFUSE))
                tasks += await publish_in_time(ingest, [b"first"], "async")

                async def is_said() -> bool:
                    return (
                        "publishes are accepted as tasks" in ready.with_suffix(".log").read_text()
                    )

                await eventually(is_said)

                # Then publishes are answered all the same, and no other call is
                tasks += await publish_in_time(ingest, [b"second"], "async")
                assert await asyncio.to_thread(probe, address) == ""
                with pytest.raises(Unavailable):
                    await ingest.enqueue(message(LARGE))

                # And clients learn where it is
                topology = topology_pb2_grpc.TopologyServiceStub(channel)
                found = await topology.GetTopology(topology_pb2.GetTopologyRequest(), timeout=5)
                assert [one.shard for one in found.ingests] == [0]

            # When the store is back, then the process ends, and the next one applies all
            store.set()
            assert await refused.wait() == EXIT_STORE_DOWN
        async with process(root, ready, *flags) as (_, address), open_channel(address) as channel:
            ingest = QueuedIngest(channel)
            for task_id in tasks:
                task = await ingest.wait(task_id)
                assert (task.state, task.attempts_count) == (task_pb2.TASK_STATE_APPLIED, 0)
            assert sorted(await ingest.stored()) == [b"before", b"first", b"second"]


async def publish_in_time(
    ingest: QueuedIngest, names: list[bytes], consistency: Consistency
) -> list[str]:
    """The tasks of publishes that are answered though the store does not answer."""
    # With `sync` a publish waits for its task as long as its own deadline lets it.
    timeout_s = 5 if consistency == "sync" else 60
    requests = [ingest_request(name) for name in names]
    answers = await asyncio.gather(
        *(ingest.stub.Publish(one, timeout=timeout_s) for one in requests)
    )
    assert all(list(answer.message_ids) == [0] for answer in answers)
    tasks = [answer.task_id for answer in answers]
    assert all(tasks)
    return tasks


def ingest_request(payload: bytes) -> ingest_pb2.PublishRequest:
    return ingest_pb2.PublishRequest(runs=[message(payload)])


async def test_two_ingests_on_one_backend_apply_what_each_accepted(
    backend: tuple[str, Server], tmp_path: Path
) -> None:
    # Given two ingests of one instance, with one file of settings
    settings = queue_settings(*backend)
    root = tmp_path.as_uri()
    async with AsyncExitStack() as stack:
        both = [
            await stack.enter_async_context(queued(settings, root, shard=shard))
            for shard in range(2)
        ]
        # When both publish, then each has applied its own, and none of the other's
        tasks = [
            await ingest.send_task(b"%d %d" % (shard, n), request_id=f"{shard} {n}")
            for n in range(30)
            for shard, ingest in enumerate(both)
        ]
        for at, task_id in enumerate(tasks):
            (message_id,) = await both[at % 2].applied(task_id)
            assert message_id >> 48 == at % 2
        for shard, ingest in enumerate(both):
            assert await ingest.stored() == [b"%d %d" % (shard, n) for n in range(30)]


async def test_two_ingests_share_the_tasks_of_a_client_that_knows_one(
    backend: tuple[str, Server], tmp_path: Path
) -> None:
    # Given two ingest processes of one instance and one consumer group
    root = (tmp_path / "data").as_uri()
    flags = ("--config", str(write_config(tmp_path, queue_settings(*backend))))
    async with AsyncExitStack() as stack:
        addresses = [
            (
                await stack.enter_async_context(
                    process(root, tmp_path / f"ready-{shard}", *flags, "--shard", str(shard))
                )
            )[1]
            for shard in range(2)
        ]
        client = await stack.enter_async_context(slatemq.connect(addresses[0]))
        # When a client publishes one message after another
        published = [await client.publish(b"%d" % n) for n in range(40)]
        tasks = [await client.wait_task(one.task_id, timeout=60) for one in published]

    # Then each is applied once, and both ingests have applied some
    assert {task.state for task in tasks} == {slatemq.TaskState.APPLIED}
    message_ids = [one.message_id for task in tasks for one in task.published]
    assert len(set(message_ids)) == len(published)
    assert {message_id >> 48 for message_id in message_ids} == {0, 1}


async def test_the_client_publishes_and_waits_for_its_tasks(
    backend: tuple[str, Server], tmp_path: Path
) -> None:
    settings = queue_settings(*backend)
    flags = ("--config", str(write_config(tmp_path, settings)))
    async with (
        process((tmp_path / "data").as_uri(), tmp_path / "ready", *flags) as (_, address),
        slatemq.connect(address) as client,
    ):
        # When it publishes singly and in a batch
        single = await client.publish(b"single")
        batch = await client.publish_batch([slatemq.OutgoingMessage(b"%d" % n) for n in range(3)])
        assert int(single) == 0
        assert [one.task_place for one in batch] == [0, 1, 2]
        assert len({one.task_id for one in batch}) == 1

        # Then its tasks tell the IDs
        for published in [single, *batch]:
            task = await client.wait_task(published.task_id, timeout=60)
            assert task.state is slatemq.TaskState.APPLIED
            assert task.published[published.task_place].message_id > 0
            assert await client.get_task(published.task_id) == task
        assert [one async for one in client.failed_tasks()] == []
        assert await client.retry_failed_tasks() == 0


@pytest.mark.stack
async def test_slatemq_as_its_own_backend_applies_each_publish_once(tmp_path: Path) -> None:
    config = tmp_path / "slatemq.yaml"
    server = SlatemqServer(tmp_path, "--config", str(config))
    endpoint = f"127.0.0.1:{server.port}"
    queue = {"enabled": True, "consistency": "async", "slatemq": {"endpoint": endpoint}}
    config.write_text(yaml.safe_dump({"queue": queue}))
    with running(server):
        async with slatemq.connect(endpoint) as client:
            await client.create_queue("orders")
            published = [await client.publish(b"%d" % n, {"queue": "orders"}) for n in range(20)]
            for one in published:
                task = await client.wait_task(one.task_id, timeout=60)
                assert task.state is slatemq.TaskState.APPLIED
            claimed = await client.claim("orders", 100, wait=60)
            while len(claimed) < len(published):
                claimed += await client.claim("orders", 100, wait=60)
            assert sorted(one.payload for one in claimed) == sorted(b"%d" % n for n in range(20))
            assert (await client.get_queue("orders")).counts.available_count == 0
