"""What all lanes of a shard hold together: bounded in bytes, however many queues have a backlog."""

from __future__ import annotations

from functools import partial

import pytest

from services.broker.core.shard import Purge
from services.broker.core.waiting import lane_budget
from services.broker.core.waiting.lane import BUCKET_BYTES, MESSAGE_BYTES, Lane
from services.broker.core.waiting.lane_budget import LaneBudget
from tests.unit.broker.core.shards import START_MS, Rig

QUEUES = [f"q{number}" for number in range(40)]
DEEP = 2000


def held_bytes(rig: Rig) -> int:
    return sum(
        lane.held_bytes
        for queue in rig.shard.queues.values()
        for lane in queue.waiting.by_name.values()
    )


async def rig_with(bytes_max: int, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(lane_budget, "SPARED", 4)
    rig = Rig()
    rig.shard.lanes = LaneBudget(bytes_max)
    for queue_id in QUEUES:
        rig.create(queue_id)
    return rig


async def test_the_backlogs_of_many_queues_hold_no_more_together_than_their_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a budget for two of forty queues, which all get two thousand messages, by turns
    one_queue_bytes = 100 * DEEP
    rig = await rig_with(2 * one_queue_bytes, monkeypatch)
    for first in range(1, DEEP, 500):
        for queue_id in QUEUES:
            due_ms = START_MS + first if queue_id < "q2" else 0
            await rig.route(range(first, first + 500), queue_id=queue_id, visible_at_ms=due_ms)
            rig.commit()

    # then no more than that is held, but for the lanes that are at work
    spared_bytes = lane_budget.SPARED * one_queue_bytes
    assert held_bytes(rig) <= 2 * one_queue_bytes + spared_bytes
    assert rig.shard.lanes.held_bytes == held_bytes(rig)

    # and each queue gives all of its own, in order
    rig.now_ms += DEEP
    for queue_id in reversed(QUEUES):
        found: list[int] = []
        while leases := await rig.claim(700, queue_id=queue_id):
            found += [lease.message_id for lease in leases]
            rig.commit()
            assert held_bytes(rig) <= 2 * one_queue_bytes + spared_bytes
        assert found == list(range(1, DEEP + 1))
    assert rig.shard.lanes.held_bytes == held_bytes(rig) == 0


async def test_buckets_of_few_messages_count_with_what_they_take_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a budget for two of forty queues, each of whose messages has a bucket of its own
    count = 20
    one_queue_bytes = count * (MESSAGE_BYTES + BUCKET_BYTES)
    rig = await rig_with(2 * one_queue_bytes, monkeypatch)
    for queue_id in QUEUES:
        for number in range(1, count + 1):
            await rig.route([number], queue_id=queue_id)
            rig.commit()

    # then no more is in memory than that, but for the lanes that are at work
    lanes = [lane for queue_id in QUEUES for lane in rig.queue(queue_id).waiting.lanes()]
    buckets = sum(len(lane.in_memory()) for lane in lanes)
    assert buckets <= (2 + lane_budget.SPARED) * count


async def test_what_is_read_before_the_first_commit_after_a_start_goes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = await rig_with(1 << 30, monkeypatch)
    for queue_id in QUEUES:
        await rig.route(range(1, 101), queue_id=queue_id)
    rig.commit()
    await rig.restart()
    rig.shard.lanes = LaneBudget(0)

    for queue_id in QUEUES:
        look = partial(rig.queue(queue_id).peek, 1, list, rig.now_ms)
        assert await rig.run(look) == [1]

    held = [queue_id for queue_id in QUEUES if rig.queue(queue_id).waiting.lanes()[0].in_memory()]
    assert held == QUEUES[-lane_budget.SPARED :]


async def test_what_the_database_cannot_give_yet_is_not_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given messages of a queue that are durable, and others behind them that reads do not see yet
    rig = await rig_with(0, monkeypatch)
    await rig.route(range(1, 51), queue_id="q0")
    rig.commit()
    for late in (False, True):
        for number, queue_id in enumerate(QUEUES):
            if number or late:
                first = 51 if late else 1
                await rig.route(range(first, first + 50), queue_id=queue_id)
        rig.store.write(rig.shard.drain(rig.now_ms), rig.now_ms, late=late)

    # when the commit before these is durable, and others use up the budget
    rig.store.make_durable()
    rig.shard.durable()

    # then all come, in order
    assert [one.message_id for one in await rig.claim(200, queue_id="q0")] == list(range(1, 101))


async def test_what_was_taken_and_may_come_back_is_not_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = await rig_with(0, monkeypatch)
    await rig.route(range(1, 101), queue_id="q0")
    rig.commit()
    leases = await rig.claim(50, queue_id="q0")
    rig.commit()
    for queue_id in QUEUES[1:]:
        await rig.route(range(1, 101), queue_id=queue_id)
        rig.commit()

    rig.release(leases)
    rig.commit()

    assert [one.message_id for one in await rig.claim(200, queue_id="q0")] == list(range(1, 101))


async def test_what_comes_back_in_parts_to_an_emptied_lane_comes_to_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a lane that was emptied by a claim, of which half has come back since
    rig = await rig_with(0, monkeypatch)
    await rig.route(range(1, 101), queue_id="q0")
    leases = await rig.claim(100, queue_id="q0")
    rig.commit()
    await rig.route(range(101, 111), queue_id="q0")
    rig.commit()
    rig.release(leases[1::2])
    rig.commit()

    # when others use up the budget before the other half comes
    for queue_id in QUEUES[1:]:
        await rig.route(range(1, 101), queue_id=queue_id)
        rig.commit()
    rig.release(leases[0::2])
    rig.commit()

    # then all are in order: those in memory, and those that have to be read
    claims = [await rig.claim(200, queue_id="q0") for _ in range(2)]
    assert [one.message_id for part in claims for one in part] == list(range(1, 111))


async def test_lanes_that_cannot_let_go_are_not_all_looked_at_with_every_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given queues of which each has a head that may come back, over the budget
    rig = await rig_with(0, monkeypatch)
    for queue_id in QUEUES:
        await rig.route(range(1, 101), queue_id=queue_id)
        await rig.claim(1, queue_id=queue_id)
    rig.commit()
    looked_at: list[Lane] = []
    evict = Lane.evict

    def noting(lane: Lane, durable_generation: int) -> None:
        looked_at.append(lane)
        evict(lane, durable_generation)

    monkeypatch.setattr(Lane, "evict", noting)

    for message_id in range(101, 201):
        await rig.route([message_id], queue_id="q0")
        rig.commit()

    assert len(looked_at) <= len(QUEUES)


async def test_deleted_and_purged_queues_leave_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await rig_with(1 << 30, monkeypatch)
    for queue_id in ("q0", "q1"):
        await rig.route(range(1, 101), queue_id=queue_id)
    rig.commit()
    assert rig.shard.lanes.held_bytes > 0

    rig.shard.delete_queue(rig.queue("q0"))
    rig.shard.purge(rig.queue("q1"), {Purge.AVAILABLE})
    rig.commit()

    assert rig.shard.lanes.held_bytes == 0
