"""What a shard knows of the queues that are on their way to another one, or from one."""

from __future__ import annotations

import pytest

from libs.storage.errors import CorruptRecord
from libs.storage.layout.own_keys import move_key, replay_key
from libs.storage.records.move_records import MoveRecord, MoveStage, decode_move
from libs.storage.records.replay_records import OPEN_END, ReplayRange
from services.broker.core.commands import Range
from services.broker.core.config_log import ConfigChange
from services.broker.core.lifecycle import new_state
from services.broker.core.moves import LISTED_MS, Moves
from services.broker.core.queue import Queue
from services.broker.core.settings import QueueSettings
from services.broker.core.shard import BEING_MOVED
from slatemq.errors import NotFound, Unavailable
from tests.unit.broker.core.applied import assign_all
from tests.unit.broker.core.shards import START_MS, Rig
from tests.unit.broker.core.stored import stored_queue

LEAVING = MoveRecord(MoveStage.LEAVING, 7, shard=2, revision=3)
COPYING = MoveRecord(MoveStage.COPYING, 7, shard=1)
COPIED = COPYING._replace(stage=MoveStage.COPIED)


def queue(queue_id: str = "orders") -> Queue:
    return Rig().create(queue_id)


def test_a_queue_that_leaves_is_listed_with_its_target_until_it_is_there() -> None:
    moves, orders = Moves(), queue()
    moves.leave(orders, LEAVING)

    assert moves.has("orders")
    assert moves.departing(START_MS + 100 * LISTED_MS) == {"orders": (orders, 2)}


def test_a_queue_that_has_left_is_listed_for_ten_seconds_more() -> None:
    moves, orders, others = Moves(), queue(), queue("others")
    moves.leave(orders, LEAVING)
    moves.leave(others, LEAVING)
    moves.arrived_elsewhere("orders", START_MS)

    assert not moves.has("orders")
    assert moves.has_record("orders")
    assert moves.departing(START_MS + LISTED_MS - 1) == {
        "orders": (orders, 2),
        "others": (others, 2),
    }
    assert moves.departing(START_MS + LISTED_MS) == {"others": (others, 2)}


def test_a_queue_that_has_left_is_listed_for_as_long_though_it_is_forgotten_before() -> None:
    moves, orders = Moves(), queue()
    moves.leave(orders, LEAVING)
    moves.arrived_elsewhere("orders", START_MS)
    moves.forget_departed("orders")

    assert not moves.has_record("orders")
    assert moves.departing(START_MS + LISTED_MS - 1) == {"orders": (orders, 2)}
    assert dict(moves.drain())[move_key("orders")] is None


def test_a_queue_that_comes_back_is_down_no_more() -> None:
    moves, orders = Moves(), queue()
    moves.leave(orders, LEAVING)
    moves.arrived_elsewhere("orders", START_MS)
    moves.forget_departed("orders")
    moves.expect("orders", COPYING)
    moves.end("orders")

    assert moves.departing(START_MS) == {}


def test_a_queue_whose_move_is_cancelled_is_down_no_more() -> None:
    moves = Moves()
    moves.leave(queue(), LEAVING)
    moves.end("orders")

    assert not moves.has("orders")
    assert moves.departing(START_MS) == {}


def test_a_caller_that_asked_too_early_may_ask_again_until_ten_seconds_after_the_arrival() -> None:
    moves = Moves()
    assert not moves.has_arrived("orders", 0)

    moves.expect("orders", COPYING)
    assert moves.has_arrived("orders", START_MS)

    moves.end("orders")
    assert not moves.has_arrived("orders", START_MS)

    moves.arrive("orders", START_MS)
    moves.arrive("others", START_MS + LISTED_MS - 1)
    assert moves.has_arrived("orders", START_MS + LISTED_MS - 1)
    assert not moves.has_arrived("orders", START_MS + LISTED_MS)
    assert moves.has_arrived("others", START_MS + LISTED_MS)


def test_arrivals_of_long_ago_take_no_memory() -> None:
    moves = Moves()
    for number in range(100):
        moves.arrive(f"queue {number}", START_MS + number * LISTED_MS)

    assert list(moves._arrived_ms) == ["queue 99"]


def test_who_looks_at_the_queues_learns_which_ones_leave_meanwhile() -> None:
    # Given
    moves = Moves()
    for name in ("before", "between", "within", "after"):
        moves.leave(queue(name), LEAVING)

    # When
    moves.arrived_elsewhere("before", START_MS)
    with moves.noting_left() as whole:
        moves.arrived_elsewhere("between", START_MS)
        with moves.noting_left() as part:
            moves.arrived_elsewhere("within", START_MS)
        moves.arrived_elsewhere("after", START_MS + 2 * LISTED_MS)

    # Then
    assert set(whole) == {"between", "within", "after"}
    assert set(part) == {"within"}


def test_a_restarted_shard_knows_the_queues_that_move() -> None:
    moves, orders, others = Moves(), queue(), queue("others")
    moves.leave(orders, LEAVING)
    moves.leave(others, LEAVING)
    moves.arrived_elsewhere("others", START_MS)
    moves.expect("copying", COPYING)
    moves.expect("copied", COPYING)
    moves.expect("copied", COPIED)
    moves.expect("cancelled", COPYING)
    moves.end("cancelled")

    had_changes, rows = moves.has_changes, dict(moves.drain())
    assert (had_changes, moves.has_changes) == (True, False)
    assert rows.pop(move_key("cancelled")) is None

    restarted = Moves()
    here = {"orders": orders, "others": others}
    for queue_id in (*here, "copying", "copied"):
        stored = rows.pop(move_key(queue_id))
        assert stored is not None
        restarted.restore(here.get(queue_id), queue_id, decode_move(stored))
    assert not rows
    assert restarted.departing(START_MS) == {"orders": (orders, 2)}
    assert (restarted.is_leaving("orders"), restarted.is_leaving("others")) == (True, False)
    assert restarted.has_record("others")
    assert restarted.arrivals == {"copying": COPYING, "copied": COPIED}
    assert restarted.drain() == []


def test_a_queue_that_leaves_without_its_config_is_an_error() -> None:
    with pytest.raises(CorruptRecord, match="'orders' is leaving, and has no config"):
        Moves().restore(None, "orders", LEAVING)


async def test_a_queue_that_departs_moves_until_it_is_there_also_over_restarts() -> None:
    rig = Rig()
    rig.shard.depart(rig.create(), LEAVING, rig.now_ms)
    left = rig.shard.revision

    for _ in range(2):
        assert "orders" not in rig.shard.queues
        assert isinstance(rig.shard.absence("orders"), Unavailable)
        assert rig.shard.gone_since("orders") == left
        rig.commit()
        await rig.restart()

    rig.shard.moves.arrived_elsewhere("orders", rig.now_ms)
    for _ in range(2):
        assert isinstance(rig.shard.absence("orders"), NotFound)
        assert rig.shard.gone_since("orders") == left
        assert rig.shard.moves.departures["orders"].has_arrived
        rig.commit()
        await rig.restart()

    rig.shard.forget_departed("orders")
    for _ in range(2):
        assert isinstance(rig.shard.absence("orders"), NotFound)
        assert rig.shard.gone_since("orders") == left
        rig.commit()
        await rig.restart()


@pytest.mark.parametrize("in_quarantine", [False, True])
def test_a_queue_that_departs_leaves_the_logs_to_its_replay_from_where_it_was_routed(
    in_quarantine: bool,
) -> None:
    rig = Rig()
    orders = rig.create()
    rig.shard.cursors[0] = 5
    if in_quarantine:
        rig.shard.quarantine(orders, "slow", START_MS)
        rig.shard.cursors[0] = 9

    rig.shard.depart(orders, LEAVING, START_MS)

    assert rig.shard.replays.of("orders") == (ReplayRange(0, 5, 5, OPEN_END),)


async def test_no_replay_stays_of_a_queue_that_has_left_for_ever() -> None:
    rig = Rig()
    rig.shard.cursors[0] = 5
    rig.shard.depart(rig.create(), LEAVING, START_MS)
    rig.commit()
    assert replay_key("orders") in rig.store.rows

    rig.shard.moves.arrived_elsewhere("orders", START_MS)
    rig.shard.forget_departed("orders")
    rig.commit()

    assert rig.shard.replays.of("orders") == ()
    assert replay_key("orders") not in rig.store.rows


async def test_a_cancelled_arrival_is_a_deletion_that_routers_hear_of() -> None:
    rig = Rig()
    rig.shard.moves.expect("orders", COPYING)
    before = rig.shard.revision

    rig.shard.drop_arrival("orders", queue())

    [change] = rig.shard.take_config_changes()
    assert (change.queue_id, change.revision, change.settings) == ("orders", before + 1, None)
    for _ in range(2):
        assert rig.shard.revision == rig.shard.gone_since("orders") == before + 1
        assert isinstance(rig.shard.absence("orders"), NotFound)
        rig.commit()
        await rig.restart()


@pytest.mark.parametrize(("before", "reason"), [("", BEING_MOVED), ("too slow", "too slow")])
def test_a_queue_that_comes_is_in_quarantine_and_keeps_the_reason_that_it_had(
    before: str, reason: str
) -> None:
    rig = Rig()
    since_ms = 5 if before else 0
    settings = QueueSettings("true", quarantine=before, quarantined_at_ms=since_ms, revision=9)
    orders = rig.shard.admit_moved("orders", settings, new_state(None, 1), (), START_MS)

    assert orders.settings.quarantine == reason
    assert orders.settings.quarantined_at_ms == (since_ms or START_MS)
    assert orders.settings.revision == rig.shard.revision == 10
    assert rig.shard.moves.has_arrived("orders", START_MS)


async def test_a_queue_that_comes_is_served_and_stored() -> None:
    rig = Rig()
    rig.shard.moves.expect("orders", COPIED)
    rig.commit()
    settings = QueueSettings("true", owner="me", filter_cost=3, revision=9)

    came = rig.shard.admit_moved("orders", settings, new_state(None, 1), (), START_MS)

    assert rig.queue() is came
    assert rig.shard.owned.totals("me") == (1, 3)
    assert rig.shard.take_config_changes() == [ConfigChange("orders", 10, came.settings, 10)]
    rig.commit()
    state = stored_queue(rig.store.rows, "orders")
    assert state is not None
    assert state.state.created_revision == 10
    assert not rig.shard.moves.has("orders")
    await rig.restart()
    assert not rig.shard.moves.has_record("orders")
    assert rig.queue().settings == came.settings
    assert rig.shard.revision == 10


def test_a_queue_that_comes_leaves_logs_that_its_former_shard_did_not_know_to_its_replay() -> None:
    rig = Rig()
    rig.shard.cursors.update({0: 5, 1: 7, 2: 9})
    ranges = (ReplayRange(0, 4, 4, OPEN_END), ReplayRange(1, 0, 3, 6))

    rig.shard.admit_moved("orders", QueueSettings("true"), new_state(None, 1), ranges, START_MS)

    assert rig.shard.replays.of("orders") == (
        ReplayRange(0, 4, 4, OPEN_END),
        ReplayRange(1, 0, 0, OPEN_END),
        ReplayRange(1, 0, 3, 6),
        ReplayRange(2, 0, 0, OPEN_END),
    )


def test_a_log_that_only_the_former_shard_knew_is_replayed_from_where_it_was_routed_there() -> None:
    rig = Rig()
    ranges = (ReplayRange(1, 4, 6, OPEN_END),)
    rig.shard.admit_moved("orders", QueueSettings("true"), new_state(None, 1), ranges, START_MS)

    assert assign_all(rig.shard, [Range(1, 0, 9, [])], START_MS) == [True]

    assert rig.shard.replays.of("orders") == ranges


def test_a_queue_that_came_is_routed_live_once_routing_is_as_far_as_it_was_elsewhere() -> None:
    rig = Rig()
    rig.shard.cursors[0] = 3
    ranges = (ReplayRange(0, 4, 4, OPEN_END),)
    admitted = QueueSettings("true"), new_state(None, 1), ranges, START_MS
    came = rig.shard.admit_moved("orders", *admitted)

    assert not rig.shard.settle(came)
    with pytest.raises(Unavailable) as refused:
        rig.shard.lift_quarantine(came, came.settings)
    assert refused.value.reason == "QUEUE_MOVING"
    assert came.settings.quarantine == BEING_MOVED
    rig.shard.cursors[0] = 6
    assert rig.shard.settle(came)
    assert (came.settings.quarantine, came.live_revision) == ("", rig.shard.revision)
    assert rig.shard.replays.of("orders") == (ReplayRange(0, 4, 4, 6),)

    rig.shard.quarantine(came, "slow", START_MS)
    assert rig.shard.settle(came)
    assert came.settings.quarantine == "slow"
