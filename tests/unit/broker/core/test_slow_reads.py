"""Reads take time: what happens meanwhile must neither be lost nor come twice."""

from __future__ import annotations

import asyncio

import pytest

from services.broker.core.lists import attempts
from services.broker.core.shard import Nack
from services.broker.core.waiting import available
from services.broker.core.waiting.bucket import Place
from services.broker.shard import loading
from tests.unit.broker.core.shards import START_MS, Rig
from tests.unit.broker.core.stored import stored_attempts, stored_queue


async def test_a_read_that_began_before_a_commit_does_not_undo_it() -> None:
    # Given two delayed messages that memory does not hold
    rig = Rig()
    rig.create()
    due_ms = START_MS + 1000
    await rig.route([1], visible_at_ms=due_ms)
    await rig.route([9], visible_at_ms=due_ms + 1000)
    rig.commit()
    await rig.restart()

    # when a claim waits for a slow read that has seen these two only
    rig.now_ms = due_ms
    rig.store.slow = True
    claim = asyncio.create_task(rig.ids(10))
    await asyncio.sleep(0.001)
    rig.store.open_gates()
    await asyncio.sleep(0.001)

    # and another one, due between them, comes meanwhile, and is committed
    rig.store.slow = False
    await rig.route([2], visible_at_ms=due_ms + 500)
    rig.commit()
    rig.now_ms = due_ms + 1000
    rig.store.open_gates()

    # then all of them are claimed, and stored
    assert await claim == [1, 2, 9]
    rig.commit()
    stored = stored_queue(rig.store.rows, "orders")
    assert stored is not None
    assert stored.held.keys() == {1, 2, 9}


async def test_a_read_that_missed_what_was_being_written_is_put_right() -> None:
    # Given a delayed message that is being written, in a lane that memory does not hold
    rig = Rig()
    rig.create()
    due_ms = START_MS + 1000
    await rig.route([8], visible_at_ms=due_ms - 500)
    await rig.route([9], visible_at_ms=due_ms + 1000)
    rig.commit()
    await rig.restart()
    await rig.route([1], visible_at_ms=due_ms)
    rig.store.write(rig.shard.drain(rig.now_ms), rig.now_ms, late=True)

    # when a claim reads what is there, and the write becomes durable behind it
    rig.now_ms = due_ms + 1000
    assert await rig.ids(1) == [8]
    rig.store.make_durable()
    rig.shard.durable()

    # then the next claim finds it in its place
    assert await rig.ids(10) == [1, 9]


async def test_what_is_being_written_again_stays_in_memory_though_it_was_durable_once() -> None:
    # Given three delayed messages of one commit, in a lane that memory does not hold, written
    rig = Rig()
    rig.create()
    due_ms = START_MS + 1000
    await rig.route([8], visible_at_ms=due_ms - 500)
    await rig.route([9], visible_at_ms=due_ms + 1000)
    rig.commit()
    await rig.restart()
    await rig.route([1, 2, 3], visible_at_ms=due_ms)
    rig.store.write(rig.shard.drain(rig.now_ms), rig.now_ms)

    # when one of them is cancelled, and only the first write is done
    [place] = {
        Place(lane.priority, lane.kind, bucket.order)
        for lane in rig.queue().waiting.lanes()
        for bucket in lane.in_memory()
    }
    assert rig.queue().waiting.cancel(place, 2) is not None
    rig.store.write(rig.shard.drain(rig.now_ms), rig.now_ms, late=True)
    rig.store.make_durable()
    rig.shard.durable()

    # then a claim finds the others
    rig.now_ms += 5000
    assert await rig.ids(10) == [8, 1, 3, 9]


async def test_attempts_that_are_being_written_stay_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts, "BYTES_MAX", 0)
    rig = Rig()
    rig.create()
    await rig.route([1])
    (lease,) = await rig.claim(1)
    rig.store.write(rig.shard.drain(rig.now_ms), rig.now_ms)
    await rig.nack(Nack(lease.token, "first"))
    rig.store.write(rig.shard.drain(rig.now_ms), rig.now_ms, late=True)
    rig.store.make_durable()
    rig.shard.durable()

    (lease,) = await rig.claim(1)
    second = Nack(lease.token, "second")
    await rig.nack(second)
    rig.commit()

    result = stored_attempts(rig.store.rows, "orders", 1)
    assert [one.outcome for one in result] == ["nack: first", "nack: second"]


async def test_a_lane_of_which_nothing_is_left_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LOAD_MESSAGES", 2)
    rig = Rig()
    rig.create()
    await rig.route([1, 2])
    rig.commit()
    await rig.restart()
    assert rig.queue().waiting.ready_count == 2
    assert await rig.ids(1) == [1]
    reads = rig.store.reads

    assert await rig.claim(2, skip=[2]) == []

    assert rig.store.reads == reads


async def test_a_claim_gives_what_it_has_rather_than_wait_for_a_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "LOAD_MESSAGES", 2)
    monkeypatch.setattr(available, "READY_BUCKET_MAX", 2)
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3, 4])
    rig.commit()
    await rig.restart()

    assert await rig.ids(10) == [1, 2]
    assert await rig.ids(10) == [3, 4]
