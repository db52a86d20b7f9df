"""Replays of a shard, with its database in a dict: what goes together into which commit."""

from __future__ import annotations

import pytest

from libs.storage.layout.own_keys import replay_key, routing_cursor_key
from libs.storage.records.move_records import MoveRecord, MoveStage
from libs.storage.records.replay_records import OPEN_END, ReplayRange, decode_replay, encode_replay
from services.broker.core.commands import Assignment, Range
from services.broker.core.config_log import ConfigChange
from services.broker.core.lists.replays import Counts, Replays, Starts, ranges_from
from services.broker.core.queue import Queue
from services.broker.core.settings import QueueSettings
from tests.unit.broker.core.applied import assign_all, backfill_whole
from tests.unit.broker.core.shards import START_MS, Rig
from tests.unit.broker.core.stored import stored_queue


def late(rig: Rig, end: int = 10) -> Queue:
    """A queue that is to replay log 0 up to here."""
    return rig.shard.create_queue("late", QueueSettings("true"), (ReplayRange(0, 0, 0, end),))


async def backfill(rig: Rig, previous: int, last: int, *ids: int, visible_at_ms: int = 0) -> bool:
    columns = Assignment("late", ids, visible_at_ms=[visible_at_ms] * len(ids))
    piece = Range(0, previous, last, [columns] if ids else [])
    counts = Counts(last - previous, 10 - last)
    queue = rig.shard.queues["late"]
    return await rig.run(lambda: backfill_whole(rig.shard, queue, piece, counts, rig.now_ms))


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


async def test_the_counts_of_a_replay_are_stored_with_its_cursor_and_kept_over_a_restart() -> None:
    rig = Rig()
    late(rig)
    [before] = rig.shard.replays.of("late")
    assert (before.done_count, before.message_count) == (0, None)
    assert await backfill(rig, 0, 4)
    rig.commit()
    assert not await backfill(rig, 0, 4)  # sent again: it counts once
    assert await backfill(rig, 4, 9)

    await rig.restart()

    [after] = rig.shard.replays.of("late")
    assert (after.cursor, after.done_count, after.message_count) == (4, 4, 10)
    assert await backfill(rig, 4, 10)
    [done] = rig.shard.replays.of("late")
    assert (done.done_count, done.message_count) == (10, 10)


def test_a_replay_whose_end_moves_is_counted_again_by_its_next_piece() -> None:
    replays = Replays({"q": [ReplayRange(0, 0, 0, 50)]})
    replays.move("q", 0, 20, Counts(5, 7))
    assert [one.message_count for one in replays.of("q")] == [12]
    replays.extend(["q"], 0, 50, 60)
    assert [one.message_count for one in replays.of("q")] == [None]
    replays.move("q", 0, 50, Counts(7, 3))
    assert [one.message_count for one in replays.of("q")] == [15]
    replays.open("q", {0: 60})
    replays.close("q", {0: 90})
    assert [(one.done_count, one.message_count) for one in replays.of("q")] == [(12, None)]


def test_what_was_removed_before_it_was_reached_is_in_the_count_no_more_at_the_end() -> None:
    replays = Replays({"q": [ReplayRange(0, 0, 0, 50)]})
    replays.move("q", 0, 20, Counts(20, 30))
    replays.move("q", 0, 50, Counts(9, 0))
    assert [(one.done_count, one.message_count) for one in replays.of("q")] == [(29, 29)]


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
    assert ranges_from(None, cursors) is None
    assert ranges_from(Starts(99, {1: 5, 2: 7, 3: 0, 4: 9}), cursors) == (
        ReplayRange(1, 5, 5, 20),
        ReplayRange(3, 0, 0, 50),
    )
    # Of a log whose ingest did not answer, the start is looked up later
    assert ranges_from(Starts(99, {1: 5, 2: 7}), cursors | {5: 0}) == (
        ReplayRange(1, 5, 5, 20),
        ReplayRange(3, 0, 0, 50, since_ms=99),
    )


def test_a_replay_whose_start_is_looked_up_later_is_under_way_and_ends_where_it_did() -> None:
    replays = Replays()
    waiting = ReplayRange(3, 0, 0, 50, since_ms=99)
    replays.begin("q", (waiting,))
    assert replays.is_running("q")
    replays.extend(["q"], 3, 50, 60)
    replays.found("q", waiting, 20)
    assert replays.of("q") == (ReplayRange(3, 20, 20, 60),)
    # Only once, and not behind its end
    replays.found("q", waiting, 30)
    assert replays.of("q") == (ReplayRange(3, 20, 20, 60),)
    replays.begin("late", (waiting,))
    replays.found("late", waiting, 70)
    assert not replays.is_running("late")


def test_a_start_that_is_found_in_a_quarantine_is_looked_up_again_after_it() -> None:
    waiting = ReplayRange(0, 0, 0, 100, since_ms=99)
    replays = Replays({"q": [waiting]})
    replays.open("q", {0: 100})
    replays.found("q", waiting, 500)
    replays.close("q", {0: 300})

    assert replays.of("q") == (ReplayRange(0, 0, 0, 300, since_ms=99),)


def test_a_range_that_begins_behind_its_logs_cursor_ends_empty_with_the_quarantine() -> None:
    replays = Replays({"q": [ReplayRange(0, 500, 500, OPEN_END)]})
    replays.close("q", {0: 300})

    assert replays.of("q") == (ReplayRange(0, 300, 300, 300),)
    [(_, row)] = replays.drain()
    assert row is not None
    assert decode_replay(row) == [ReplayRange(0, 300, 300, 300)]


def test_a_start_is_noted_only_for_a_range_that_waits_for_that_time() -> None:
    waiting = ReplayRange(0, 0, 0, 100, since_ms=99)
    replays = Replays({"q": [waiting._replace(since_ms=0)]})
    replays.found("q", waiting, 90)
    assert replays.of("q") == (ReplayRange(0, 0, 0, 100, since_ms=0),)


@pytest.mark.parametrize(
    "unsound",
    [ReplayRange(0, 500, 500, 300), ReplayRange(0, 5, 4, 9), ReplayRange(0, 0, 3, 9, since_ms=7)],
)
def test_a_range_that_no_broker_could_read_is_not_written(unsound: ReplayRange) -> None:
    with pytest.raises(ValueError, match="log 0: cursor"):
        encode_replay([unsound])


async def test_a_log_that_is_gone_is_forgotten_with_its_cursor_and_its_part_of_replays() -> None:
    rig = Rig()
    ends = {0: 10, 1: (1 << 48) + 10}
    pieces = [Range(log, 0, last, []) for log, last in ends.items()]
    assert assign_all(rig.shard, pieces, rig.now_ms) == [True, True]
    both = (ReplayRange(0, 0, 0, 10), ReplayRange(1, 1 << 48, 1 << 48, (1 << 48) + 10))
    rig.shard.create_queue("both", QueueSettings("true"), both)
    rig.shard.create_queue("one", QueueSettings("true"), both[1:])
    rig.shard.create_queue("other", QueueSettings("true"), both[:1])
    assert rig.shard.replays.logs == {0, 1}
    rig.commit()
    assert routing_cursor_key(1) in rig.store.rows

    rig.shard.forget_log(2)
    assert not rig.shard.has_changes
    rig.shard.forget_log(1)
    rig.commit()

    # It is forgotten in memory as on disk
    for _ in range(2):
        assert rig.shard.replays.logs == {0}
        assert rig.shard.replays.of("both") == both[:1] == rig.shard.replays.of("other")
        assert not rig.shard.replays.is_running("one")
        assert 1 not in rig.shard.cursors
        assert routing_cursor_key(1) not in rig.store.rows
        assert replay_key("one") not in rig.store.rows
        await rig.restart()


def test_routers_hear_of_a_replay_that_is_left_more_of_a_log() -> None:
    rig = Rig()
    before = rig.shard.revision
    queue = late(rig, end=0)
    rig.shard.take_config_changes()

    assert assign_all(rig.shard, [Range(0, 0, 7, [], before)], rig.now_ms) == [True]

    assert rig.shard.replays.of("late") == (ReplayRange(0, 0, 0, 7),)
    assert rig.shard.revision == 2
    assert rig.shard.take_config_changes() == [ConfigChange("late", 2, queue.settings, 1)]


def test_a_log_may_be_gone_before_its_cursor_is_written() -> None:
    rig = Rig()
    assert assign_all(rig.shard, [Range(1, 0, 9, [])], rig.now_ms) == [True]

    rig.shard.forget_log(1)
    rig.commit()

    assert routing_cursor_key(1) not in rig.store.rows


def test_an_open_range_is_not_closed_while_its_log_is_not_routed_up_to_it() -> None:
    replays = Replays({"q": [ReplayRange(0, 0, 4, 9), ReplayRange(1, 0, 1, OPEN_END)]})

    assert not replays.can_close("q", {0: 9})
    assert not replays.can_close("q", {0: 9, 1: 0})
    assert replays.can_close("q", {1: 1})
    assert replays.can_close("others", {})
    replays.begin("from its beginning", (ReplayRange(1, 0, 0, OPEN_END),))
    assert replays.can_close("from its beginning", {0: 9})


def test_an_open_range_of_a_log_that_is_not_routed_here_ends_empty() -> None:
    replays = Replays({"q": [ReplayRange(1, 5, 9, OPEN_END)]})
    replays.close("q", {0: 30})

    assert replays.of("q") == (ReplayRange(1, 0, 0, 0),)


@pytest.mark.parametrize("departs", [False, True])
def test_a_queue_that_is_gone_is_left_nothing_of_ranges_judged_before_it_came(
    departs: bool,
) -> None:
    rig = Rig()
    before = rig.shard.revision
    assert assign_all(rig.shard, [Range(0, 0, 5, [])], rig.now_ms) == [True]
    queue = late(rig, end=5)
    if departs:
        move = MoveRecord(MoveStage.LEAVING, number=1, shard=2)
        rig.shard.depart(queue, move, rig.now_ms)
    else:
        rig.shard.delete_queue(queue)
    left = rig.shard.replays.of("late")

    assert assign_all(rig.shard, [Range(0, 5, 10, [], before)], rig.now_ms) == [True]

    assert rig.shard.replays.of("late") == left


def test_of_a_log_that_was_replayed_in_parts_the_last_one_says_how_far() -> None:
    first, last = ReplayRange(0, 0, 3, 3), ReplayRange(0, 5, 9, 9)
    replays = Replays({"q": [first, last, ReplayRange(1, 0, 0, 0)]})

    assert replays.range_of("q", 0) == last
    assert replays.range_of("q", 2) is None
