"""Replays of a shard, with its database in a dict: what goes together into which commit."""

from __future__ import annotations

import pytest

from libs.storage.own_keys import replay_key, routing_cursor_key
from libs.storage.replay_records import ReplayRange
from services.broker.commands import Assignment, Range
from services.broker.queue_machine import Queue
from services.broker.queue_settings import QueueSettings
from services.broker.replays import ranges_from
from slatemq.errors import Unavailable
from tests.unit.broker.shards import START_MS, Rig
from tests.unit.broker.stored import stored_queue


def late(rig: Rig, end: int = 10) -> Queue:
    """A queue that is to replay log 0 up to here."""
    return rig.shard.create_queue("late", QueueSettings("true"), (ReplayRange(0, 0, 0, end),))


async def backfill(rig: Rig, previous: int, last: int, *ids: int, visible_at_ms: int = 0) -> bool:
    columns = Assignment("late", ids, visible_at_ms=[visible_at_ms] * len(ids))
    piece = Range(0, previous, last, [columns] if ids else [])
    return await rig.run(lambda: rig.shard.backfill(rig.shard.queues["late"], piece, rig.now_ms))


def cursor(rig: Rig) -> int:
    found = rig.shard.replays.range_of("late", 0)
    assert found is not None
    return found.cursor


@pytest.mark.parametrize("visible_at_ms", [0, START_MS + 1_000])
async def test_a_crash_loses_a_piece_and_its_cursor_together_or_neither(visible_at_ms: int) -> None:
    rig = Rig()
    late(rig)
    rig.commit()
    assert await backfill(rig, 0, 5, 1, 2, visible_at_ms=visible_at_ms)
    rig.commit()
    assert await backfill(rig, 5, 9, 6, visible_at_ms=visible_at_ms)

    await rig.restart()

    stored = stored_queue(rig.store.rows, "late")
    assert stored is not None
    assert (cursor(rig), set(stored.waiting)) == (5, {1, 2})
    assert await backfill(rig, 5, 9, 6, visible_at_ms=visible_at_ms)
    assert not await backfill(rig, 5, 9, 6, visible_at_ms=visible_at_ms)
    rig.commit()
    rig.now_ms += 2_000
    assert sorted(i.message_id for i in await rig.claim(9, queue_id="late")) == [1, 2, 6]


async def test_a_queue_and_its_replay_come_and_go_in_one_commit() -> None:
    rig = Rig()
    late(rig)
    rig.commit()
    assert replay_key("late") in rig.store.rows

    rig.shard.delete_queue(rig.shard.queues["late"])
    assert rig.shard.replays.of("late") == ()
    rig.commit()
    assert replay_key("late") not in rig.store.rows


async def test_replay_and_live_routing_move_their_own_cursors() -> None:
    rig = Rig()
    late(rig)
    await rig.route([11], queue_id="late")
    assert rig.shard.cursors == {0: 1}
    assert await backfill(rig, 0, 10)
    rig.commit()
    assert (rig.shard.cursors, cursor(rig)) == ({0: 1}, 10)
    assert routing_cursor_key(0) in rig.store.rows
    assert not await backfill(rig, 10, 11, 11)


async def test_a_queue_without_a_replay_writes_nothing_for_it() -> None:
    rig = Rig()
    rig.create()
    rig.commit()
    assert replay_key("orders") not in rig.store.rows
    assert rig.shard.replays.by_queue == {}


def test_what_a_queue_catches_up_on_ends_at_the_cursors() -> None:
    cursors = {3: 50, 1: 20, 2: 7}
    assert ranges_from(None, cursors) == ()
    assert ranges_from({1: 5, 2: 7, 3: 0, 4: 9}, cursors) == (
        ReplayRange(1, 5, 5, 20),
        ReplayRange(3, 0, 0, 50),
    )
    with pytest.raises(Unavailable):
        ranges_from({1: 5, 2: 7}, cursors)
