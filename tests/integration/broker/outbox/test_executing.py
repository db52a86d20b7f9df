"""Execute over gRPC: lists of commands, their refusals, their repeats."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from libs.storage.database.blobs import Blobs
from libs.storage.errors import StoreFailed
from services.broker.outbox import pusher
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.errors import InvalidArgument, SlateMQError
from slatemq.v1.consumer_pb2 import (
    Command,
    CompleteCommand,
    ExecuteRequest,
    ExecuteResponse,
    ExtendCommand,
    FailCommand,
    PushCommand,
    ReleaseCommand,
    TransferCommand,
)
from tests.integration.broker.outbox.pushes import Pushes
from tests.integration.broker.rig import Disk, Rig, introduce, memory_root, running
from tests.integration.waiting import eventually
from tests.manual_clock import ManualClock

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def complete(token: str) -> Command:
    return Command(complete=CompleteCommand(lease_token=token))


def push(queue_id: str = "q", payload: bytes = b"new", **rest: Any) -> Command:
    return Command(push=PushCommand(queue_id=queue_id, payload=payload, **rest))


def transfer(token: str, target: str, **rest: Any) -> Command:
    return Command(
        transfer=TransferCommand(lease_token=token, target_queue_id=target, **rest),
    )


async def execute(rig: Rig, *commands: Command, request_id: str = "") -> ExecuteResponse:
    request = ExecuteRequest(request_id=request_id, commands=commands)
    answer: ExecuteResponse = await rig.consumers.Execute(request, timeout=60)
    return answer


async def refused(rig: Rig, *commands: Command, request_id: str = "") -> SlateMQError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await execute(rig, *commands, request_id=request_id)
    return from_rpc_error(failure.value)


async def test_all_commands_take_effect_together_and_stay_after_a_restart() -> None:
    disk, clock, pushes = Disk(), ManualClock(), Pushes()
    root = memory_root(disk)
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        await rig.create()
        await rig.create("next")
        await rig.assign([1, 2, 3, 4, 5])
        tokens = [message.lease_token for message in await rig.claim(max_messages=5)]

        answer = await execute(
            rig,
            complete(tokens[0]),
            Command(fail=FailCommand(lease_token=tokens[1], reason="no such street")),
            Command(release=ReleaseCommand(lease_token=tokens[2])),
            Command(extend=ExtendCommand(lease_token=tokens[3], lease_ms=40_000)),
            transfer(tokens[4], "next", priority=3),
            push("next", b"hello", headers={"kind": "note"}, retention_s=60, delay_ms=5),
        )

        ends = [result.lease_deadline_ms for result in answer.results]
        assert ends == [0, 0, 0, clock.now_ms() + 40_000, 0, 0]
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        assert await rig.counts() == {"available": 1, "in_flight": 1, "done": 2, "failed": 1}
        [moved] = await rig.claim("next")
        assert (moved.message.message_id, moved.priority, moved.attempts_count) == (5, 3, 1)
        await eventually(pushes.payloads)
        [pushed] = pushes.stored[0]
        assert (pushed.queue_id, pushed.headers["kind"]) == ("next", "note")
        assert (pushed.retention_s, pushed.delay_ms) == (60, 5)
        assert not pushed.HasField("visible_at_ms")
        assert pushed.created_at_ms <= clock.now_ms()


async def test_who_waits_on_the_target_gets_what_is_transferred_to_it() -> None:
    async with running() as rig:
        await rig.create()
        await rig.create("next")
        await rig.assign([1])
        [message] = await rig.claim()
        waits = asyncio.create_task(rig.claim("next", wait_ms=60_000))

        await execute(rig, transfer(message.lease_token, "next"))

        [moved] = await waits
        assert moved.message.message_id == 1


async def test_what_is_transferred_to_a_delayed_queue_waits_unless_it_is_said() -> None:
    async with running() as rig:
        await rig.create()
        await rig.create("audited", default_delay_ms=60_000)
        await rig.assign([1, 2])
        tokens = [message.lease_token for message in await rig.claim(max_messages=2)]

        await execute(
            rig, transfer(tokens[0], "audited"), transfer(tokens[1], "audited", delay_ms=0)
        )

        assert await rig.counts("audited") == {"available": 1, "delayed": 1}
        [at_once] = await rig.claim("audited")
        assert at_once.message.message_id == 2


TOKEN = "0-0123456789abcdef"
BAD: list[tuple[str, list[Command]]] = [
    ("commands", []),
    ("commands", [push()] * 1001),
    ("commands[0]", [Command()]),
    ("commands[1].complete.lease_token", [push(), complete("no token")]),
    ("commands[0].complete.lease_token", [complete("")]),
    ("commands[0].fail.reason", [Command(fail=FailCommand(lease_token=TOKEN, reason="x" * 1025))]),
    (
        "commands[0].release.delay_ms",
        [Command(release=ReleaseCommand(lease_token=TOKEN, delay_ms=-1))],
    ),
    (
        "commands[0].release.delay_ms",
        [Command(release=ReleaseCommand(lease_token=TOKEN, delay_ms=43_200_001))],
    ),
    ("commands[0].extend.lease_ms", [Command(extend=ExtendCommand(lease_token=TOKEN, lease_ms=1))]),
    ("commands[0].transfer.target_queue_id", [transfer(TOKEN, "")]),
    ("commands[0].transfer.priority", [transfer(TOKEN, "q", priority=256)]),
    ("commands[0].transfer.priority", [transfer(TOKEN, "q", priority=-1)]),
    ("commands[0].transfer.delay_ms", [transfer(TOKEN, "q", delay_ms=43_200_001)]),
    ("commands[0].push.queue_id", [push("no queue!")]),
    ("commands[1].push.payload", [push(), push(payload=bytes(100_001))]),
    ('commands[0].push.headers[""]', [push(headers={"": "x"})]),
    ("commands[0].push.headers", [push(headers={str(n): "" for n in range(256)})]),
    ('commands[0].push.headers["k"]', [push(headers={"k": "x" * 65_536})]),
    ("commands[0].push.retention_s", [push(retention_s=-1)]),
    ("commands[0].push.retention_s", [push(retention_s=1 << 32)]),
    ("commands[0].push.delay_ms", [push(delay_ms=900_001)]),
    ("commands[0].push.delay_ms", [push(delay_ms=1, visible_at_ms=1)]),
    ("commands[0].push.visible_at_ms", [push(visible_at_ms=-1)]),
]


async def test_bad_input_names_its_field_and_changes_nothing() -> None:
    pushes = Pushes()
    async with running(pushes=pushes, settings={"payload_bytes_max": 100_000}) as rig:
        await rig.create()
        await rig.assign([1])
        [message] = await rig.claim()
        good = complete(message.lease_token)
        for field, commands in BAD:
            error = await refused(rig, *commands)
            assert isinstance(error, InvalidArgument), (field, error)
            assert error.field == field
            place = field.removeprefix("commands").strip("[").split("]")[0]
            assert error.metadata.get("command", "") == place
            if commands and len(commands) < 1000:
                await refused(rig, good, *commands)
        long = await refused(rig, good, request_id="x" * 129)
        twice = await refused(rig, good, transfer(message.lease_token, "q"))

        assert isinstance(long, InvalidArgument)
        assert long.field == "request_id"
        assert isinstance(twice, InvalidArgument)
        assert twice.field == "commands[1].transfer.lease_token"
        assert await rig.counts() == {"in_flight": 1}
        assert await rig.ack(message.lease_token) == [0]
        assert pushes.calls == []


async def test_the_pushes_of_a_call_have_64_mib_together() -> None:
    async with running() as rig:
        await rig.create()

        error = await refused(rig, *[push(payload=bytes(22 << 20))] * 3)

        assert isinstance(error, InvalidArgument)
        assert error.field == "commands[2].push"


async def test_a_push_of_the_largest_payload_is_a_call_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pusher, "PUSHES_BYTES_MAX", 200_000)
    pushes = Pushes()
    async with running(pushes=pushes, settings={"payload_bytes_max": 200_000}) as rig:
        await rig.create()
        large = push(payload=bytes(200_000))

        error = await refused(rig, push(), large)
        assert isinstance(error, InvalidArgument)
        assert error.field == "commands[1].push"

        await execute(rig, large)
        await eventually(lambda: len(pushes.stored.get(0, ())) == 1)


async def test_nothing_is_uploaded_for_an_outbox_that_has_no_room_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pushes, uploads, put = Pushes(), list[bytes](), Blobs.put

    async def counted(blobs: Blobs, payload: bytes) -> str:
        uploads.append(payload)
        return await put(blobs, payload)

    monkeypatch.setattr(Blobs, "put", counted)
    pushes.down = True
    async with running(pushes=pushes, settings={"outbox_bytes_max": 1 << 20}) as rig:
        await rig.create()
        await execute(rig, *[push(payload=bytes(60_000))] * 16)
        wanted = [push(payload=bytes(100_000)), *[push(payload=bytes(60_000))] * 2]

        assert (await refused(rig, *wanted)).reason == "OUTBOX_FULL"

        assert uploads == []
        await execute(rig, *wanted[:2])
        assert len(uploads) == 1


async def test_a_refusal_shows_which_command_and_nothing_has_happened() -> None:
    async with running() as rig:
        await rig.create()
        await rig.assign([1, 2])
        first, second = (one.lease_token for one in await rig.claim(max_messages=2))
        await rig.ack(first)

        items = [
            await refused(rig, complete(second), bad)
            for bad in (
                complete(TOKEN),
                complete("1" + TOKEN[1:]),
                complete(first),
                push("none"),
                transfer(first, "q"),
            )
        ]
        target = await refused(rig, transfer(second, "none"))

        assert [error.reason for error in items] == [
            "LEASE_UNKNOWN",
            "LEASE_UNKNOWN",
            "LEASE_ENDED",
            "QUEUE_NOT_FOUND",
            "LEASE_ENDED",
        ]
        assert {error.metadata["command"] for error in items} == {"1"}
        assert (target.reason, target.metadata["command"]) == ("QUEUE_NOT_FOUND", "0")
        assert await rig.counts() == {"in_flight": 1, "done": 1}


# --- Repeats ----------------------------------------------------------------


async def test_a_repeat_is_ok_over_restarts_and_other_commands_are_refused() -> None:
    disk, clock, pushes = Disk(), ManualClock(), Pushes()
    root = memory_root(disk)
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        await rig.create()
        await rig.assign([1, 2])
        tokens = [message.lease_token for message in await rig.claim(max_messages=2)]
        commands = [complete(tokens[0]), push(headers={"b": "1", "a": "2"}), push()]
        await execute(rig, *commands, request_id="r")
        await execute(rig, *commands, request_id="r")
    clock.advance(9 * 60_000)
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        answer = await execute(rig, *commands, request_id="r")
        error = await refused(rig, *commands[::-1], request_id="r")
        await eventually(lambda: len(pushes.payloads()) >= 2)

        assert len(answer.results) == 3
        assert isinstance(error, InvalidArgument)
        assert (error.field, error.reason) == ("request_id", "REQUEST_ID_REUSED")
        assert len(pushes.payloads()) == 2


async def test_a_step_of_the_clock_forgets_no_request_id_before_its_time() -> None:
    async with running() as rig:
        await rig.create()
        executor = rig.broker.executor
        await execute(rig, push(), request_id="once")
        rig.clock.advance(60_000)
        for passed_ms in (0, 599_000):
            rig.clock.step(3_600_000) if not passed_ms else rig.clock.advance(passed_ms)
            await rig.owner.run(executor.forget_once)
            await execute(rig, push(), request_id="once")
            assert rig.owner.shard.outbox.counter(0).last_number == 1

        rig.clock.advance(1_000)
        await rig.owner.run(executor.forget_once)
        await execute(rig, push(), request_id="once")
        assert rig.owner.shard.outbox.counter(0).last_number == 2


async def test_repeats_at_the_same_time_wait_for_the_first() -> None:
    disk, pushes = Disk(), Pushes()
    async with running(disk=disk, pushes=pushes) as rig:
        await rig.create()
        await rig.assign([1])
        [message] = await rig.claim()
        commands = [complete(message.lease_token), push()]

        # Given a call that took effect in memory, and whose commit the disk holds back
        disk.free.clear()
        first = asyncio.create_task(execute(rig, *commands, request_id="r"))
        await eventually(lambda: rig.owner.shard.executed.fingerprint("r") is not None)

        # When it is repeated, without a network that could hold the answers back
        request = ExecuteRequest(request_id="r", commands=commands)
        repeats = [asyncio.create_task(rig.broker.executor.execute(request)) for _ in range(2)]
        for _ in range(100):
            await asyncio.sleep(0)

        # Then all are answered once the commit is durable, and it took effect once
        assert not any(call.done() for call in (first, *repeats))
        disk.free.set()
        await asyncio.gather(first, *repeats)
        await eventually(pushes.payloads)
        assert await rig.counts() == {"done": 1}
        assert pushes.payloads() == [b"new"]


async def test_repeats_fail_with_the_commit_of_the_first() -> None:
    disk = Disk()
    async with running(disk=disk) as rig:
        await rig.create()
        request = ExecuteRequest(request_id="r", commands=[push()])

        # Given a call and its repeat that wait for a commit
        disk.free.clear()
        calls = [asyncio.create_task(rig.broker.executor.execute(request)) for _ in range(2)]
        await eventually(lambda: rig.owner.shard.executed.fingerprint("r") is not None)
        for _ in range(100):
            await asyncio.sleep(0)

        # When that fails, then neither is answered
        disk.broken = True
        disk.free.set()
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in errors] == [StoreFailed, StoreFailed]


async def test_a_refused_call_leaves_its_request_id_free() -> None:
    async with running() as rig:
        await rig.create()
        await rig.assign([1])
        [message] = await rig.claim()
        await refused(rig, complete(message.lease_token), push("none"), request_id="r")

        await execute(rig, complete(message.lease_token), request_id="r")

        assert await rig.counts() == {"done": 1}


# --- Other shards, large payloads -------------------------------------------


async def test_queues_of_other_shards_take_pushes_but_no_transfers() -> None:
    disk, pushes = Disk(), Pushes()
    root = memory_root(disk)
    async with running(root, disk=disk, pushes=pushes) as rig:
        async with running(root, disk=disk, shard=1) as other:
            await introduce(rig)
            await other.create("far")
            await rig.create()
            await rig.assign([1])
            [message] = await rig.claim()

            await execute(rig, push("far"))
            moved = await refused(rig, transfer(message.lease_token, "far"))
            missing = await refused(rig, push("far"), push("none"))

            assert (moved.reason, moved.metadata["command"]) == ("OTHER_SHARD", "0")
            assert (missing.reason, missing.metadata["command"]) == ("QUEUE_NOT_FOUND", "1")
        away = await refused(rig, push("far"))

        assert away.reason == "BROKER_DOWN"
        await execute(rig, push("q"))
        await eventually(lambda: len(pushes.payloads()) == 2)


async def test_large_payloads_are_stored_as_objects_before_the_commit() -> None:
    disk, pushes = Disk(), Pushes()
    root = memory_root(disk)
    payload = b"large " * 20_000
    async with running(root, disk=disk, pushes=pushes) as rig:
        await rig.create()

        await execute(rig, push(payload=b"small"), push(payload=payload), request_id="r")
        await execute(rig, push(payload=b"small"), push(payload=payload), request_id="r")
        refusal = await refused(rig, complete(TOKEN), push(payload=payload))
        await eventually(pushes.payloads)

        small, large = pushes.stored[0]
        assert small.payload == b"small"
        assert (large.payload, large.payload_bytes) == (b"", len(payload))
        assert await Blobs(root).get(large.payload_uri) == payload
        assert refusal.reason == "LEASE_UNKNOWN"
        assert len(await root.objects.list("blobs")) == 1


async def test_a_request_id_is_known_after_two_restarts_in_its_minute() -> None:
    disk = Disk()
    root, clock, pushes = memory_root(disk), ManualClock(), Pushes()

    # Given a request in each of two lives of a broker
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        await rig.create()
        await execute(rig, push(payload=b"1"), request_id="r1")
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        await execute(rig, push(payload=b"2"), request_id="r2")

    # Then the first one pushes nothing when it is repeated in the third
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        await execute(rig, push(payload=b"1"), request_id="r1")
        assert rig.owner.shard.outbox.counter(0).last_number == 2
