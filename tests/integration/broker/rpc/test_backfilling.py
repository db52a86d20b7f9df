"""Backfills over the wire, as routers make them for queues that start in the past."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from slatemq.v1 import assignment_pb2
from tests.integration.broker.queue_calls import delete, get, update
from tests.integration.broker.rig import Rig, refusal
from tests.integration.router.replay_rig import create, drained, patiently, spans, world
from tests.integration.waiting import eventually

INVALID = grpc.StatusCode.INVALID_ARGUMENT
Matches = assignment_pb2.QueueAssignment
Range = assignment_pb2.LogRange
Request = assignment_pb2.BackfillRequest


def piece(previous: int, last: int, *ids: int, queue_id: str = "q", log: int = 0) -> Range:
    matches = [Matches(queue_id=queue_id, message_ids=ids)] if ids else []
    return Range(
        ingest_shard=log, previous_sequence=previous, last_sequence=last, assignments=matches
    )


async def backfill(
    rig: Rig, range_: Range, revision: int = 2, queue_id: str = "q"
) -> tuple[bool, int, int]:
    request = Request(queue_id=queue_id, queue_revision=revision, range=range_)
    answer = await rig.assignments.Backfill(request)
    return answer.applied, answer.cursor, answer.queue_revision


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A broker with a queue `other`, and a queue `q` that is to replay log 0 up to 6."""
    async with world() as there, there.broker() as rig:
        await rig.create("other")
        for _ in range(3):
            await there.log.publish([{}, {}])
        judged = piece(0, 5)
        judged.config_revision = 1
        request = assignment_pb2.AssignRequest(ranges=[judged])
        assert (await rig.assignments.Assign(request)).results[0].applied
        made = await create(rig, "q")
        assert (spans(made.replay), made.revision) == ([(0, 0, 0, 5)], 2)
        yield rig


async def test_a_piece_is_applied_by_the_replays_own_cursor(rig: Rig) -> None:
    assert await backfill(rig, piece(0, 3, 1, 4)) == (True, 3, 2)
    assert await backfill(rig, piece(0, 3, 1, 4)) == (False, 3, 2)
    assert await backfill(rig, piece(4, 5)) == (False, 3, 2)
    assert spans((await get(rig)).replay) == [(0, 0, 3, 5)]

    assert await backfill(rig, piece(3, 5, 5)) == (True, 5, 2)

    assert (await get(rig)).replay.done
    assert await backfill(rig, piece(3, 5, 5)) == (False, 5, 2)
    state = await rig.assignments.GetRoutingState(assignment_pb2.GetRoutingStateRequest())
    assert [cursor.sequence for cursor in state.cursors] == [5]
    assert await drained(rig, "q") == [1, 4, 5]


async def test_of_many_routers_at_once_one_is_applied(rig: Rig) -> None:
    answers = await asyncio.gather(*(backfill(rig, piece(0, 5, 1, 2)) for _ in range(8)))
    assert sorted(applied for applied, _, _ in answers) == [False] * 7 + [True]
    assert {cursor for _, cursor, _ in answers} == {5}
    assert await drained(rig, "q") == [1, 2]


async def test_what_was_judged_by_another_config_is_refused(rig: Rig) -> None:
    await update(rig, ["filter"], filter="false")

    assert await backfill(rig, piece(0, 5, 1, 2), revision=2) == (False, 0, 3)
    assert await backfill(rig, piece(0, 9, 1, 2), revision=2) == (False, 0, 3)
    assert await backfill(rig, piece(0, 5), revision=3) == (True, 5, 3)
    assert await drained(rig, "q") == []


async def test_a_change_of_another_queue_holds_no_replay_up(rig: Rig) -> None:
    await update(rig, ["filter"], "other", filter="false")
    assert await backfill(rig, piece(0, 5, 1)) == (True, 5, 2)


async def test_a_claim_that_waits_gets_what_a_replay_brings(rig: Rig) -> None:
    claim = asyncio.create_task(rig.claim("q", wait_ms=20_000))
    delivery = rig.delivery
    assert delivery is not None
    await eventually(lambda: delivery.has_waiters("q"))
    assert await backfill(rig, piece(0, 5, 3)) == (True, 5, 2)
    [claimed] = await claim
    assert claimed.message.message_id == 3


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(queue_id="", range=piece(0, 3)), "queue_id"),
        (Request(queue_id="no such/id", range=piece(0, 3)), "queue_id"),
        (Request(queue_id="q", queue_revision=-1, range=piece(0, 3)), "queue_revision"),
        (Request(queue_id="q", queue_revision=2), "range.last_sequence"),
        (Request(queue_id="q", queue_revision=2, range=piece(3, 3)), "range.last_sequence"),
        (Request(queue_id="q", queue_revision=2, range=piece(0, 6)), "range.last_sequence"),
        (Request(queue_id="q", queue_revision=2, range=piece(0, 1 << 62)), "range.last_sequence"),
        (Request(queue_id="q", queue_revision=2, range=piece(-1, 3)), "range.previous_sequence"),
        (Request(queue_id="q", queue_revision=2, range=piece(0, 3, log=-1)), "range.ingest_shard"),
        (
            Request(queue_id="q", queue_revision=2, range=piece(0, 3, log=16_384)),
            "range.ingest_shard",
        ),
        (
            Request(queue_id="q", queue_revision=2, range=piece(0, 3, 1, queue_id="other")),
            "range.assignments[0].queue_id",
        ),
        (
            Request(
                queue_id="q",
                queue_revision=2,
                range=Range(last_sequence=3, assignments=[Matches(queue_id="q")]),
            ),
            "range.assignments[0].message_ids",
        ),
        (
            Request(queue_id="q", queue_revision=2, range=piece(0, 3, 1 << 50)),
            "range.assignments[0].message_ids",
        ),
        *(
            (
                Request(
                    queue_id="q",
                    queue_revision=2,
                    range=Range(
                        last_sequence=3,
                        assignments=[Matches(queue_id="q", message_ids=[1, 2], **{column: values})],
                    ),
                ),
                f"range.assignments[0].{column}",
            )
            for column, values in [
                ("priorities", [1]),
                ("priorities", [1, 256]),
                ("retention_deadlines_ms", [1, -1]),
                ("visible_at_ms", [1, 2, 3]),
            ]
        ),
    ],
)
async def test_bad_input_is_named_and_changes_nothing(
    rig: Rig, request_: Request, field: str
) -> None:
    assert (await refusal(rig.assignments.Backfill(request_)))[::2] == (INVALID, field)
    assert spans((await get(rig)).replay) == [(0, 0, 0, 5)]
    assert await drained(rig, "q") == []


async def test_without_a_replay_there_is_nothing_to_backfill(rig: Rig) -> None:
    for call in (
        backfill(rig, piece(0, 3), queue_id="nowhere"),
        backfill(rig, piece(0, 3), queue_id="other", revision=1),
        backfill(rig, piece(0, 3, log=1)),
    ):
        assert (await refusal(call))[0] is grpc.StatusCode.NOT_FOUND


async def test_a_queue_made_again_takes_nothing_from_the_replay_before(rig: Rig) -> None:
    await delete(rig)
    await patiently(lambda: create(rig, "q", source="false"))
    made = await get(rig)

    assert await backfill(rig, piece(0, 5, 1, 2), revision=2) == (False, 0, made.revision)
    assert await drained(rig, "q") == []
