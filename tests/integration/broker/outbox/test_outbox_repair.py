"""Pushes refused permanently, and outboxes whose numbers differ: with real ingests."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from libs.serving.peers import topology
from libs.storage.database.slate import Database
from libs.storage.layout.own_keys import outbox_key
from services.broker.outbox import sender as outbox_sender
from services.broker.outbox.targets import IngestPushes
from slatemq.errors import InvalidArgument
from slatemq.v1 import outbox_pb2, outbox_pb2_grpc
from tests.forms import shortly
from tests.integration.broker.outbox.test_executing import complete, execute, push, refused
from tests.integration.broker.outbox.test_outbox import Fault, waiting
from tests.integration.broker.rig import Rig, refusal, running
from tests.integration.ingest.server import Ingest, serving
from tests.integration.waiting import eventually
from tests.manual_clock import ManualClock

LARGE = b"large " * 20_000
BELOW_LARGE: dict[str, Any] = {"payload_bytes_max": 100_000}

NOT_FOUND = grpc.StatusCode.NOT_FOUND


def outbox_stub(rig: Rig) -> Any:
    return outbox_pb2_grpc.OutboxServiceStub(rig.channel)


async def outbox_state(rig: Rig) -> outbox_pb2.GetOutboxResponse:
    answer: outbox_pb2.GetOutboxResponse = await outbox_stub(rig).GetOutbox(
        outbox_pb2.GetOutboxRequest()
    )
    return answer


async def halted(rig: Rig) -> str:
    """Why the outbox for ingest 0 is halted."""
    await eventually(lambda: 0 in rig.owner.shard.outbox.halts)
    (line,) = (await outbox_state(rig)).lines
    return line.halted_reason


async def retry(rig: Rig, push_id: str) -> None:
    await outbox_stub(rig).RetryRefusedPush(outbox_pb2.RetryRefusedPushRequest(push_id=push_id))


async def resume(rig: Rig) -> None:
    await outbox_stub(rig).ResumeOutbox(outbox_pb2.ResumeOutboxRequest(ingest_shard=0))


async def stored(ingest: Ingest) -> list[bytes]:
    log = await ingest.log()
    return await ingest.payloads(*(entry.message_id for entry in log)) if log else []


def give_up(root: Path, service: str) -> None:
    """Puts the shard's database aside, and its entry of the topology, so that a new one begins."""
    (root / service).rename(root / "elsewhere")
    (root / "topology" / f"{service}-0.json").unlink()


async def known(root: Path) -> None:
    """An ingest has announced itself, with the limits of before, and is down.

    The broker has had a queue: its first one would need the ingest.
    """
    async with serving(root.as_uri()), running(root, pushes=IngestPushes) as rig:
        await rig.create("before")


# --- Refused permanently -----------------------------------------------------------


async def test_a_push_refused_permanently_is_set_aside_and_the_others_come_once(
    tmp_path: Path,
) -> None:
    # Given pushes that wait for an ingest, whose largest payload is lowered meanwhile
    await known(tmp_path)
    clock = ManualClock()
    async with running(tmp_path, clock, pushes=IngestPushes) as rig:
        await rig.create()
        for payload in (b"1", b"2", LARGE, b"3"):
            await execute(rig, push(payload=payload, headers={"a": "b"}))
        async with serving(tmp_path.as_uri(), **BELOW_LARGE) as ingest:
            # When it is back
            await eventually(lambda: waiting(rig) == 0)

            # Then all but one have come, and that one is reported, with the reason
            assert await stored(ingest) == [b"1", b"2", b"3"]
            (aside,) = (await outbox_state(rig)).refused_pushes
            assert (aside.queue_id, aside.payload_bytes) == ("q", len(LARGE))
            assert "at most" in aside.reason or "must be within" in aside.reason
            assert rig.owner.shard.outbox.counter(0).waiting_bytes == 0
    async with (
        running(tmp_path, clock, pushes=IngestPushes) as rig,
        serving(tmp_path.as_uri()) as ingest,
    ):
        # And it can be looked at and retried, also after a restart, once
        (again,) = (await outbox_state(rig)).refused_pushes
        assert again == aside
        shown = await outbox_stub(rig).GetRefusedPush(
            outbox_pb2.GetRefusedPushRequest(push_id=aside.push_id)
        )
        assert (shown.push, shown.payload, dict(shown.headers)) == (aside, LARGE, {"a": "b"})
        await retry(rig, aside.push_id)
        assert (await refusal(retry(rig, aside.push_id)))[0] == NOT_FOUND
        await execute(rig, push(payload=b"4"))
        await eventually(lambda: waiting(rig) == 0)
        assert await stored(ingest) == [b"1", b"2", b"3", LARGE, b"4"]
        assert list((await outbox_state(rig)).refused_pushes) == []


async def test_a_payload_that_the_ingest_would_refuse_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Given an ingest whose largest payload is below the broker's
    monkeypatch.setattr(topology, "CACHE_MS", 0)
    async with running(tmp_path, pushes=IngestPushes) as rig:
        await rig.create()
        await rig.assign([1])
        (claimed,) = await rig.claim()
        async with serving(tmp_path.as_uri(), **BELOW_LARGE):
            # When a larger one is pushed, then nothing of the list happens
            commands = (complete(claimed.lease_token), push(payload=LARGE))
            error = await refused(rig, *commands)
            assert isinstance(error, InvalidArgument)
            assert error.field == "commands[1].push.payload"
            assert error.metadata["command"] == "1"
            assert await rig.counts() == {"in_flight": 1}
            await execute(rig, push(payload=b"x" * 100_000))
        async with serving(tmp_path.as_uri()) as ingest:
            # And once the ingest takes it, it is taken
            async with asyncio.timeout(60):
                while True:
                    try:
                        await execute(rig, *commands)
                        break
                    except grpc.aio.AioRpcError as failure:
                        if failure.code() != grpc.StatusCode.INVALID_ARGUMENT:
                            raise
                    await asyncio.sleep(0.01)
            await eventually(lambda: waiting(rig) == 0)
            assert await stored(ingest) == [b"x" * 100_000, LARGE]


@pytest.mark.parametrize("kept", [False, True], ids=["lost", "kept"])
@pytest.mark.parametrize("at", shortly(range(1, 9), 2, 5))
async def test_what_is_refused_is_set_aside_once_whichever_commit_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: int, kept: bool
) -> None:
    # Given pushes that wait, two of which will be refused, and a fault that will strike
    await known(tmp_path)
    clock = ManualClock()
    async with running(tmp_path, clock, pushes=IngestPushes) as rig:
        await rig.create()
        await execute(rig, push(payload=LARGE))
        await execute(rig, push(payload=b"1"), push(payload=LARGE), push(payload=b"2"))
    fault = Fault(at, kept)
    monkeypatch.setattr(Database, "flush", lambda database: fault.flush(database))

    # When broker and ingest are started again after the failure
    for _ in range(2):
        before = fault.struck
        async with (
            serving(tmp_path.as_uri(), **BELOW_LARGE) as ingest,
            running(tmp_path, clock, pushes=IngestPushes) as rig,
        ):

            def is_over(rig: Rig = rig, before: object = before) -> bool:
                return waiting(rig) == 0 or fault.struck is not before

            await eventually(is_over)

    # Then each is where it belongs, once
    async with (
        serving(tmp_path.as_uri(), **BELOW_LARGE) as ingest,
        running(tmp_path, clock, pushes=IngestPushes) as rig,
    ):
        await eventually(lambda: waiting(rig) == 0)
        assert await stored(ingest) == [b"1", b"2"]
        assert len((await outbox_state(rig)).refused_pushes) == 2


async def test_a_discarded_push_is_gone(tmp_path: Path) -> None:
    await known(tmp_path)
    clock = ManualClock()
    async with running(tmp_path, clock, pushes=IngestPushes) as rig:
        await rig.create()
        await execute(rig, push(payload=LARGE))
        async with serving(tmp_path.as_uri(), **BELOW_LARGE):
            await eventually(lambda: waiting(rig) == 0)
        (aside,) = (await outbox_state(rig)).refused_pushes
        request = outbox_pb2.DiscardRefusedPushRequest(push_id=aside.push_id)
        await outbox_stub(rig).DiscardRefusedPush(request)
        assert (await refusal(outbox_stub(rig).DiscardRefusedPush(request)))[0] == NOT_FOUND
    async with running(tmp_path, clock, pushes=IngestPushes) as rig:
        assert list((await outbox_state(rig)).refused_pushes) == []


async def test_where_too_many_are_set_aside_the_outbox_halts_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(outbox_sender, "REFUSED_MAX", 1)
    monkeypatch.setattr(outbox_sender, "HALTED_MS_MAX", 100)
    await known(tmp_path)
    async with running(tmp_path, pushes=IngestPushes) as rig:
        await rig.create()
        await execute(rig, push(payload=LARGE), push(payload=LARGE), push(payload=b"1"))
        async with serving(tmp_path.as_uri(), **BELOW_LARGE) as ingest:
            assert "1 push is set aside already" in await halted(rig)
            assert await stored(ingest) == []
        async with serving(tmp_path.as_uri()) as ingest:
            await eventually(lambda: waiting(rig) == 0)
            assert await stored(ingest) == [LARGE, b"1"]
            assert (await outbox_state(rig)).lines[0].halted_reason == ""


async def test_a_damaged_row_is_set_aside_and_cannot_be_retried(tmp_path: Path) -> None:
    await known(tmp_path)
    async with running(tmp_path, pushes=IngestPushes) as rig:
        await rig.create()
        await execute(rig, push(payload=b"1"), push(payload=b"2"), push(payload=b"3"))
        await rig.owner.run(lambda _: rig.owner.shard.write_rows([(outbox_key(0, 2), b"damaged")]))
        async with serving(tmp_path.as_uri()) as ingest:
            await eventually(lambda: waiting(rig) == 0)
            assert await stored(ingest) == [b"1", b"3"]
            (aside,) = (await outbox_state(rig)).refused_pushes
            assert aside.queue_id == ""
            assert "damaged" in aside.reason
            code, _, _ = await refusal(retry(rig, aside.push_id))
            assert code == grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize("push_id", ["", "1", "0-0-1", "1-0-1", "0-0-1-1", "0-0-" + "f" * 17])
async def test_there_is_no_refused_push_of_another_id(push_id: str) -> None:
    async with running() as rig:
        stub = outbox_stub(rig)
        for call in (
            stub.GetRefusedPush(outbox_pb2.GetRefusedPushRequest(push_id=push_id)),
            stub.RetryRefusedPush(outbox_pb2.RetryRefusedPushRequest(push_id=push_id)),
            stub.DiscardRefusedPush(outbox_pb2.DiscardRefusedPushRequest(push_id=push_id)),
        ):
            assert (await refusal(call))[0] == NOT_FOUND


# --- Numbers that differ ----------------------------------------------------------


async def test_an_ingest_that_lost_rows_halts_the_outbox_until_it_has_them_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Given an ingest that has stored pushes
    monkeypatch.setattr(outbox_sender, "HALTED_MS_MAX", 100)
    clock = ManualClock()
    async with running(tmp_path, clock, pushes=IngestPushes) as rig:
        async with serving(tmp_path.as_uri()):
            await rig.create()
            await execute(rig, push(payload=b"1"), push(payload=b"2"))
            await eventually(lambda: waiting(rig) == 0)
        # When it is down, and another one, which has none of them, stands at its place
        give_up(tmp_path, "ingest")
        await execute(rig, push(payload=b"3"))
        async with serving(tmp_path.as_uri()) as ingest:
            # Then that is reported, and nothing is sent to it
            assert "OUTBOX_GAP" in await halted(rig)
            await asyncio.sleep(0.5)
            assert await stored(ingest) == []
            halts = [one for one in caplog.records if "is halted" in one.message]
            assert [one.levelno for one in halts] == [logging.ERROR], "reported more than once"
        (tmp_path / "ingest").rename(tmp_path / "wrong")
        (tmp_path / "elsewhere").rename(tmp_path / "ingest")
        # And when the right one is back, all goes on
        async with serving(tmp_path.as_uri()) as ingest:
            await eventually(lambda: waiting(rig) == 0)
            assert await stored(ingest) == [b"1", b"2", b"3"]
            assert (await outbox_state(rig)).lines[0].halted_reason == ""


async def test_a_halted_outbox_does_not_spin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tries = 0
    push_once = IngestPushes.push

    async def counted(self: IngestPushes, *value: object) -> int:
        nonlocal tries
        tries += 1
        return await push_once(self, *value)  # type: ignore[arg-type]

    monkeypatch.setattr(IngestPushes, "push", counted)
    async with running(tmp_path, pushes=IngestPushes) as rig:
        async with serving(tmp_path.as_uri()):
            await rig.create()
            await execute(rig, push())
            await eventually(lambda: waiting(rig) == 0)
        give_up(tmp_path, "ingest")
        await execute(rig, push())
        async with serving(tmp_path.as_uri()):
            await halted(rig)
            tries = 0
            for _ in range(200):
                await execute(rig, push())
            # New pushes do not make it try; the waits double from 20 ms on.
            assert tries <= 12


async def test_what_an_ingest_has_lost_permanently_is_left_behind_when_people_say_so(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    async with running(tmp_path, clock, pushes=IngestPushes) as rig:
        async with serving(tmp_path.as_uri()):
            await rig.create()
            await execute(rig, push(payload=b"1"), push(payload=b"2"))
            await eventually(lambda: waiting(rig) == 0)
            refused = await refusal(resume(rig))
            assert refused[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "OUTBOX_NOT_HALTED")
        give_up(tmp_path, "ingest")
        await execute(rig, push(payload=b"3"), push(payload=b"4"))
        async with serving(tmp_path.as_uri()) as ingest:
            await halted(rig)
            await resume(rig)
            await eventually(lambda: waiting(rig) == 0)
            await execute(rig, push(payload=b"5"))
            await eventually(lambda: waiting(rig) == 0)
            assert await stored(ingest) == [b"3", b"4", b"5"]
    async with (
        running(tmp_path, clock, pushes=IngestPushes) as rig,
        serving(tmp_path.as_uri()) as ingest,
    ):
        await execute(rig, push(payload=b"6"))
        await eventually(lambda: waiting(rig) == 0)
        assert await stored(ingest) == [b"3", b"4", b"5", b"6"]


async def test_a_broker_that_starts_over_loses_no_push_to_an_ingest_that_goes_on(
    tmp_path: Path,
) -> None:
    # Given an ingest that has stored three pushes of a broker
    async with serving(tmp_path.as_uri()) as ingest:
        async with running(tmp_path, pushes=IngestPushes) as rig:
            await rig.create()
            await execute(rig, *(push(payload=b"old") for _ in range(3)))
            await eventually(lambda: waiting(rig) == 0)
        # When that broker begins again, with an empty database
        give_up(tmp_path, "broker")
        async with running(tmp_path, pushes=IngestPushes) as rig:
            await rig.create()
            await execute(rig, push(payload=b"1"), push(payload=b"2"))
            # Then its pushes are not taken for those that came before
            assert "the ingest has stored row 3" in await halted(rig)
            assert waiting(rig) == 2
            await resume(rig)
            await eventually(lambda: waiting(rig) == 0)
            assert await stored(ingest) == [b"old"] * 3 + [b"1", b"2"]


@pytest.mark.parametrize("ingest_shard", [-1, 1 << 14])
async def test_an_ingest_shard_that_cannot_be_is_refused(ingest_shard: int) -> None:
    async with running() as rig:
        request = outbox_pb2.ResumeOutboxRequest(ingest_shard=ingest_shard)
        result = await refusal(outbox_stub(rig).ResumeOutbox(request))
        assert result == (grpc.StatusCode.INVALID_ARGUMENT, "OUT_OF_RANGE", "ingest_shard")
