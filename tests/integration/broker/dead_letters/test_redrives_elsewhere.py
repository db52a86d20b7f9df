"""Redrives into queues of other shards, through crashes, and the lists of redrives."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from libs.filters import Filter, FilterError
from libs.storage.database.blobs import Blobs
from libs.storage.database.slate import Database
from services.broker.core import redrives
from services.broker.core.lists.outbox import REASON_CHARACTERS_MAX
from services.broker.dead_letters import redrive_runner
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.errors import InvalidArgument
from slatemq.v1 import entry_pb2, message_pb2, queue_pb2
from tests.forms import shortly
from tests.integration.broker.entry_calls import (
    AVAILABLE,
    FAILED,
    RUNNING,
    ended,
    entries,
    fail,
    ids,
    listed,
    redrive,
    redriven,
    start,
    until,
)
from tests.integration.broker.moves.movers import Steps
from tests.integration.broker.outbox.pushes import Pushes
from tests.integration.broker.outbox.test_outbox import UNANSWERED, Fault
from tests.integration.broker.queue_calls import delete
from tests.integration.broker.rig import (
    Disk,
    Rig,
    close_channel,
    introduce,
    memory_root,
    refusal,
    running,
)
from tests.integration.waiting import eventually
from tests.manual_clock import ManualClock

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
DONE = entry_pb2.Redrive.STATE_DONE
LETTERS = 30


def payload(number: int) -> bytes:
    return b"%010d" % number


# --- Into a queue of another shard --------------------------------------------


async def test_into_a_queue_of_another_shard_they_go_as_new_messages() -> None:
    disk, pushes = Disk(), Pushes()
    root = memory_root(disk)
    async with (
        running(root, disk=disk, shard=1) as other,
        running(root, disk=disk, pushes=pushes) as rig,
    ):
        await other.create("far")
        await rig.create(max_attempts=1)
        deadline = rig.clock.now_ms() + 90_000
        await rig.assign([1, 2, 3, 4], retention_deadlines_ms=[0, deadline, deadline - 60_000, 0])
        rig.ingest.replaced[2] = message_pb2.Message(
            message_id=2, payload=b"large " * 20_000, headers={"a": "b"}
        )
        for one in await rig.claim(max_messages=4):
            await rig.nack(one.lease_token)
        rig.clock.advance(30_000)
        rig.ingest.gone = {4}

        result = await redriven(rig, target_queue_id="far")

        assert result.state == DONE
        assert (result.examined_count, result.redriven_count) == (4, 2)
        assert await ids(rig, FAILED) == [3, 4], "past its retention, and not stored any more"
        left = await listed(rig, queue_pb2.ENTRY_STATE_DONE)
        assert [(one.message_id, one.transferred_to) for one in left] == [(1, "far"), (2, "far")]
        await eventually(lambda: len(pushes.stored.get(0, ())) == 2)
        first, second = pushes.stored[0]
        assert (first.queue_id, first.payload) == ("far", payload(1))
        assert (first.HasField("retention_s"), first.retention_s) == (True, 0)
        assert first.retention_deadline_ms == 0
        assert (second.queue_id, dict(second.headers)) == ("far", {"a": "b"})
        assert second.retention_deadline_ms == deadline
        assert await Blobs(rig.root).get(second.payload_uri) == b"large " * 20_000


async def test_where_nothing_can_be_pushed_it_goes_on_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redrive_runner, "STEP_MESSAGES", 10)
    disk, pushes = Disk(), Pushes()
    root = memory_root(disk)
    async with (
        running(root, disk=disk, shard=1) as other,
        running(root, disk=disk, pushes=pushes) as rig,
    ):
        await other.create("far")
        await rig.create(max_attempts=1)
        await fail(rig, range(1, LETTERS + 1))
        rig.ingest.gone = {*range(1, 16)}

        for wanted in ("false", ""):
            result = await redriven(rig, target_queue_id="far", filter=wanted)
            assert (result.state, result.examined_count) == (DONE, result.total_count)

        await eventually(lambda: pushes.payloads() == [payload(n) for n in range(16, 31)])


async def test_a_target_shard_that_is_down_is_waited_for_and_a_deleted_one_is_reported() -> None:
    disk, pushes = Disk(), Pushes()
    root = memory_root(disk)
    clock = ManualClock()
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        await rig.create(max_attempts=1)
        await fail(rig, range(1, LETTERS + 1))
        async with running(root, disk=disk, shard=1) as other:
            await introduce(rig)
            await other.create("far")
            one = await start(rig, target_queue_id="far", rate=10)
            await until(rig, one.redrive_id, lambda value: value.redriven_count >= 1)
        refused = await refusal(start(rig, target_queue_id="far"))
        assert refused[:2] == (grpc.StatusCode.UNAVAILABLE, "BROKER_DOWN")
        assert (await redrive(rig, one.redrive_id)).state == RUNNING
        async with running(root, disk=disk, shard=1) as other:
            count = (await redrive(rig, one.redrive_id)).redriven_count
            await until(rig, one.redrive_id, lambda value: value.redriven_count > count)
            await delete(other, "far")
            result = await ended(rig, one.redrive_id)
            assert result.state == entry_pb2.Redrive.STATE_FAILED
            assert result.error == "queue 'far' does not exist any more"
        left = await ids(rig, FAILED)
        assert len(left) == LETTERS - result.redriven_count > 0
        await eventually(lambda: len(pushes.payloads()) == result.redriven_count)


async def test_it_goes_on_where_the_channel_to_the_target_shard_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redrive_runner, "RETRY_S", 0.01)
    disk = Disk()
    root = memory_root(disk)
    async with (
        running(root, disk=disk, shard=1) as other,
        running(root, disk=disk, pushes=Pushes()) as rig,
    ):
        await other.create("far")
        await rig.create(max_attempts=1)
        await fail(rig, range(1, LETTERS + 1))
        steps = Steps(3)  # 1 and 2 are of the call that starts it.
        steps.between(other.owner, "find")
        started = await start(rig, target_queue_id="far")
        await steps.reached.wait()

        await close_channel(rig.service.channels, "broker", 1)
        redrives = rig.owner.shard.redrives
        await eventually(lambda: not list(redrives.running()) or rig.ended.done())

        assert not rig.ended.done()
        assert (await redrive(rig, started.redrive_id)).redriven_count == LETTERS


async def test_a_full_outbox_is_waited_for_and_nothing_is_uploaded_meanwhile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk, pushes = Disk(), Pushes()
    root = memory_root(disk)
    pushes.down = True
    async with (
        running(root, disk=disk, shard=1) as other,
        running(root, disk=disk, pushes=pushes, settings={"outbox_rows_max": 1}) as rig,
    ):
        await other.create("far")
        await rig.create(max_attempts=1)
        await fail(rig, [1])
        await redriven(rig, target_queue_id="far")
        await fail(rig, [2])
        rig.ingest.sizes[2] = 200_000
        one = await start(rig, target_queue_id="far")
        reads = len(rig.ingest.reads)
        await eventually(lambda: "waits: the outbox is full: 1 of 1 pushes wait" in caplog.text)
        assert len(rig.ingest.reads) == reads
        assert await ids(rig, FAILED) == [2]
        pushes.down = False
        result = await ended(rig, one.redrive_id)
        assert (result.state, result.redriven_count) == (DONE, 1)
        await eventually(lambda: len(pushes.stored.get(0, ())) == 2)


# --- A commit that fails --------------------------------------------------------


async def reaches_its_end(rig: Rig, redrive_id: str) -> bool:
    """Waits until the redrive is done; False when the broker breaks before."""
    try:
        async with asyncio.timeout(60):
            while True:
                result = await redrive(rig, redrive_id)
                if result.state == DONE:
                    return True
                await asyncio.sleep(0.005)
    except grpc.aio.AioRpcError as error:
        if error.code() not in UNANSWERED:
            raise
        return False


@pytest.mark.parametrize("target", ["q", "other", "far"])
@pytest.mark.parametrize("kept", [False, True], ids=["lost", "kept"])
@pytest.mark.parametrize("at", shortly(range(1, 6), 2, 4))
async def test_each_dead_letter_moves_once_whichever_commit_fails(
    monkeypatch: pytest.MonkeyPatch, at: int, kept: bool, target: str
) -> None:
    # Given a row of letters that takes three steps, and a fault that will strike
    monkeypatch.setattr(redrive_runner, "STEP_MESSAGES", 10)
    disk, clock, pushes = Disk(), ManualClock(), Pushes()
    root = memory_root(disk)
    async with running(root, disk=disk, shard=1) as other:
        await other.create("far")
        async with running(root, clock, disk=disk, pushes=pushes) as rig:
            await rig.create(max_attempts=1)
            await rig.create("other")
            await fail(rig, range(1, LETTERS + 1))
        fault = Fault(at, kept)
        original = Database.flush

        async def flush(database: Database) -> None:
            ours = database.name == "broker/0"
            await (fault.flush(database) if ours else original(database))

        monkeypatch.setattr(Database, "flush", flush)

        # When the request is repeated, and the broker started again after each failure
        done = False
        while not done:
            async with running(root, clock, disk=disk, pushes=pushes) as rig:
                try:
                    one = await start(rig, request_id="r", target_queue_id=target)
                except grpc.aio.AioRpcError as error:
                    if error.code() not in UNANSWERED:
                        raise
                    continue
                done = await reaches_its_end(rig, one.redrive_id)
        assert fault.struck or at > 4

        # Then each is there once
        async with running(root, clock, disk=disk, pushes=pushes) as rig:
            result = await redrive(rig, one.redrive_id)
            assert (result.examined_count, result.redriven_count) == (LETTERS, LETTERS)
            assert await ids(rig, FAILED) == []
            if target == "far":
                await eventually(lambda: rig.owner.shard.outbox.waiting_count(0) == 0)
            else:
                assert await ids(rig, AVAILABLE, queue_id=target) == [*range(1, LETTERS + 1)]
                assert await rig.counts(target) == {"available": LETTERS}
        expected = [payload(n) for n in range(1, LETTERS + 1)] if target == "far" else []
        assert pushes.payloads() == expected


async def test_one_whose_filter_is_not_understood_any_more_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by a later version of the broker, after its start."""

    def refuses(source: str) -> Filter:
        raise FilterError(f"{source} is not understood: {'𝔮' * 65_536}")  # no record takes that

    async with running() as rig:
        await rig.create(max_attempts=1)
        await fail(rig, [1])
        monkeypatch.setattr(redrive_runner, "dead_letter_filter", refuses)
        result = await redriven(rig, filter="true")
        assert (result.state, result.examined_count) == (entry_pb2.Redrive.STATE_FAILED, 0)
        assert "true is not understood" in result.error
        assert len(result.error) == REASON_CHARACTERS_MAX
        monkeypatch.undo()
        request = entry_pb2.ResumeRedriveRequest(redrive_id=result.redrive_id)
        assert (await entries(rig).ResumeRedrive(request)).redrive.error == ""
        result = await ended(rig, result.redrive_id)
        assert (result.state, result.redriven_count) == (DONE, 1)


# --- What may be asked -----------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code", "reason", "field"),
    [
        ({"queue_id": ""}, INVALID, "INVALID_QUEUE_ID", "queue_id"),
        ({"queue_id": "a b"}, INVALID, "INVALID_QUEUE_ID", "queue_id"),
        ({"queue_id": "none"}, NOT_FOUND, "QUEUE_NOT_FOUND", None),
        ({"target_queue_id": "a/b"}, INVALID, "INVALID_QUEUE_ID", "target_queue_id"),
        ({"target_queue_id": "none"}, NOT_FOUND, "QUEUE_NOT_FOUND", None),
        ({"rate": -1}, INVALID, "OUT_OF_RANGE", "rate"),
        ({"rate": 100_001}, INVALID, "OUT_OF_RANGE", "rate"),
        ({"message_ids": [1] * 10_001}, INVALID, None, "message_ids"),
        ({"message_ids": [1, 0]}, INVALID, None, "message_ids[1]"),
        ({"message_ids": [-1]}, INVALID, None, "message_ids[0]"),
        ({"message_ids": [1 << 62]}, INVALID, None, "message_ids[0]"),
        ({"request_id": "é" * 65}, INVALID, None, "request_id"),
        ({"filter": " " * 20_000}, INVALID, None, "filter"),
        ({"filter": "size +"}, INVALID, "INVALID_EXPRESSION", "filter"),
        ({"filter": "priority == 1"}, INVALID, "INVALID_EXPRESSION", "filter"),
        ({"filter": "attempts == 'x'"}, INVALID, "INVALID_EXPRESSION", "filter"),
        ({"filter": "attempts"}, INVALID, "INVALID_EXPRESSION", "filter"),
    ],
    ids=str,
)
async def test_what_cannot_be_redriven_is_refused_and_nothing_is_begun(
    fields: dict[str, Any], code: grpc.StatusCode, reason: str | None, field: str | None
) -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await fail(rig, [1])

        told_code, told_reason, result = await refusal(start(rig, **{"queue_id": "q", **fields}))

        assert (told_code, told_reason) == (code, reason or told_reason)
        assert field is None or result == field
        answer = await entries(rig).ListRedrives(entry_pb2.ListRedrivesRequest())
        assert list(answer.redrives) == []
        assert await rig.counts() == {"failed": 1}


async def test_a_bad_filter_is_reported_with_its_position_and_the_variables_that_there_are() -> (
    None
):
    async with running() as rig:
        await rig.create()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await start(rig, filter="true &&\n  priority == 1")
        error = from_rpc_error(refused.value)
        assert isinstance(error, InvalidArgument)
        assert (error.metadata["line"], error.metadata["column"]) == ("2", "3")
        known = "headers, created_at, received_at, size, message_id, reason, attempts, failed_at"
        assert known in str(refused.value.details())


@pytest.mark.parametrize("redrive_id", ["", "1", "0-2", "1-1", "0-0", "0-1-1", "0-" + "f" * 17])
async def test_there_is_no_redrive_of_another_id(redrive_id: str) -> None:
    async with running() as rig:
        await rig.create()
        assert (await redriven(rig)).redrive_id == "0-1"
        stub = entries(rig)
        for call in (
            stub.GetRedrive(entry_pb2.GetRedriveRequest(redrive_id=redrive_id)),
            stub.CancelRedrive(entry_pb2.CancelRedriveRequest(redrive_id=redrive_id)),
            stub.ResumeRedrive(entry_pb2.ResumeRedriveRequest(redrive_id=redrive_id)),
        ):
            assert (await refusal(call))[:2] == (NOT_FOUND, "REDRIVE_NOT_FOUND")


async def listed_redrives(rig: Rig, page_size: int, queue_id: str = "") -> list[str]:
    found: list[str] = []
    token = ""
    while True:
        request = entry_pb2.ListRedrivesRequest(
            page_size=page_size, page_token=token, queue_id=queue_id
        )
        answer = await entries(rig).ListRedrives(request)
        assert len(answer.redrives) <= (page_size or 100)
        found += [one.redrive_id for one in answer.redrives]
        token = answer.next_page_token
        if not token:
            return found


async def test_redrives_are_listed_the_newest_first_and_the_first_to_end_are_forgotten() -> None:
    disk, clock = Disk(), ManualClock()
    root = memory_root(disk)
    async with running(root, clock, disk=disk, settings={"redrives_kept": 5}) as rig:
        for queue_id in ("q", "p"):
            await rig.create(queue_id, max_attempts=1)
        await fail(rig, range(1, 301))
        first = await start(rig, rate=1)  # It goes on for minutes: the others leave it all.
        done = [(await redriven(rig, "pq"[n % 2], filter="false")).redrive_id for n in range(7)]
        stopped = entry_pb2.CancelRedriveRequest(redrive_id=first.redrive_id)
        await entries(rig).CancelRedrive(stopped)
    async with running(root, clock, disk=disk) as rig:
        kept = [*done[:2:-1], first.redrive_id]
        for page_size in (0, 1, 2, 5, 1000):
            assert await listed_redrives(rig, page_size) == kept
        assert await listed_redrives(rig, 1, "q") == [done[5], done[3], first.redrive_id]
        assert await listed_redrives(rig, 1, "none") == []
        assert (await refusal(redrive(rig, done[0])))[0] == NOT_FOUND
        assert (await redriven(rig)).redrive_id not in (*done, first.redrive_id)


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"page_size": -1}, "OUT_OF_RANGE", "page_size"),
        ({"page_token": "x"}, "INVALID_PAGE_TOKEN", "page_token"),
        ({"page_token": "1-1"}, "INVALID_PAGE_TOKEN", "page_token"),
        ({"queue_id": "a b"}, "INVALID_QUEUE_ID", "queue_id"),
    ],
    ids=str,
)
async def test_what_cannot_be_listed_is_refused(
    fields: dict[str, Any], reason: str, field: str
) -> None:
    async with running() as rig:
        call = entries(rig).ListRedrives(entry_pb2.ListRedrivesRequest(**fields))
        assert await refusal(call) == (INVALID, reason, field)


async def test_only_so_many_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redrives, "RUNNING_MAX", 2)
    async with running() as rig:
        await rig.create(max_attempts=1)
        await fail(rig, range(1, 1001))
        running_ids = [(await start(rig, rate=1)).redrive_id for _ in range(2)]
        refused = await refusal(start(rig))
        assert refused[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REDRIVES")
        request = entry_pb2.CancelRedriveRequest(redrive_id=running_ids[0])
        await entries(rig).CancelRedrive(request)
        assert (await redriven(rig)).state == DONE
