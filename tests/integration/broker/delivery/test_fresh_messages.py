"""Messages that come with their assignment: delivered as they are, unless they may be outdated."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from slatemq.v1 import assignment_pb2, ingest_pb2
from tests.integration.broker.rig import Ingest, Rig, refusal, running
from tests.integration.waiting import eventually

BROUGHT = b"brought"


def run_of(*ids: int, payload: bytes = BROUGHT) -> ingest_pb2.StoredRun:
    return ingest_pb2.StoredRun(message_ids=ids, payloads=[payload] * len(ids))


async def incarnation(rig: Rig) -> int:
    """Of the broker, which a range without matches has it say: the log's first message."""
    piece = assignment_pb2.LogRange(last_sequence=1)
    piece.config_revision = rig.owner.durable_revision
    answer = await rig.assignments.Assign(assignment_pb2.AssignRequest(ranges=[piece]))
    return answer.broker_incarnation


async def bring(rig: Rig, message: int, messages_for: int) -> None:
    """Assign a message to the queue `q`, and bring it along."""
    piece = assignment_pb2.LogRange(
        previous_sequence=message - 1,
        last_sequence=message,
        assignments=[assignment_pb2.QueueAssignment(queue_id="q", message_ids=[message])],
        config_revision=rig.owner.durable_revision,
    )
    request = assignment_pb2.AssignRequest(
        ranges=[piece], messages=[run_of(message)], messages_for=messages_for
    )
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
        messages_for = await incarnation(rig)
        ingest.away = True

        claiming = await waiting_claim(rig)
        await bring(rig, 2, messages_for)

        assert await claiming == [BROUGHT]
        assert ingest.reads == []


async def test_what_came_along_for_an_earlier_process_is_read_again() -> None:
    """That one may have learned of an edit, which this one does not know."""
    ingest = Ingest()
    async with running(ingest=ingest) as rig:
        await rig.create()
        messages_for = await incarnation(rig)

        claiming = await waiting_claim(rig)
        await bring(rig, 2, messages_for ^ 1)

        assert await claiming == [b"%010d" % 2]
        assert ingest.reads == [[2]]


async def test_a_message_that_was_edited_before_it_came_is_read_again() -> None:
    ingest = Ingest()
    async with running(ingest=ingest) as rig:
        await rig.create()
        messages_for = await incarnation(rig)

        # Given edits of messages of which only one is assigned here already
        await bring(rig, 2, messages_for)
        for edited in (2, 3):
            await rig.broker.editor.forget(edited)
        assert [one.message.payload for one in await rig.claim()] == [b"%010d" % 2]

        # When the other one comes along as it was before
        claiming = await waiting_claim(rig)
        await bring(rig, 3, messages_for)

        # Then it is not delivered like that; the next ones are
        assert await claiming == [b"%010d" % 3]
        claiming = await waiting_claim(rig)
        await bring(rig, 4, messages_for)
        assert await claiming == [BROUGHT]


async def test_an_edit_between_the_call_and_its_commit_drops_what_came_along() -> None:
    ingest = Ingest()
    async with running(ingest=ingest) as rig:
        await rig.create()
        messages_for = await incarnation(rig)
        payloads = rig.delivery._payloads

        claiming = await waiting_claim(rig)
        payloads.add_fresh([run_of(2)], rig.owner.shard.cursors)
        assert payloads.get(2) is not None
        await rig.broker.editor.forget(2)
        await bring(rig, 2, messages_for)

        assert await claiming == [b"%010d" % 2]


async def test_a_repeated_assignment_brings_nothing() -> None:
    async with running() as rig:
        await rig.create()
        messages_for = await incarnation(rig)
        claiming = await waiting_claim(rig)
        await bring(rig, 2, messages_for)
        assert await claiming == [BROUGHT]
        rig.delivery._payloads.forget(2)

        claiming = await waiting_claim(rig)
        await bring(rig, 2, messages_for)

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
        messages_for = await incarnation(rig)
        piece = assignment_pb2.LogRange(
            previous_sequence=1,
            last_sequence=2,
            assignments=[assignment_pb2.QueueAssignment(queue_id="q", message_ids=[2])],
            config_revision=rig.owner.durable_revision,
        )
        request = assignment_pb2.AssignRequest(
            ranges=[piece], messages=[run_of(2), run], messages_for=messages_for
        )

        code, _, field = await refusal(rig.assignments.Assign(request))

        assert (code, field) == (grpc.StatusCode.INVALID_ARGUMENT, "messages[1].payloads")
        assert rig.owner.shard.queues["q"].waiting.ready_count == 0
