"""Publishes as tasks, answered when the queue backend has them: on real servers."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from base64 import b64encode
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError
from redis import asyncio as aioredis

from libs.events.backend import BackendStats, QueueBackend
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from libs.storage.objects.task_folders import body_name
from services.ingest.tasks import consumer, servicer
from services.ingest.tasks.backend import TaskBackend
from services.ingest.tasks.bodies import ORPHAN_MS
from services.ingest.tasks.consumer import TaskConsumer
from services.ingest.tasks.outcomes import KEPT_MS
from slatemq._admin.task_ids import TaskIds
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from slatemq.events.envelope import parse_timestamp
from slatemq.v1 import ingest_pb2, task_pb2
from tests.integration.events.backends.servers import Server
from tests.integration.events.tasks.queued_ingest import (
    EVENTUALLY_S,
    LARGE,
    QueuedIngest,
    enqueue,
    eventually,
    new_task_id,
    queue_settings,
    queued,
)
from tests.integration.ingest.server import message, serving
from tests.integration.waiting import hang

pytestmark = pytest.mark.slow  # Real servers, whose redeliveries take their delays.

PENDING, APPLIED, FAILED = (
    task_pb2.TASK_STATE_PENDING,
    task_pb2.TASK_STATE_APPLIED,
    task_pb2.TASK_STATE_FAILED,
)


async def test_a_publish_is_answered_with_a_task_whose_messages_come(
    backend: tuple[str, Server],
) -> None:
    async with queued(queue_settings(*backend)) as ingest:
        # When two messages are published
        request = ingest_pb2.PublishRequest(runs=[message(b"a", k="v"), message(b"b")])
        call = ingest.stub.Publish(request, timeout=30)
        answer = await call

        # Then the answer names their task, in its headers, too
        assert list(answer.message_ids) == [0, 0]
        metadata = dict(await call.initial_metadata())
        assert metadata["slatemq-task-id"] == answer.task_id

        # And once it is applied, its messages are there, as it says
        task = await ingest.wait(answer.task_id)
        assert task.state == APPLIED
        assert task.accepted_at_ms <= task.received_at_ms <= task.ended_at_ms
        assert await ingest.payloads(*task.message_ids) == [b"a", b"b"]
        assert [one.message_id for one in await ingest.log()] == list(task.message_ids)
        assert await ingest.task(answer.task_id) == task


@pytest.mark.parametrize("backend", ["redis"], indirect=True)
async def test_a_task_has_the_request_or_names_its_object_and_says_how_long_it_is(
    backend: tuple[str, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = queue_settings(*backend)
    requests = [
        ingest_pb2.PublishRequest(runs=[message(b"a", k="v"), message(b"b")]),
        ingest_pb2.PublishRequest(runs=[message(LARGE)]),
    ]
    bodies = [request.SerializeToString() for request in requests]

    # Given publishes that no consumer applies
    monkeypatch.setattr(TaskConsumer, "_begin", hang)
    async with queued(settings, tmp_path.as_uri()) as ingest:
        answers = [await ingest.stub.Publish(request, timeout=30) for request in requests]
        async with aioredis.Redis.from_url(settings.redis.url) as client:
            entries = await client.xrange(f"{settings.redis.stream_prefix}.ingest-0:tasks")

    # Then their tasks are these
    small, large = [json.loads(fields[b"task"]) for _, fields in entries]
    created_at = [task.pop("created_at") for task in (small, large)]
    assert [parse_timestamp("created_at", one) > 0 for one in created_at] == [True, True]
    common = {"operation": "Publish", "attempts": 0, "max_retries": settings.redis.max_retries}
    assert small == {
        "task_id": answers[0].task_id,
        **common,
        "payload": {
            "shard": 0,
            "message_count": 2,
            "content_length": len(bodies[0]),
            "body": b64encode(bodies[0]).decode(),
        },
    }
    place = TaskBackend(settings, 0, Telemetry().meter).place
    path = f"tasks/ingest-0/{place}/{body_name(answers[1].task_id, bodies[1])}"
    assert large == {
        "task_id": answers[1].task_id,
        **common,
        "payload": {
            "shard": 0,
            "message_count": 1,
            "content_length": len(bodies[1]),
            "data_ref": path,
        },
    }
    assert (tmp_path / path).read_bytes() == bodies[1]


async def test_publishes_on_a_stream_are_tasks_too(backend: tuple[str, Server]) -> None:
    async with queued(queue_settings(*backend)) as ingest:
        stream = ingest.stub.PublishStream(timeout=60)
        for number in range(1, 6):
            publish = ingest_pb2.PublishRequest(runs=[message(b"%d" % number)])
            await stream.write(ingest_pb2.PublishStreamRequest(number=number, publish=publish))
        await stream.done_writing()
        answers = [answer async for response in stream for answer in response.answers]
        assert sorted(answer.number for answer in answers) == [1, 2, 3, 4, 5]
        for answer in answers:
            (message_id,) = await ingest.applied(answer.published.task_id)
            assert await ingest.payloads(message_id) == [b"%d" % answer.number]


async def test_tasks_are_applied_in_the_order_of_their_answers(
    backend: tuple[str, Server],
) -> None:
    async with queued(queue_settings(*backend)) as ingest:
        # Given a publisher that waits for each answer: every second message is to be uploaded
        # before it is stored, and one has a key that is to be looked up
        payloads = [b"%d" % n + bytes(100_000 * (n % 2)) for n in range(60)]
        messages = [message(payload) for payload in payloads]
        messages[30].dedupe_keys.append("k")
        ids = [
            (await ingest.enqueue(one, request_id=f"r{n}")).task_id
            for n, one in enumerate(messages)
        ]

        # When all are applied, then they are stored in that order
        for task_id in ids:
            await ingest.applied(task_id)
        assert await ingest.stored() == payloads


async def test_wrong_input_is_refused_at_once_as_in_direct_mode(
    backend: tuple[str, Server],
) -> None:
    async with queued(queue_settings(*backend)) as ingest:
        with pytest.raises(InvalidArgument) as refused:
            await ingest.enqueue(message(b"x", **{"": "empty key"}))
        assert refused.value.field.startswith("runs[0].headers")
        with pytest.raises(InvalidArgument):
            await ingest.enqueue()
        assert await ingest.failed() == []


async def test_a_repeated_request_gets_the_first_ones_messages(
    backend: tuple[str, Server],
) -> None:
    async with queued(queue_settings(*backend)) as ingest:
        # Given one request that was sent twice before it was applied, perhaps
        both = await asyncio.gather(*(ingest.enqueue(message(b"x"), request_id="r") for _ in "ab"))
        ids = [
            await ingest.applied(one.task_id) if one.task_id else one.message_ids for one in both
        ]
        assert ids[0] == ids[1]

        # When it is repeated after that, then its messages are reported at once, and none is stored
        again = await ingest.enqueue(message(b"x"), request_id="r")
        assert list(again.message_ids) == list(ids[0])
        assert not again.task_id
        assert await ingest.stored() == [b"x"]

        # And with other content it is refused
        with pytest.raises(InvalidArgument) as refused:
            await ingest.enqueue(message(b"y"), request_id="r")
        assert refused.value.reason == "REQUEST_ID_REUSED"


async def test_a_large_body_is_an_object_until_it_is_applied(
    backend: tuple[str, Server], tmp_path: Path
) -> None:
    root = tmp_path.as_uri()
    async with queued(queue_settings(*backend), root) as ingest:
        (message_id,) = await ingest.applied(await ingest.send_task(LARGE))
        assert await ingest.payloads(message_id) == [LARGE]
        objects = open_root(root).objects

        async def is_removed() -> bool:
            return not await objects.list("tasks")

        await eventually(is_removed)


async def test_orphaned_bodies_are_removed_at_the_start_and_others_stay(
    backend: tuple[str, Server], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "services.ingest")
    # Given bodies of publishes that were never enqueued: an old one, one that may be on its way,
    # and two old ones of another backend
    root = tmp_path.as_uri()
    objects = open_root(root).objects
    settings = queue_settings(*backend)
    place = TaskBackend(settings, 0, Telemetry().meter).place
    elsewhere = TaskBackend(queue_settings(*backend), 0, Telemetry().meter).place
    assert elsewhere != place
    folders = (place, place, elsewhere, elsewhere)
    names = [body_name(new_task_id(), b"body") for _ in folders]
    old, new, *others = [
        f"tasks/ingest-0/{folder}/{name}" for folder, name in zip(folders, names, strict=True)
    ]
    for path in (old, new, *others):
        await objects.put(path, b"body")
    long_ago = (tmp_path / old).stat().st_mtime - ORPHAN_MS / 1000 - 1
    for path in (old, *others):
        os.utime(tmp_path / path, (long_ago, long_ago))

    # When the ingest starts, then the old one goes, and the log tells of the others
    async with queued(settings, root):

        async def is_removed() -> bool:
            return set(await objects.list("tasks")) == {new, *others}

        await eventually(is_removed)
        # It is told of once it has happened
        while "removed 1 bodies" not in caplog.text:
            await asyncio.sleep(0.01)
    assert "tasks/ingest-0 has 2 bodies of publishes accepted with another backend" in caplog.text
    assert "unless that was this backend by another name" in caplog.text

    # And where none is left, none is told of
    caplog.clear()
    async with queued(settings, root) as ingest:
        await ingest.applied(await ingest.send_task(b"x"))

        async def is_reported() -> bool:
            return "has 2 bodies" in caplog.text

        await eventually(is_reported)
    assert "removed" not in caplog.text


@pytest.mark.parametrize("backend", ["redis"], indirect=True)
async def test_an_answered_publish_keeps_its_delay_though_a_lower_one_is_allowed_meanwhile(
    backend: tuple[str, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = queue_settings(*backend)

    # Given a publish that was answered and not applied
    run = ingest_pb2.PublishRun(payloads=[b"delayed"], delay_ms=5)
    with monkeypatch.context() as patch:
        patch.setattr(TaskConsumer, "_begin", hang)
        async with queued(settings, tmp_path.as_uri(), max_message_delay_ms=5) as ingest:
            task_id = (await ingest.enqueue(run)).task_id

    # When the instance allows no such delay any more, then it is stored with it
    async with queued(settings, tmp_path.as_uri(), max_message_delay_ms=4) as ingest:
        await ingest.applied(task_id)
        assert [one.delay_ms for one in await ingest.log()] == [5]
        # And another one is refused
        with pytest.raises(InvalidArgument):
            await ingest.enqueue(run)


async def test_a_backend_that_refuses_commands_is_waited_for(
    backend: tuple[str, Server], caplog: pytest.LogCaptureFixture
) -> None:
    settings = queue_settings(*backend)
    key = f"{settings.redis.stream_prefix}.ingest-0:tasks"
    async with queued(settings) as ingest, aioredis.Redis.from_url(settings.redis.url) as client:
        await ingest.applied(await ingest.send_task(b"before"))
        # Given a key that holds something else for a while
        if await client.exists(key):  # an empty list does not
            await client.rename(key, "aside")
        await client.set(key, "no tasks")

        async def is_refused() -> bool:
            return "Redis refuses calls" in caplog.text

        await eventually(is_refused)
        # When that is repaired, then the ingest goes on
        await client.delete(key)
        if await client.exists("aside"):
            await client.rename("aside", key)
        await ingest.applied(await ingest.send_task(b"after"))
        assert await ingest.stored() == [b"before", b"after"]


async def test_a_task_that_comes_again_is_not_applied_again(backend: tuple[str, Server]) -> None:
    settings = queue_settings(*backend)
    async with queued(settings) as ingest:
        task_id = await ingest.send_task(b"once")
        ids = await ingest.applied(task_id)
        # When the backend gives it out again, with the same or another body
        payload = {"content_length": 1, "body": "AA=="}
        await enqueue(settings, task_id, payload)
        await ingest.applied(await ingest.send_task(b"behind it"))

        # Then nothing more is stored, and its outcome stays
        assert await ingest.stored() == [b"once", b"behind it"]
        assert list((await ingest.task(task_id)).message_ids) == ids


async def test_a_task_that_waits_for_another_attempt_is_listed_with_its_error(
    backend: tuple[str, Server],
) -> None:
    settings = queue_settings(*backend, retry_delay_ms=10 * 60_000)
    async with queued(settings) as ingest:
        # Given a task whose first attempt has failed
        task_id = new_task_id()
        await enqueue(settings, task_id, {"content_length": 4, "data_ref": "any"}, max_retries=3)
        while not (await ingest.task(task_id)).error:
            await asyncio.sleep(0.01)

        # Then it is listed, but by RabbitMQ, which shows no message that waits
        expected = [] if backend[0] == "rabbitmq" else [task_id]
        await eventually(lambda: _lists(ingest, expected))
        for task in await ingest.pending():
            assert (task.state, task.attempts_count) == (task_pb2.TASK_STATE_PENDING, 1)
            assert "payload.data_ref" in task.error

        # And a wrong limit is named
        with pytest.raises(InvalidArgument, match="limit"):
            await ingest.pending(1_001)


@pytest.mark.parametrize("has_restarted", [False, True])
async def test_a_task_that_waits_for_another_attempt_is_pending_however_old_it_is(
    backend: tuple[str, Server], monkeypatch: pytest.MonkeyPatch, has_restarted: bool
) -> None:
    monkeypatch.setattr(servicer, "WAIT_S_MAX", 0.3)
    settings, root = queue_settings(*backend, retry_delay_ms=10 * 60_000), open_root("memory:///")
    old_ms = int(time.time() * 1000) - KEPT_MS - 60_000
    waiting, unknown = TaskIds(0).make(old_ms), TaskIds(0).make(old_ms)
    async with queued(settings, root) as ingest:
        # Given a task of a week ago that has failed, and waits
        await enqueue(settings, waiting, {"content_length": 4, "data_ref": "any"}, max_retries=3)
        while not (await ingest.task(waiting)).error:
            await asyncio.sleep(0.01)
        if not has_restarted:
            # When all that was accepted before newer tasks has come, then it is pending,
            monkeypatch.setattr(consumer, "SETTLE_MS", -KEPT_MS)
            await ingest.applied(await ingest.send_task(b"newer"))
            # though another one of its age is not
            await eventually(partial(_is_forgotten, ingest, unknown))
            await check_pending(ingest, waiting)
    if has_restarted:
        # When nothing is known of what came before, then it is pending, too
        async with queued(settings, root) as ingest:
            await ingest.applied(await ingest.send_task(b"newer"))
            await check_pending(ingest, waiting)


async def test_a_task_with_an_outcome_is_known_while_the_backend_is_down_however_old_it_is(
    backend: tuple[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = queue_settings(*backend)
    old = TaskIds(0).make(int(time.time() * 1000) - KEPT_MS - 60_000)
    async with queued(settings) as ingest:
        await enqueue(settings, old, {"content_length": 4, "data_ref": "any"}, max_retries=0)
        failed = await ingest.wait(old)

        async def down(_: QueueBackend) -> BackendStats:
            raise Unavailable("the backend went down", reason="BACKEND_DOWN")

        monkeypatch.setattr(QueueBackend, "stats", down)
        assert await ingest.task(old) == failed
        assert failed.state == FAILED


async def check_pending(ingest: QueuedIngest, task_id: str) -> None:
    """A task is pending for a call that asks, and for one that waits."""
    assert (await ingest.task(task_id)).state == PENDING
    assert (await ingest.wait(task_id)).state == PENDING


async def _is_forgotten(ingest: QueuedIngest, task_id: str) -> bool:
    try:
        await ingest.task(task_id)
    except NotFound:
        return True
    return False


async def _lists(ingest: QueuedIngest, task_ids: list[str]) -> bool:
    return [one.task_id for one in await ingest.pending()] == task_ids


async def test_a_wrong_task_id_is_distinguished_from_one_that_waits(
    backend: tuple[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queued(queue_settings(*backend)) as ingest:
        now_ms = int((await ingest.wait(await ingest.send_task(b"x"))).ended_at_ms)
        waiting = TaskIds(0).make(now_ms)
        assert (await ingest.task(waiting)).state == PENDING
        monkeypatch.setattr(servicer, "WAIT_S_MAX", 0.3)
        assert (await ingest.wait(waiting)).state == PENDING
        await eventually(partial(_is_forgotten, ingest, TaskIds(0).make(now_ms - KEPT_MS - 60_000)))
        with pytest.raises(InvalidArgument) as elsewhere:
            await ingest.task(TaskIds(7).make(now_ms))
        assert elsewhere.value.metadata["shard"] == "7"
        with pytest.raises(InvalidArgument):
            await ingest.task(waiting[:-1] + ("0" if waiting[-1] != "0" else "1"))


async def test_waits_for_tasks_end_and_leave_room_for_other_calls(
    backend: tuple[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "WAITING_MAX", 1)
    async with queued(queue_settings(*backend)) as ingest:
        applied = await ingest.send_task(b"x")
        task = await ingest.wait(applied)
        absent = task_pb2.WaitTaskRequest(task_id=TaskIds(0).make(int(task.ended_at_ms)))

        # Also without a deadline
        monkeypatch.setattr(servicer, "WAIT_S_MAX", 0.01)
        assert (await ingest.tasks.WaitTask(absent)).task.state == PENDING

        monkeypatch.setattr(servicer, "WAIT_S_MAX", 3600)
        waiting = asyncio.create_task(_code_of(ingest.tasks.WaitTask(absent)))
        refused = asyncio.create_task(_code_of(ingest.tasks.WaitTask(absent)))
        # One of them waits, whichever came first.
        (done,), (other,) = await asyncio.wait(
            [waiting, refused], return_when=asyncio.FIRST_COMPLETED
        )
        assert done.result() is StatusCode.RESOURCE_EXHAUSTED
        other.cancel()
        await asyncio.wait([other])


async def _code_of(call: Any) -> StatusCode:
    try:
        await call
    except AioRpcError as error:
        return error.code()
    return StatusCode.OK


async def test_a_killed_backend_refuses_publishes_and_goes_on_when_it_is_back(
    backend: tuple[str, Server],
) -> None:
    async with queued(queue_settings(*backend)) as ingest:
        before = [await ingest.send_task(b"%d" % n) for n in range(20)]
        await asyncio.sleep(backend[1].settle_s)
        await asyncio.to_thread(backend[1].kill)
        with pytest.raises(Unavailable) as down:
            await ingest.send_task(b"lost")
        assert down.value.reason == "BACKEND_DOWN"
        await asyncio.to_thread(backend[1].start)

        async def publishes() -> bool:
            before.append(await ingest.send_task(b"after"))
            return True

        await eventually(publishes)
        for task_id in before:
            await ingest.applied(task_id)
        stored = await ingest.stored()
        assert sorted(set(stored) - {b"lost"}) == sorted(
            {b"after", *(b"%d" % n for n in range(20))}
        )
        assert len([one for one in stored if one not in (b"lost", b"after")]) == 20


async def test_an_ingest_that_starts_before_its_backend_waits_for_it(
    backend: tuple[str, Server],
) -> None:
    await asyncio.to_thread(backend[1].kill)
    started = False
    try:
        async with serving(queue=queue_settings(*backend)) as plain:
            ingest = QueuedIngest(plain.channel)
            with pytest.raises(Unavailable):
                await ingest.send_task(b"x")
            await asyncio.to_thread(backend[1].start)
            started = True
            await eventually(ingest.failed)
            await ingest.applied(await ingest.send_task(b"x"))
    finally:
        if not started:
            await asyncio.to_thread(backend[1].start)


async def test_an_ingest_that_serves_takes_publishes_at_once(
    backend: tuple[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given one whose backend is there: it is connected to before it serves
    monkeypatch.setattr("services.ingest.tasks.backend.FIRST_TRY_S", EVENTUALLY_S)
    for _ in range(3):
        async with serving(queue=queue_settings(*backend)) as plain:
            ingest = QueuedIngest(plain.channel)
            await ingest.applied(await ingest.send_task(b"x"))


async def test_a_direct_ingest_says_that_it_has_no_tasks() -> None:
    async with serving() as plain:
        ingest = QueuedIngest(plain.channel)
        with pytest.raises(FailedPrecondition) as direct:
            await ingest.failed()
        assert direct.value.reason == "DIRECT_MODE"
