"""A range in steps: each of bounded size, and what other commands in between make of the rest."""

from __future__ import annotations

import pytest

from libs.storage.records.replay_records import OPEN_END, ReplayRange
from services.broker.core import shard as shards
from services.broker.core.commands import Assignment, Purge, Range
from services.broker.core.settings import QueueSettings
from services.broker.core.shard import STEP_MATCHES, STEP_QUEUES, RangeApplication
from tests.unit.broker.core.applied import finished
from tests.unit.broker.core.shards import Rig

QUEUES = ("a", "b", "c")


def begun(rig: Rig, *assignments: Assignment, last: int = 1 << 20) -> RangeApplication:
    piece = Range(0, rig.shard.cursors.get(0, 0), last, assignments, rig.shard.revision)
    application = rig.shard.begin(piece)
    assert application is not None
    return application


def step(rig: Rig, application: RangeApplication) -> list[str]:
    """One step; the queues that it changed."""
    changed = application.step(rig.now_ms)
    if not application.is_done:
        rig.shard.drain_early(changed, rig.now_ms)
    return [queue.queue_id for queue in changed]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Three queues, and steps of two messages."""
    monkeypatch.setattr(shards, "STEP_MATCHES", 2)
    rig = Rig()
    for queue_id in QUEUES:
        rig.create(queue_id)
    rig.commit()
    return rig


async def waiting(rig: Rig, queue_id: str) -> list[int]:
    return [one.message_id for one in await rig.claim(99, queue_id=queue_id)]


async def test_no_step_brings_in_more_messages_or_changes_more_queues_than_its_bounds() -> None:
    rig = Rig()
    count = 3 * STEP_QUEUES
    for number in range(count):
        rig.create(f"q{number}")
    long = list(range(1, 3 * STEP_MATCHES + 2))
    application = begun(
        rig,
        Assignment("q0", long),
        *(Assignment(f"q{number}", [1, 2], [3, 4]) for number in range(count)),
    )
    before, steps = 0, 0
    while not application.is_done:
        changed = application.step(rig.now_ms)
        came = sum(queue.waiting.ready_count for queue in rig.shard.queues.values())
        assert came - before <= STEP_MATCHES
        assert len(changed) <= STEP_QUEUES
        before, steps = came, steps + 1
    assert steps >= 6
    assert before == len(long) + 2 * count
    assert await waiting(rig, "q1") == [1, 2]


async def test_all_steps_are_one_commit_and_each_message_is_there_once(rig: Rig) -> None:
    application = begun(rig, *(Assignment(name, [1, 2, 3], [7, 7, 7]) for name in QUEUES))
    assert finished(rig.shard, application, rig.now_ms)
    rig.commit()
    await rig.restart()
    assert [await waiting(rig, name) for name in QUEUES] == [[1, 2, 3]] * 3
    assert rig.shard.cursors == {0: 1 << 20}


async def test_what_is_claimed_and_acked_between_two_steps_is_stored_with_the_range(
    rig: Rig,
) -> None:
    application = begun(rig, Assignment("a", [1, 2, 3]), Assignment("b", [1]))
    assert step(rig, application) == ["a"]
    first, _ = await rig.claim(2, queue_id="a")
    rig.shard.leases.ack([first.token], rig.now_ms)
    finished(rig.shard, application, rig.now_ms)
    rig.commit()
    await rig.restart()
    queue = rig.queue("a")
    assert (queue.waiting.ready_count, queue.leases.count, queue.done.count) == (1, 1, 1)
    assert await waiting(rig, "a") == [3]


async def test_a_queue_that_is_deleted_between_two_steps_gets_nothing_more(rig: Rig) -> None:
    application = begun(rig, *(Assignment(name, [1, 2, 3]) for name in QUEUES))
    step(rig, application)
    for name in ("a", "c"):
        rig.shard.delete_queue(rig.queue(name))
    rig.create("c")
    finished(rig.shard, application, rig.now_ms)
    rig.commit()
    await rig.restart()
    assert "a" not in rig.shard.queues
    assert [await waiting(rig, name) for name in ("b", "c")] == [[1, 2, 3], []]


async def test_a_purge_between_two_steps_empties_what_has_come_by_then(rig: Rig) -> None:
    application = begun(rig, Assignment("a", [1, 2, 3]))
    step(rig, application)
    assert rig.shard.purge(rig.queue("a"), {Purge.AVAILABLE}) == 2
    finished(rig.shard, application, rig.now_ms)
    rig.commit()
    await rig.restart()
    assert await waiting(rig, "a") == [3]


async def test_a_quarantine_between_two_steps_leaves_to_a_replay_what_is_behind_the_range(
    rig: Rig,
) -> None:
    application = begun(rig, *(Assignment(name, [1, 2, 3]) for name in QUEUES), last=50)
    step(rig, application)
    for name in ("a", "c"):
        rig.shard.quarantine(rig.queue(name), "slow", rig.now_ms)
    finished(rig.shard, application, rig.now_ms)
    rig.commit()
    await rig.restart()
    for name in ("a", "c"):
        assert rig.shard.replays.of(name) == (ReplayRange(0, 50, 50, OPEN_END),)
        assert await waiting(rig, name) == [1, 2, 3]


async def test_a_queue_made_between_two_steps_begins_behind_the_range(rig: Rig) -> None:
    application = begun(rig, *(Assignment(name, [1, 2, 3]) for name in QUEUES), last=50)
    step(rig, application)
    end = rig.shard.cursors[0]
    rig.shard.create_queue("past", QueueSettings("true"), (ReplayRange(0, 0, 0, end),))
    finished(rig.shard, application, rig.now_ms)
    rig.commit()
    await rig.restart()
    assert rig.shard.replays.of("past") == (ReplayRange(0, 0, 0, 50),)
