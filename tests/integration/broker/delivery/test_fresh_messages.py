"""Messages that come with their assignment: delivered as they are, unless they may be outdated."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from services.broker.entries import editor
from slatemq.errors import Unavailable
from slatemq.v1 import assignment_pb2, ingest_pb2
from tests.integration.broker.rig import Ingest, Rig, refusal, running
from tests.integration.waiting import eventually

BROUGHT = b"brought"


def run_of(*ids: int, payload: bytes = BROUGHT) -> ingest_pb2.StoredRun:
    return ingest_pb2.StoredRun(message_ids=ids, payloads=[payload] * len(ids))


async def bring(rig: Rig, message: int, previous: int | None = None) -> None:
    """Assign a message to the queue `q`, and bring it along."""
    piece = assignment_pb2.LogRange(
        previous_sequence=rig.owner.shard.cursors.get(0, 0) if previous is None else previous,
        last_sequence=message,
        assignments=[assignment_pb2.QueueAssignment(queue_id="q", message_ids=[message])],
        config_revision=rig.owner.durable_revision,
    )
    request = assignment_pb2.AssignRequest(ranges=[piece], messages=[run_of(message)])
    await rig.assignments.Assign(request)


async def waiting_claim(rig: Rig) -> asyncio.Task[list[bytes]]:
    async def claim() -> list[bytes]:
        return [one.message.payload for one in await rig.claim(wait_ms=60_000)]

    claiming = asyncio.create_task(claim())
    queue, delivery = rig.owner.shard.queues["q"], rig.delivery
    assert delivery is not None
    await eventually(lambda: queue in delivery._waiter_lines)
    return claiming


async def test_a_consumer_that_waits_gets_what_came_along_and_no_ingest_is_asked() -> None:
    ingest = Ingest()
    async with running(ingest=ingest) as rig:
        await rig.create()
        claiming = await waiting_claim(rig)
        await bring(rig, 1)
        assert await claiming == [BROUGHT]
        ingest.down = True

        claiming = await waiting_claim(rig)
        await bring(rig, 2)

        assert await claiming == [BROUGHT]
        assert ingest.reads == []


async def test_an_edit_of_a_message_ends_once_it_is_assigned_and_what_came_along_is_gone() -> None:
    ingest = Ingest()
    async with running(ingest=ingest) as rig:
        await rig.create()

        # Given an edit of a message of which a copy is on its way
        forgetting = asyncio.create_task(rig.broker.editor.forget(3))
        await bring(rig, 2)
        await asyncio.sleep(0.1)
        assert not forgetting.done()
        assert [one.message.payload for one in await rig.claim()] == [b"%010d" % 2]

        # When the copy comes, and no one claims it before the edit ends
        rig.delivery._payloads.add_fresh([run_of(3)], rig.owner.shard.cursors)
        await bring(rig, 3)
        await forgetting

        # Then it is not delivered, nor one that comes late; the next ones are
        rig.delivery._payloads.add_fresh([run_of(3)], rig.owner.shard.cursors)
        assert [one.message.payload for one in await rig.claim()] == [b"%010d" % 3]
        claiming = await waiting_claim(rig)
        await bring(rig, 4)
        assert await claiming == [BROUGHT]


async def test_an_edit_of_a_message_that_is_not_assigned_for_long_is_to_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(editor, "LOOKS", 5)
    async with running() as rig:
        await rig.create()
        with pytest.raises(Unavailable, match="message 3 is not assigned yet"):
            await rig.broker.editor.forget(3)
        await bring(rig, 3)
        await rig.broker.editor.forget(3)


async def test_a_shard_without_queues_takes_no_copy_of_what_was_edited_before_one_came() -> None:
    async with running() as rig:
        # It may come to the message long after
        await rig.broker.editor.forget(3)
        await rig.broker.editor.forget(2)

        await rig.create()
        for message, payload in [(2, b"%010d" % 2), (3, b"%010d" % 3), (4, BROUGHT)]:
            claiming = await waiting_claim(rig)
            await bring(rig, message)
            assert await claiming == [payload]


async def test_a_repeated_assignment_brings_nothing() -> None:
    async with running() as rig:
        await rig.create()
        claiming = await waiting_claim(rig)
        await bring(rig, 2)
        assert await claiming == [BROUGHT]
        rig.delivery._payloads.forget(2)

        claiming = await waiting_claim(rig)
        await bring(rig, 2, previous=0)

        held = rig.delivery._payloads.get(2)
        assert held is None or held[0] == b"%010d" % 2
        claiming.cancel()


@pytest.mark.parametrize(
    "run",
    [ingest_pb2.StoredRun(), ingest_pb2.StoredRun(message_ids=[1, 2], payloads=[b"one"])],
    ids=["empty", "a payload short"],
)
async def test_runs_without_a_payload_for_each_message_are_refused(
    run: ingest_pb2.StoredRun,
) -> None:
    async with running() as rig:
        await rig.create()
        piece = assignment_pb2.LogRange(
            previous_sequence=1,
            last_sequence=2,
            assignments=[assignment_pb2.QueueAssignment(queue_id="q", message_ids=[2])],
            config_revision=rig.owner.durable_revision,
        )
        request = assignment_pb2.AssignRequest(ranges=[piece], messages=[run_of(2), run])

        code, _, field = await refusal(rig.assignments.Assign(request))

        assert (code, field) == (grpc.StatusCode.INVALID_ARGUMENT, "messages[1].payloads")
        assert rig.owner.shard.queues["q"].waiting.ready_count == 0
