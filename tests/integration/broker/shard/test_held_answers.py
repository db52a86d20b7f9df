"""No call is answered with what the disk does not have yet: not even that something is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from libs.storage.records.execution_records import OutboxRecord, encode_outbox
from slatemq.v1 import assignment_pb2, consumer_pb2, entry_pb2, outbox_pb2, queue_pb2
from tests.integration.broker.entry_calls import AVAILABLE, listed, redriven
from tests.integration.broker.outbox.pushes import Pushes
from tests.integration.broker.rig import Disk, Rig, running
from tests.integration.broker.rpc.extreme_requests import REQUESTS, prepare
from tests.integration.broker.rpc.test_extremes import READING, SERVICES, STREAMS
from tests.integration.waiting import eventually
from tests.services import service_of

PUSH_ID, REDRIVE_ID = "0-0-1", "0-1"

IN_MEMORY: Final = {"ResumeOutbox", "GetShardLoad", "CheckArrival", "StopClaim"}
"""Whether an outbox is halted, what a shard has to do, and which claims wait, is not stored at all;
and whether a queue may come is judged again by the command that has it begin to arrive."""

OF_DISK: Final = {"WatchQueues", "GetRoutingState", "LocateQueue"}
"""They tell what the disk has, and need not wait for it."""

AT_ONCE: Final = OF_DISK | {"WatchDelayed"}
"""They wait for no commit that changes nothing that they tell."""

UNSEEN_S: Final = 0.3
"""An answer within this time would be too early; a slow machine sees fewer of them."""


async def fill(rig: Rig) -> None:
    """A queue with a message, a refused push and two redrives."""
    await prepare(rig)
    await rig.assign([1])

    def refuse(now_ms: int) -> None:
        outbox = rig.owner.shard.outbox
        value = encode_outbox(OutboxRecord(now_ms, "q", b"new", 3, {}))
        outbox.push(0, value, now_ms)
        outbox.set_aside(0, value, "too large", now_ms)

    await rig.owner.run(refuse)
    for _ in range(2):  # the newest is never dropped
        await redriven(rig)
    await rig.owner.durable()


def remove_all(rig: Rig) -> Callable[[int], None]:
    """All that the calls are about is gone."""

    def remove(_: int) -> None:
        shard = rig.owner.shard
        for queue in list(shard.queues.values()):
            shard.delete_queue(queue)
        assert shard.outbox.forget((0, 1))
        shard.redrives._drop([1])

    return remove


async def readings(rig: Rig) -> dict[str, Message]:
    handle = (await listed(rig, AVAILABLE))[0].handle
    return {
        "GetQueue": queue_pb2.GetQueueRequest(queue_id="q"),
        "ListQueues": queue_pb2.ListQueuesRequest(),
        "WatchQueues": queue_pb2.WatchQueuesRequest(),
        "LocateQueue": queue_pb2.LocateQueueRequest(queue_id="q"),
        "GetRoutingState": assignment_pb2.GetRoutingStateRequest(),
        "ListEntries": entry_pb2.ListEntriesRequest(queue_id="q", state=AVAILABLE),
        "GetEntry": entry_pb2.GetEntryRequest(handle=handle),
        "FindMessage": entry_pb2.FindMessageRequest(message_id=1),
        "WatchDelayed": entry_pb2.WatchDelayedRequest(queue_id="q"),
        "GetRedrive": entry_pb2.GetRedriveRequest(redrive_id=REDRIVE_ID),
        "ListRedrives": entry_pb2.ListRedrivesRequest(),
        "GetOutbox": outbox_pb2.GetOutboxRequest(),
        "GetRefusedPush": outbox_pb2.GetRefusedPushRequest(push_id=PUSH_ID),
    }


async def commands(rig: Rig) -> dict[str, Message]:
    """Each about something that there is."""
    requests = {name: await make(rig) for name, make in REQUESTS.items()}
    for name in ("RetryRefusedPush", "DiscardRefusedPush"):
        requests[name].push_id = PUSH_ID
    requests["Claim"].lease_ms = 0
    for name in ("CancelRedrive", "ResumeRedrive"):
        requests[name].redrive_id = REDRIVE_ID
    return requests


def caller(rig: Rig) -> Callable[[str, Message], Coroutine[Any, Any, object]]:
    """Gives the first answer to a call, or the code and the words of its refusal."""
    methods = {
        one.name: one for service in SERVICES for one in service_of(f"{service}Service").methods
    }

    async def call(name: str, request: Message) -> object:
        method = methods[name]
        path = f"/{method.containing_service.full_name}/{name}"
        channel: Any = rig.channel
        try:
            if not method.server_streaming:
                return await channel.unary_unary(path, type(request).SerializeToString)(request)
            answers = channel.unary_stream(path, type(request).SerializeToString)(request)
            answer = await answers.read()
            answers.cancel()
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details()
        else:
            return answer

    return call


async def answered(tasks: dict[str, asyncio.Task[object]]) -> dict[str, object]:
    """The answers that come while the disk is held."""
    await asyncio.wait(tasks.values(), timeout=UNSEEN_S)
    return {name: task.result() for name, task in tasks.items() if task.done()}


def is_unavailable(answer: object) -> bool:
    return isinstance(answer, tuple) and answer[0] is grpc.StatusCode.UNAVAILABLE


async def test_what_a_reading_call_shows_is_on_disk() -> None:
    # Given all sorts of things, and a disk that hangs when all of them are removed
    disk, pushes = Disk(), Pushes()
    pushes.down = True
    async with running(disk=disk, pushes=pushes) as rig, asyncio.timeout(60):
        await fill(rig)
        requests, call = await readings(rig), caller(rig)
        assert requests.keys() == READING - IN_MEMORY
        before = {name: await call(name, request) for name, request in requests.items()}
        disk.free.clear()
        await rig.owner.run(remove_all(rig))

        # When they are asked for
        tasks = {name: asyncio.create_task(call(name, one)) for name, one in requests.items()}
        early = await answered(tasks)

        # Then who is answered hears what the disk has, and the others wait until they are gone
        assert early == {name: before[name] for name in early}
        assert set(early) <= OF_DISK, early
        disk.free.set()
        await asyncio.wait(tasks.values())
        for name in requests.keys() - early.keys() - OF_DISK:
            assert tasks[name].result() != before[name], name


async def test_no_command_is_refused_for_what_is_not_on_disk() -> None:
    # Given all sorts of things, and a disk that hangs when all of them are removed
    disk, pushes = Disk(), Pushes()
    pushes.down = True
    async with running(disk=disk, pushes=pushes) as rig, asyncio.timeout(60):
        await fill(rig)
        requests, call = await commands(rig), caller(rig)
        assert not requests.keys() & (READING | STREAMS)
        await rig.owner.durable()
        disk.free.clear()
        await rig.owner.run(remove_all(rig))

        # When they are to be changed
        tasks = {name: asyncio.create_task(call(name, one)) for name, one in requests.items()}
        early = await answered(tasks)

        # Then no answer comes before they are gone on disk, too, but of a peer that is down
        down = {name for name, answer in early.items() if is_unavailable(answer)}
        assert set(early) - down <= IN_MEMORY, early
        disk.free.set()
        await asyncio.wait(tasks.values())


async def test_a_target_that_is_gone_is_reported_when_its_deletion_is_on_disk() -> None:
    # Given an archived message, and a queue whose deletion hangs
    disk, pushes = Disk(), Pushes()
    pushes.down = True
    async with running(disk=disk, pushes=pushes) as rig, asyncio.timeout(60):
        await prepare(rig)
        request, call = await REQUESTS["RedriveArchived"](rig), caller(rig)
        request.target_queue_id = "settings"
        await rig.owner.durable()
        disk.free.clear()
        await rig.owner.run(lambda _: rig.owner.shard.delete_queue(rig.owner.queue("settings")))

        # When the message is to be moved there
        task = asyncio.create_task(call("RedriveArchived", request))

        # Then it is refused when the deletion is on disk
        assert not await answered({"RedriveArchived": task})
        disk.free.set()
        assert await task == (grpc.StatusCode.NOT_FOUND, "queue 'settings' does not exist")


async def commit_in_flight(disk: Disk, rig: Rig) -> None:
    """The disk hangs with a commit; nothing is changed by it."""
    disk.free.clear()
    rig.owner.write_rows([(b"\xff", None)])
    await eventually(lambda: rig.owner.commits.overdue_ms() > 0)


def change_once_durable(disk: Disk, rig: Rig, change: Callable[[int], object]) -> None:
    """Let the commit that hangs pass, and make a change before any who waited for it goes on.

    The disk hangs with that change.
    """
    changing: list[asyncio.Task[object]] = []

    def run_change(_: int) -> None:
        if not changing:
            disk.free.clear()
            changing.append(asyncio.create_task(rig.owner.run(change)))

    rig.owner.commits.on_durable(run_change)
    disk.free.set()


async def test_what_goes_while_a_reading_call_waits_is_reported_when_it_is_gone_on_disk() -> None:
    # Given all sorts of things, and calls that read them, which wait for a commit
    disk, pushes = Disk(), Pushes()
    pushes.down = True
    async with running(disk=disk, pushes=pushes) as rig, asyncio.timeout(60):
        await fill(rig)
        requests, call = await readings(rig), caller(rig)
        before = {name: await call(name, request) for name, request in requests.items()}
        await commit_in_flight(disk, rig)
        tasks = {name: asyncio.create_task(call(name, one)) for name, one in requests.items()}
        await asyncio.wait([tasks[name] for name in AT_ONCE])
        assert await answered(tasks) == {name: before[name] for name in AT_ONCE}

        # When all is removed before they go on, and that hangs
        change_once_durable(disk, rig, remove_all(rig))

        # Then who is answered hears what was
        early = await answered(tasks)
        assert early == {name: before[name] for name in early}
        disk.free.set()
        await asyncio.wait(tasks.values())


async def test_an_entry_is_in_the_wrong_state_when_that_is_on_disk() -> None:
    # Given a cancellation of a message, which waits for a commit
    disk = Disk()
    async with running(disk=disk) as rig, asyncio.timeout(60):
        await rig.create()
        await rig.assign([1])
        handle = (await listed(rig, AVAILABLE))[0].handle
        await commit_in_flight(disk, rig)
        request = entry_pb2.CancelEntryRequest(handle=handle)
        cancelling: asyncio.Task[Any] = asyncio.create_task(caller(rig)("CancelEntry", request))
        assert not await answered({"CancelEntry": cancelling})

        # When the message is claimed before it goes on, and that hangs
        claim = consumer_pb2.ClaimRequest(queue_id="q", max_messages=1)
        claiming = asyncio.ensure_future(rig.consumers.Claim(claim))
        await eventually(lambda: rig.owner.shard.queues["q"].leases.count)
        change_once_durable(disk, rig, lambda _: None)

        # Then the cancellation is refused once the claim is on disk
        assert not await answered({"CancelEntry": cancelling})
        disk.free.set()
        code, words = await cancelling
        assert code == grpc.StatusCode.FAILED_PRECONDITION, words
        await claiming


async def test_a_redrive_is_not_refused_for_a_target_whose_deletion_is_not_on_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a redrive that waits for a commit
    disk = Disk()
    async with running(disk=disk) as rig, asyncio.timeout(60):
        for queue_id in ("q", "target"):
            await rig.create(queue_id)
        await commit_in_flight(disk, rig)
        waits, durable = asyncio.Event(), rig.owner.durable

        async def wait_durable() -> None:
            waits.set()
            await durable()

        monkeypatch.setattr(rig.owner, "durable", wait_durable)
        request = entry_pb2.StartRedriveRequest(queue_id="q", target_queue_id="target")
        starting: asyncio.Task[Any] = asyncio.create_task(caller(rig)("StartRedrive", request))
        await waits.wait()
        assert not await answered({"StartRedrive": starting})

        # When its target is deleted before it goes on, and that hangs
        target = rig.owner.queue("target")
        change_once_durable(disk, rig, lambda _: rig.owner.shard.delete_queue(target))

        # Then no answer says so before the deletion is on disk
        early = await answered({"StartRedrive": starting})
        assert not early, early
        disk.free.set()
        started = entry_pb2.StartRedriveResponse.FromString(await starting)
        assert started.redrive.target_queue_id == "target"
