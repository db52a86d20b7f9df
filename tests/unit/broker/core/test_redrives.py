"""Which redrives a shard keeps, and where one stands when its row changes under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from libs.storage.layout.own_keys import redrive_key
from libs.storage.records.queues import AvailableMessage, FailedMessage
from libs.storage.records.redrive_records import RedriveRecord, RedriveState, decode_redrive
from services.broker.core.batches.remove import DeadLetter, StoredRow, take_dead_letters
from services.broker.core.batches.settle import Action, Settlement, Settlements, settle
from services.broker.core.queue import Queue
from services.broker.core.redrives import (
    PRINCIPAL_RUNNING_MAX,
    RUNNING_MAX,
    Redrives,
    RedriveStep,
    is_its_queue,
    moved,
)
from services.broker.core.shard import Shard
from slatemq.errors import ResourceExhausted
from tests.unit.broker.core.shards import START_MS, Rig
from tests.unit.broker.core.stored import stored_queue

RUNNING, DONE, CANCELLED = RedriveState.RUNNING, RedriveState.DONE, RedriveState.CANCELLED
HOUR_MS = 3_600_000


def record(state: RedriveState = RUNNING, ended_at_ms: int = 0, **fields: Any) -> RedriveRecord:
    first = RedriveRecord(
        queue_revision=1,
        state=state,
        rate=0,
        created_at_ms=0,
        ended_at_ms=ended_at_ms,
        total_count=9,
        examined_count=0,
        redriven_count=0,
        next_order=4,
        next_place=0,
        end_order=9,
        queue_id="orders",
        target_queue_id="orders",
    )
    return first._replace(**fields)


def numbers(redrives: Redrives) -> list[int]:
    return [number for number, _ in redrives]


def test_of_those_that_ended_the_last_to_end_are_kept() -> None:
    redrives = Redrives()
    redrives.kept = 2
    for _ in range(5):
        redrives.start(record())
    redrives.put(4, record(CANCELLED, ended_at_ms=10))
    redrives.put(2, record(CANCELLED, ended_at_ms=20))
    assert numbers(redrives) == [1, 2, 3, 4, 5]

    # Ended now, though its time says before the others
    redrives.put(1, record(CANCELLED, ended_at_ms=5))
    assert numbers(redrives) == [1, 2, 3, 5]
    redrives.kept = 1
    redrives.forget(now_ms=30)
    assert numbers(redrives) == [2, 3, 5]


@pytest.mark.parametrize(("retention_s", "left"), [(3600, [2, 3, 4]), (0, [1, 2, 3, 4])])
def test_those_that_ended_longer_ago_than_the_retention_are_forgotten(
    retention_s: int, left: list[int]
) -> None:
    redrives = Redrives()
    redrives.retention_s = retention_s
    redrives.start(record(CANCELLED, ended_at_ms=99))
    redrives.start(record(CANCELLED, ended_at_ms=100))
    redrives.start(record())
    redrives.start(record())

    redrives.forget(now_ms=100 + HOUR_MS)

    assert numbers(redrives) == left


def test_no_number_is_given_twice_though_all_redrives_are_forgotten() -> None:
    redrives = Redrives()
    redrives.retention_s = 1
    first, last = redrives.start(record(CANCELLED)), redrives.start(record(CANCELLED))
    redrives.forget(now_ms=HOUR_MS)

    rows = dict(redrives.drain())
    assert rows[redrive_key(first)] is None
    stored = rows[redrive_key(last)]
    assert stored is not None
    restarted = Redrives({last: decode_redrive(stored)})
    assert restarted.start(record()) == redrives.start(record()) == last + 1


def test_as_many_run_at_once_as_stated() -> None:
    redrives = Redrives()
    for _ in range(RUNNING_MAX):
        redrives.check_capacity("")
        redrives.start(record())

    with pytest.raises(ResourceExhausted):
        redrives.check_capacity("shop")
    redrives.put(1, record(DONE))
    redrives.check_capacity("shop")


def test_no_principal_has_all_that_may_run() -> None:
    # Given one that has started as many as it may
    redrives = Redrives()
    for _ in range(PRINCIPAL_RUNNING_MAX):
        redrives.check_capacity("shop")
        redrives.start(record(principal="shop"))

    # When it wants another one
    with pytest.raises(ResourceExhausted) as refused:
        redrives.check_capacity("shop")

    # Then it waits for one of its own to end, and others start theirs
    assert refused.value.reason == "TOO_MANY_REDRIVES"
    assert "'shop'" in refused.value.message
    redrives.check_capacity("bills")
    redrives.put(1, record(CANCELLED, principal="shop"))
    redrives.check_capacity("shop")


def test_a_request_is_known_by_its_id_and_one_without_an_id_never() -> None:
    redrives = Redrives()
    redrives.start(record())
    number = redrives.start(record(request_id="night"))

    assert redrives.of_request("night") == number
    assert redrives.of_request("day") is None
    assert redrives.of_request("") is None


def test_the_ids_that_a_redrive_named_go_when_it_is_done_and_stay_when_it_is_cancelled() -> None:
    redrives = Redrives()
    number = redrives.start(record(message_ids=(7, 9)))
    redrives.put(number, record(CANCELLED, message_ids=(7, 9)))
    cancelled = redrives.get(number)
    redrives.put(number, record(DONE, message_ids=(7, 9)))
    done = redrives.get(number)

    assert cancelled is not None
    assert cancelled.message_ids == (7, 9)
    assert done is not None
    assert done.message_ids == ()


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"next_place": 5}, 3),  # behind the places 1 and 4, before 5
        ({"next_place": 1}, 1),
        ({"next_place": 5, "state": CANCELLED}, 3),  # it may be resumed
        ({"next_place": 5, "state": DONE}, 5),
        ({"next_place": 5, "queue_id": "others"}, 5),
        ({"next_place": 5, "next_order": 3}, 5),
    ],
)
def test_a_redrive_within_a_row_keeps_its_position_as_others_empty_places(
    fields: dict[str, Any], place: int
) -> None:
    redrives = Redrives()
    number = redrives.start(record(**fields))
    list(redrives.drain())

    redrives.note_removed("orders", {4: {1, 4, 5}}, by=number)
    assert not redrives.has_changes
    redrives.note_removed("orders", {4: {1, 4, 5}})

    now = redrives.get(number)
    assert now is not None
    assert now.next_place == place
    assert redrives.has_changes == (place != fields["next_place"])


def removed(shard: Shard, queue: Queue, order: int, row: list[FailedMessage]) -> None:
    wanted = [DeadLetter(one.message_id, one.failed_at_ms) for one in row[1:3]]
    take_dead_letters(shard, queue, [StoredRow(order, row, wanted)])


def settled(shard: Shard, queue: Queue, order: int, row: list[FailedMessage]) -> None:
    drops = [Settlement(one.message_id, order, Action.IS_DROPPED) for one in row[1:3]]
    settle(shard, queue, Settlements(drops, {order: row}, {}, 0, "me"), START_MS)


@pytest.mark.parametrize("taken", [removed, settled])
def test_a_redrive_goes_on_with_the_dead_letter_that_is_next_as_those_before_it_leave(
    taken: Callable[[Shard, Queue, int, list[FailedMessage]], None],
) -> None:
    rig = Rig()
    queue = rig.create()
    row = [FailedMessage(message_id, START_MS, 5, 0, 0, "no") for message_id in range(1, 6)]
    queue.failed.add(row)
    rig.commit()
    order = queue.failed.oldest_order
    number = rig.shard.redrives.start(record(next_order=order, next_place=3))

    taken(rig.shard, queue, order, row)

    now = rig.shard.redrives.get(number)
    assert now is not None
    rig.commit()
    stored = stored_queue(rig.store.rows, "orders")
    assert stored is not None
    assert list(stored.failed)[now.next_place] == 4


def test_every_redrive_of_a_row_learns_of_its_emptied_places() -> None:
    redrives = Redrives()
    by = redrives.start(record(next_place=5))
    others = [redrives.start(record(next_place=5)) for _ in range(2)]

    redrives.note_removed("orders", {4: {1, 4}}, by=by)

    places = {number: one.next_place for number, one in redrives}
    assert places == {by: 5, others[0]: 3, others[1]: 3}


def test_a_redrive_goes_through_a_row_in_steps_and_looks_at_each_message_once() -> None:
    # Given
    orders = Rig().create("orders")
    messages = [FailedMessage(number, 5, 3) for number in range(1, 9)]
    orders.failed.count = len(messages)
    entered: list[AvailableMessage] = []

    def enter(message: AvailableMessage) -> bool:
        entered.append(message)
        return bool(message.message_id % 2)

    # When it takes the odd ones of three messages at a time
    now = record(total_count=len(messages))
    steps = []
    while now.next_order == 4:
        through = min(now.next_place + 3, len(messages))
        step = RedriveStep(4, messages, through, range(now.next_place, through))
        now, taken, rows = moved(orders, now, step, enter, 9)
        assert len(rows) == bool(taken)
        messages = [one for place, one in enumerate(messages) if place not in taken]
        steps.append((now.next_order, now.next_place, now.examined_count, now.redriven_count))

    # Then
    assert entered == [AvailableMessage(number, 0, 0, 0, 0) for number in range(1, 9)]
    assert steps == [(4, 1, 3, 2), (4, 3, 6, 3), (5, 0, 8, 4)]
    assert [one.message_id for one in messages] == [2, 4, 6, 8]


def test_a_queue_of_the_same_name_is_not_the_one_that_was_redriven() -> None:
    orders = Rig().create("orders")
    revision = orders.created_revision

    assert is_its_queue(orders, record(queue_revision=revision))
    assert not is_its_queue(orders, record(queue_revision=revision + 1))
    assert not is_its_queue(None, record(queue_revision=revision))
