"""Large ranges: applied in steps, whole, whoever goes away or fails in between."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from functools import partial

import grpc.aio
import pytest

from libs.storage.layout.ids import message_id
from services.broker.core import shard as shards
from services.broker.core.commands import Assignment, Purge, Range
from services.broker.core.queue import Queue
from services.broker.core.shard import RangeApplication
from services.broker.shard import owner
from slatemq.v1 import assignment_pb2
from tests.integration.broker.rig import Disk, Rig, memory_root, running
from tests.manual_clock import ManualClock
from tests.turns import Turns

QUEUES = 8
IDS = [1, 2, 3]


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
async def rig(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    """Eight queues, of which a step changes one."""
    monkeypatch.setattr(shards, "STEP_QUEUES", 1)
    async with running(memory_root(disk), ManualClock(), disk=disk) as rig:
        for number in range(QUEUES):
            await rig.create(f"q{number}")
        yield rig


def piece(rig: Rig) -> Range:
    matches = [Assignment(f"q{number}", IDS) for number in range(QUEUES)]
    return Range(0, 0, 3, matches, rig.owner.shard.revision)


def begin(rig: Rig, _: int) -> RangeApplication | None:
    return rig.owner.shard.begin(piece(rig))


async def counts_of(rig: Rig) -> list[dict[str, int]]:
    return [await rig.counts(f"q{number}") for number in range(QUEUES)]


async def test_others_have_turns_between_the_steps_and_no_commit_begins(rig: Rig) -> None:
    turns, commits = 0, list[int]()
    seen: list[tuple[int, int]] = []
    rig.owner.commits.on_durable(commits.append)

    async def other() -> None:
        nonlocal turns
        while True:
            await rig.owner.run(lambda _: rig.owner.shard.queues["q7"].touch())
            turns += 1
            await asyncio.sleep(0)

    def on_step(queues: Sequence[Queue], _: int) -> None:
        assert len(queues) <= 1
        seen.append((turns, len(commits)))

    beside = asyncio.create_task(other())
    await asyncio.sleep(0)
    before = len(commits)
    assert await rig.owner.apply(partial(begin, rig), on_step, 0)
    beside.cancel()
    assert len(seen) == QUEUES
    assert len({turn for turn, _ in seen}) == QUEUES, "the other one had a turn after each step"
    assert len({count for _, count in seen}) == 1
    await rig.owner.durable()
    assert len(commits) > before
    assert await counts_of(rig) == [{"available": 3}] * QUEUES


async def test_the_records_of_many_queues_are_encoded_in_steps_for_one_commit(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "DRAIN_AT_ONCE", 1)
    root, clock = memory_root(disk), ManualClock()
    async with running(root, clock, disk=disk) as rig:
        for number in range(QUEUES):
            await rig.create(f"q{number}")
        shard = rig.owner.shard
        steps: list[int] = []
        drain_early = shard.drain_early

        def noting(queues: Iterable[Queue], now_ms: int) -> None:
            drain_early(some := list(queues), now_ms)
            # Where the loop stood still, leases get a grace meanwhile: here there are none.
            if some:
                steps.append(len(some))

        def bring_in(_: int) -> None:
            application = shard.begin(piece(rig))
            assert application is not None
            while not application.is_done:
                application.step(rig.clock.now_ms())

        async def purge_meanwhile() -> int:
            while len(steps) < 3:
                await asyncio.sleep(0)
            queue = shard.queues["q0"]  # Its records are encoded already.
            await rig.owner.run(lambda _: shard.purge(queue, {Purge.AVAILABLE}))
            return len(steps)

        monkeypatch.setattr(shard, "drain_early", noting)
        commits: list[int] = []
        rig.owner.commits.on_durable(commits.append)
        meanwhile = asyncio.create_task(purge_meanwhile())
        await rig.owner.run(bring_in)
        await rig.owner.durable()
        assert len(commits) == 1
        assert steps[: QUEUES - 1] == [1] * (QUEUES - 1)
        assert await meanwhile < QUEUES - 1
        monkeypatch.undo()
    async with running(root, clock, disk=disk) as rig:
        assert await counts_of(rig) == [{}, *[{"available": 3}] * (QUEUES - 1)]


async def test_two_ranges_of_a_log_are_applied_one_after_the_other(rig: Rig) -> None:
    def request(previous: int) -> assignment_pb2.AssignRequest:
        matches = [
            assignment_pb2.QueueAssignment(queue_id=f"q{n}", message_ids=[previous + 1])
            for n in range(QUEUES)
        ]
        one = assignment_pb2.LogRange(
            previous_sequence=previous,
            last_sequence=previous + 1,
            assignments=matches,
            config_revision=rig.owner.shard.revision,
        )
        return assignment_pb2.AssignRequest(ranges=[one])

    async def send(previous: int) -> bool:
        return (await rig.assignments.Assign(request(previous))).results[0].applied

    assert await send(0)
    # Both routers have judged the same messages; the third one is ahead of its time, or is not.
    applied = await asyncio.gather(send(1), send(1), send(2))
    assert sorted(applied[:2]) == [False, True]
    for number in range(QUEUES):
        found = [one.message.message_id for one in await rig.claim(f"q{number}", max_messages=9)]
        assert found == [1, 2, 3][: 2 + applied[2]]


@pytest.mark.parametrize("cancels_count", [1, 2])
async def test_a_caller_that_goes_away_leaves_no_range_half_applied(
    rig: Rig, cancels_count: int
) -> None:
    seen: list[int] = []

    def on_step(queues: Sequence[Queue], _: int) -> None:
        seen.append(turns.count)

    with Turns() as turns:
        call = asyncio.create_task(rig.owner.apply(partial(begin, rig), on_step, 0))
        for steps in range(2, 2 + cancels_count):
            while len(seen) < steps:
                await asyncio.sleep(0)
            call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert len(seen) == QUEUES
    assert len(set(seen)) == QUEUES, "the other one had a turn after each step"
    await rig.owner.durable()
    assert dict(rig.owner.durable_cursors) == {0: 3}
    assert await counts_of(rig) == [{"available": 3}] * QUEUES


async def test_a_broker_that_stops_applies_and_commits_what_a_lost_caller_has_begun(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "STEP_QUEUES", 1)
    root, clock = memory_root(disk), ManualClock()
    async with running(root, clock, disk=disk) as rig:
        for number in range(QUEUES):
            await rig.create(f"q{number}")
        seen: list[int] = []

        def on_step(queues: Sequence[Queue], _: int) -> None:
            seen.append(len(queues))

        call = asyncio.create_task(rig.owner.apply(partial(begin, rig), on_step, 0))
        while len(seen) < 2:
            await asyncio.sleep(0)
        call.cancel()
        await rig.owner.commits.close()  # as a broker does that stops
        assert len(seen) == QUEUES
        assert call.cancelled()
    async with running(root, clock, disk=disk) as rig:
        assert await counts_of(rig) == [{"available": 3}] * QUEUES


LOGS = 5


def rest(rig: Rig) -> assignment_pb2.AssignRequest:
    """What is not durable yet of three messages in each of the logs, for all queues."""
    request = assignment_pb2.AssignRequest()
    for log in range(LOGS):
        if rig.owner.durable_cursors.get(log, 0):
            continue
        ids = [message_id(log, number) for number in IDS]
        request.ranges.add(
            ingest_shard=log,
            last_sequence=ids[-1],
            assignments=[
                assignment_pb2.QueueAssignment(queue_id=f"q{number}", message_ids=ids)
                for number in range(QUEUES)
            ],
            config_revision=rig.owner.shard.revision,
        )
    return request


@pytest.mark.parametrize("seed", range(5))
async def test_whenever_a_caller_goes_away_its_retry_starts_further_on(rig: Rig, seed: int) -> None:
    chosen, owner = random.Random(seed), rig.owner
    calls_count = 0
    while (request := rest(rig)).ranges:
        before, begun = len(owner.durable_cursors), len(owner.shard.cursors)
        assert before == begun
        call = asyncio.create_task(rig.broker.assignments.Assign(request, None))
        while len(owner.shard.cursors) == begun:
            await asyncio.sleep(0)
        for _ in range(chosen.randrange(2 * QUEUES)):
            await asyncio.sleep(0)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        await owner.durable()
        assert len(owner.durable_cursors) > before
        calls_count += 1
    assert calls_count > 1
    # Nothing twice, nothing lost, and no queue without its part of a range.
    assert await counts_of(rig) == [{"available": LOGS * len(IDS)}] * QUEUES


async def test_what_is_half_applied_when_a_step_fails_is_never_committed(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "STEP_QUEUES", 1)
    root, clock = memory_root(disk), ManualClock()
    async with running(root, clock, disk=disk) as rig:
        for number in range(QUEUES):
            await rig.create(f"q{number}")

        def fails(queues: Sequence[Queue], _: int) -> None:
            if queues[0].queue_id == "q2":
                raise RuntimeError("a mistake")

        with pytest.raises(RuntimeError, match="a mistake"):
            await rig.owner.apply(partial(begin, rig), fails, 0)
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.create("later")
    assert rig.exit is not None
    assert "half applied" in rig.exit.message

    async with running(root, clock, disk=disk) as rig:
        assert rig.owner.shard.cursors == {}
        assert await counts_of(rig) == [{}] * QUEUES
        await rig.assign(IDS, "q0")
        assert await rig.counts("q0") == {"available": 3}
