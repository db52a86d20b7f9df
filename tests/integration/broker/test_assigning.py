"""Assignments over the wire, as routers make them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from slatemq.v1 import assignment_pb2, queue_pb2
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
    request = assignment_pb2.AssignRequest(config_revision=revision, ranges=ranges)
    return await rig.assignments.Assign(request)


async def cursors(rig: Rig) -> dict[int, int]:
    state = await rig.assignments.GetRoutingState(assignment_pb2.GetRoutingStateRequest())
    return {cursor.ingest_shard: cursor.sequence for cursor in state.cursors}


def told(answer: assignment_pb2.AssignResponse) -> list[tuple[int, bool, int]]:
    return [(r.ingest_shard, r.applied, r.cursor) for r in answer.results]


async def test_each_range_is_applied_whole_or_not_at_all_and_answered_for_itself() -> None:
    async with running() as rig:
        await rig.create()
        first = await assign(rig, piece(0, 5, [1, 5]), piece(0, 9, [], log=7))
        assert told(first) == [(0, True, 5), (7, True, 9)]

        second = await assign(rig, piece(6, 8, [8]), piece(9, 10, [], log=7), piece(3, 4, [], 8))

        assert told(second) == [(0, False, 5), (7, True, 10), (8, False, 0)]
        assert await cursors(rig) == {0: 5, 7: 10}
        assert await rig.counts() == {"available": 2}


async def test_a_repeated_range_changes_nothing() -> None:
    async with running() as rig:
        await rig.create()
        await assign(rig, piece(0, 5, [1, 5]))
        assert told(await assign(rig, piece(0, 5, [1, 5]))) == [(0, False, 5)]
        assert await rig.counts() == {"available": 2}


async def test_of_two_routers_at_once_one_is_applied() -> None:
    async with running() as rig:
        await rig.create()
        answers = await asyncio.gather(*(assign(rig, piece(0, 5, [1, 5])) for _ in range(8)))
        assert sorted(told(answer)[0][1] for answer in answers) == [False] * 7 + [True]
        assert {told(answer)[0][2] for answer in answers} == {5}
        assert await rig.counts() == {"available": 2}


async def test_with_an_old_revision_nothing_is_applied_and_the_changes_are_told() -> None:
    async with running() as rig:
        await rig.create("q")
        await rig.create("new")
        await rig.queues.DeleteQueue(queue_pb2.DeleteQueueRequest(queue_id="q"))

        answer = await assign(rig, piece(0, 5, [1, 5]), revision=1)

        assert told(answer) == [(0, False, 0)]
        assert answer.config_revision == 3
        new, gone = answer.changes
        assert (new.queue.queue_id, gone.deleted_queue_id) == ("new", "q")
        assert await cursors(rig) == {}


async def test_the_routing_state_tells_what_changed_after_a_revision() -> None:
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
        refused = await refusal(assign(rig, revision=-1))
        assert refused[::2] == (INVALID, "config_revision")

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
            asyncio.create_task(assign(rig, piece(0, 5, [1, 5]), revision=0)),
            asyncio.create_task(cursors(rig)),
        ]

        done, _ = await asyncio.wait(calls, timeout=0.3)

        assert not done, "a repeat, an old revision and a read wait for what they have seen, too"
        disk.free.set()
        await asyncio.gather(*calls)
        assert calls[3].result() == {0: 5}


async def test_cursors_and_messages_survive_a_restart() -> None:
    disk = Disk()
    root, clock = memory_root(disk), ManualClock()
    async with running(root, clock, disk=disk) as rig:
        await rig.create()
        await assign(rig, piece(0, 5, [1, 5]), piece(0, 3, [], log=9))
    async with running(root, clock, disk=disk) as rig:
        assert await cursors(rig) == {0: 5, 9: 3}
        assert told(await assign(rig, piece(0, 5, [1, 5]))) == [(0, False, 5)]
        assert told(await assign(rig, piece(5, 6, [6]))) == [(0, True, 6)]
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
        assert told(await assign(rig, piece(50_000, 50_001, [50_001]))) == [(0, True, 50_001)]


@pytest.mark.parametrize("method", ["Assign", "GetRoutingState"])
async def test_bytes_that_do_not_decode_are_refused(method: str) -> None:
    async with running() as rig:
        path = f"/slatemq.v1.AssignmentService/{method}"
        call: Any = rig.channel.unary_unary(path)
        assert (await refusal(call(b"\xff\xff\xff")))[:2] == (INVALID, "UNDECODABLE")
