"""Assignments over the wire, as routers make them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from slatemq.v1 import assignment_pb2, queue_pb2
from tests.integration.broker.queue_calls import delete, swept, update
from tests.integration.broker.rig import Disk, Rig, memory_root, refusal, running
from tests.manual_clock import ManualClock

INVALID = grpc.StatusCode.INVALID_ARGUMENT
Range = assignment_pb2.LogRange
Matches = assignment_pb2.QueueAssignment


def piece(previous: int, last: int, ids: list[int], log: int = 0, queue_id: str = "q") -> Range:
    matches = [Matches(queue_id=queue_id, message_ids=ids)] if ids else []
    return Range(
        ingest_shard=log, previous_sequence=previous, last_sequence=last, assignments=matches
    )


async def assign(rig: Rig, *ranges: Range, revision: int = 1) -> assignment_pb2.AssignResponse:
    for one in ranges:
        one.config_revision = revision
    return await rig.assignments.Assign(assignment_pb2.AssignRequest(ranges=ranges))


async def cursors(rig: Rig) -> dict[int, int]:
    state = await rig.assignments.GetRoutingState(assignment_pb2.GetRoutingStateRequest())
    return {cursor.ingest_shard: cursor.sequence for cursor in state.cursors}


def results(answer: assignment_pb2.AssignResponse) -> list[tuple[int, bool, int]]:
    return [(r.ingest_shard, r.applied, r.cursor) for r in answer.results]


async def test_each_range_is_applied_whole_or_not_at_all_and_answered_for_itself() -> None:
    async with running() as rig:
        await rig.create()
        first = await assign(rig, piece(0, 5, [1, 5]), piece(0, 9, [], log=7))
        assert results(first) == [(0, True, 5), (7, True, 9)]

        second = await assign(rig, piece(6, 8, [8]), piece(9, 10, [], log=7), piece(3, 4, [], 8))

        assert results(second) == [(0, False, 5), (7, True, 10), (8, False, 0)]
        assert await cursors(rig) == {0: 5, 7: 10}
        assert await rig.counts() == {"available": 2}


async def test_a_repeated_range_changes_nothing() -> None:
    async with running() as rig:
        await rig.create()
        await assign(rig, piece(0, 5, [1, 5]))
        assert results(await assign(rig, piece(0, 5, [1, 5]))) == [(0, False, 5)]
        assert await rig.counts() == {"available": 2}


async def test_of_two_routers_at_once_one_is_applied() -> None:
    async with running() as rig:
        await rig.create()
        await assign(rig, piece(0, 1, []))  # Till its ingest has answered, a log has to wait.
        answers = await asyncio.gather(*(assign(rig, piece(1, 5, [2, 5])) for _ in range(8)))
        assert sorted(results(answer)[0][1] for answer in answers) == [False] * 7 + [True]
        assert {results(answer)[0][2] for answer in answers} == {5}
        assert await rig.counts() == {"available": 2}


def outdated(answer: assignment_pb2.AssignResponse) -> bool:
    [result] = answer.results
    assert not (result.outdated and result.applied)
    return result.outdated


async def test_what_was_judged_without_a_queue_that_there_is_by_now_is_refused() -> None:
    async with running() as rig:
        await rig.create("q")
        await rig.create("new")

        answer = await assign(rig, piece(0, 5, [1, 5]), revision=1)

        assert outdated(answer)
        assert results(answer) == [(0, False, 0)]
        assert answer.config_revision == 2
        assert await cursors(rig) == {}


async def test_a_range_refused_once_is_applied_when_it_was_judged_by_what_changed_till_then() -> (
    None
):
    async with running() as rig:
        await rig.create("q")
        await rig.create("new")
        first = await assign(rig, piece(0, 5, [1, 5]), revision=1)
        await rig.create("newer")
        again = piece(0, 5, [1, 5])
        again.seen_revision, again.seen_by = first.config_revision, first.broker_incarnation

        early, late = await assign(rig, again, revision=1), await assign(rig, again, revision=2)

        assert outdated(early), "it must be judged by the revision that counts"
        assert results(late) == [(0, True, 5)]
        assert await rig.counts() == {"available": 2}


async def test_the_word_of_another_broker_process_does_not_count() -> None:
    """One that was replaced and does not know it yet may have answered."""
    async with running() as rig:
        await rig.create("q")
        await rig.create("new")
        stale = piece(0, 5, [1, 5])
        stale.seen_revision, stale.seen_by = 1, 12_345

        assert outdated(await assign(rig, stale, revision=1))


@pytest.mark.parametrize("change", ["filter", "priority", "default_delay_ms", "fallback_priority"])
async def test_what_a_changed_queue_judged_before_is_refused(change: str) -> None:
    value: object = "true" if change == "filter" else "1" if change == "priority" else 1
    async with running() as rig:
        await rig.create("q")
        await update(rig, [change], "q", **{change: value})
        assert outdated(await assign(rig, piece(0, 5, [1, 5]), revision=1))


async def test_changes_that_routing_does_not_ask_for_hold_nothing_up() -> None:
    async with running() as rig:
        await rig.create("q")
        await rig.create("gone")
        await update(rig, ["max_attempts"], max_attempts=3)
        await rig.queues.PauseQueue(queue_pb2.PauseQueueRequest(queue_id="q"))
        await delete(rig, "gone")
        both = Range(
            last_sequence=5,
            assignments=[
                Matches(queue_id="gone", message_ids=[1]),
                Matches(queue_id="q", message_ids=[5]),
            ],
        )

        assert results(await assign(rig, both, revision=2)) == [(0, True, 5)]
        assert await rig.counts() == {"available": 1}


async def test_a_queue_made_again_gets_nothing_that_the_one_before_matched() -> None:
    disk = Disk()
    async with running(memory_root(disk), disk=disk) as rig:
        await rig.create("q")
        await delete(rig)
        await swept(rig)
        disk.free.clear()
        creating = asyncio.create_task(rig.create("q", filter="false"))
        while "q" not in rig.owner.shard.queues:
            await asyncio.sleep(0.001)
        assigning = asyncio.create_task(assign(rig, piece(0, 5, [1, 5]), revision=1))
        while not rig.owner.shard.cursors:
            await asyncio.sleep(0.001)
        disk.free.set()

        assert results(await assigning) == [(0, True, 5)]
        await creating
        assert await rig.counts() == {}


async def test_a_change_that_is_not_durable_yet_holds_no_range_up() -> None:
    """What is in the range was published before the change can be answered."""
    disk = Disk()
    async with running(memory_root(disk), disk=disk) as rig:
        await rig.create("q")
        disk.free.clear()
        changing = asyncio.create_task(update(rig, ["filter"], filter="false"))
        while rig.owner.shard.revision < 2:
            await asyncio.sleep(0.001)
        assigning = asyncio.create_task(assign(rig, piece(0, 5, [1, 5]), revision=1))
        while not rig.owner.shard.cursors:
            await asyncio.sleep(0.001)
        disk.free.set()

        assert results(await assigning) == [(0, True, 5)]
        await changing
        assert await rig.counts() == {"available": 2}


async def test_the_routing_state_shows_what_changed_after_a_revision() -> None:
    async with running() as rig:
        await rig.create("a")
        await rig.create("b")
        request = assignment_pb2.GetRoutingStateRequest(known_revision=1)
        state = await rig.assignments.GetRoutingState(request)
        assert state.config_revision == 2
        assert [change.queue.queue_id for change in state.changes] == ["b"]
        request = assignment_pb2.GetRoutingStateRequest(known_revision=-1)
        refused = await refusal(rig.assignments.GetRoutingState(request))
        assert refused[::2] == (INVALID, "known_revision")


BIG = 1 << 62
BAD: list[tuple[str, list[Range]]] = [
    ("ranges[0].last_sequence", [piece(5, 5, [])]),
    ("ranges[0].last_sequence", [piece(5, 4, [])]),
    ("ranges[0].last_sequence", [piece(5, BIG, [])]),
    ("ranges[0].previous_sequence", [piece(-1, 4, [])]),
    ("ranges[1].ingest_shard", [piece(0, 4, []), piece(0, 4, [], log=16_384)]),
    ("ranges[0].ingest_shard", [piece(0, 4, [], log=-1)]),
    ("ranges[1].ingest_shard", [piece(0, 4, [1]), piece(4, 5, [5])]),
    ("ranges[0].assignments[0].queue_id", [piece(0, 4, [1], queue_id="nobody")]),
    ("ranges[0].assignments[0].queue_id", [piece(0, 4, [1], queue_id="no body")]),
    ("ranges[0].assignments[0].message_ids", [piece(0, 4, [0])]),
    ("ranges[0].assignments[0].message_ids", [piece(0, 4, [1, BIG])]),
]


async def test_a_bad_range_is_named_and_nothing_is_applied() -> None:
    async with running() as rig:
        await rig.create()
        columns: list[tuple[str, dict[str, list[int]]]] = [
            ("message_ids", {"message_ids": []}),
            ("priorities", {"priorities": [1]}),
            ("priorities", {"priorities": [1, 256]}),
            ("priorities", {"priorities": [-1, 1]}),
            ("retention_deadlines_ms", {"retention_deadlines_ms": [1, 2, 3]}),
            ("retention_deadlines_ms", {"retention_deadlines_ms": [1, -2]}),
            ("visible_at_ms", {"visible_at_ms": [1]}),
            ("visible_at_ms", {"visible_at_ms": [-1, 1]}),
        ]
        bad = list(BAD)
        for name, column in columns:
            both = {"message_ids": [1, 2], **column}
            matches = Matches(queue_id="q", **both)
            whole = Range(last_sequence=4, assignments=[matches])
            bad.append((f"ranges[0].assignments[0].{name}", [whole]))
        for field, ranges in bad:
            assert (await refusal(assign(rig, *ranges)))[::2] == (INVALID, field), ranges
        refused = await refusal(assign(rig, piece(0, 4, []), revision=-1))
        assert refused[::2] == (INVALID, "ranges[0].config_revision")
        boast = Range(last_sequence=4, seen_revision=-1)
        assert (await refusal(assign(rig, boast)))[::2] == (INVALID, "ranges[0].seen_revision")

        assert await cursors(rig) == {}
        assert await rig.counts() == {}


async def test_extreme_columns_are_taken() -> None:
    most = (1 << 63) - 1
    async with running() as rig:
        await rig.create()
        matches = Matches(
            queue_id="q",
            message_ids=[1, (1 << 48) - 1],
            priorities=[0, 255],
            retention_deadlines_ms=[most, 0],
            visible_at_ms=[0, most],
        )
        await assign(rig, Range(last_sequence=(1 << 62) - 1, assignments=[matches]))
        assert await rig.counts() == {"available": 1, "delayed": 1}
        assert [m.message.message_id for m in await rig.claim(max_messages=9)] == [1]


async def test_no_answer_is_ahead_of_the_disk() -> None:
    disk = Disk()
    async with running(memory_root(disk), disk=disk) as rig:
        await rig.create()
        disk.free.clear()
        first = asyncio.create_task(assign(rig, piece(0, 5, [1, 5])))
        while not rig.owner.shard.cursors:
            await asyncio.sleep(0.001)
        calls: list[asyncio.Task[Any]] = [
            first,
            asyncio.create_task(assign(rig, piece(0, 5, [1, 5]))),
        ]
        assert await cursors(rig) == {}

        done, _ = await asyncio.wait(calls, timeout=0.3)

        assert not done, "a repeat waits for what it has seen, too"
        disk.free.set()
        await asyncio.gather(*calls)
        assert await cursors(rig) == {0: 5}


async def test_cursors_and_messages_survive_a_restart() -> None:
    disk = Disk()
    root, clock = memory_root(disk), ManualClock()
    async with running(root, clock, disk=disk) as rig:
        await rig.create()
        await assign(rig, piece(0, 5, [1, 5]), piece(0, 3, [], log=9))
    async with running(root, clock, disk=disk) as rig:
        assert await cursors(rig) == {0: 5, 9: 3}
        assert results(await assign(rig, piece(0, 5, [1, 5]))) == [(0, False, 5)]
        assert results(await assign(rig, piece(5, 6, [6]))) == [(0, True, 6)]
        assert [m.message.message_id for m in await rig.claim(max_messages=9)] == [1, 5, 6]


async def test_too_much_that_waits_to_be_stored_is_refused_and_taken_later() -> None:
    disk = Disk()
    async with running(memory_root(disk), disk=disk) as rig:
        await rig.create()
        rig.owner._bytes_max = 100_000
        disk.free.clear()
        big = asyncio.create_task(assign(rig, piece(0, 50_000, list(range(1, 50_001)))))
        while not rig.owner.commits.uncommitted_bytes:
            await asyncio.sleep(0.001)

        code, reason, _ = await refusal(assign(rig, piece(50_000, 50_001, [50_001])))

        assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "UNCOMMITTED_BYTES")
        disk.free.set()
        await big
        assert results(await assign(rig, piece(50_000, 50_001, [50_001]))) == [(0, True, 50_001)]


@pytest.mark.parametrize("method", ["Assign", "GetRoutingState"])
async def test_bytes_that_do_not_decode_are_refused(method: str) -> None:
    async with running() as rig:
        path = f"/slatemq.v1.AssignmentService/{method}"
        call: Any = rig.channel.unary_unary(path)
        assert (await refusal(call(b"\xff\xff\xff")))[:2] == (INVALID, "UNDECODABLE")
