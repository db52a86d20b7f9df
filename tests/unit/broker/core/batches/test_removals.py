"""Removals of finished messages: what goes, what stays, and what became garbage meanwhile."""

from __future__ import annotations

import pytest

from libs.storage.layout.buckets import BucketKind
from libs.storage.layout.keys import attempts_key
from libs.storage.records.archived_records import ArchivedMessage
from libs.storage.records.queues import DoneMessage, FailedAttempt, FailedMessage
from services.broker.core.batches.remove import (
    DeadLetter,
    DoneRow,
    Outcome,
    StoredRow,
    archive,
    done_before,
    done_row,
    drop_archived,
    drop_waiting,
    judge_archived,
    prune_done,
    redrive_archived,
    take_dead_letters,
)
from services.broker.core.commands import Purge
from services.broker.core.lists.attempts import attempts_at
from services.broker.core.queue import Queue
from services.broker.core.waiting.bucket import Place
from slatemq.errors import ResourceExhausted
from tests.unit.broker.core.shards import START_MS, Rig
from tests.unit.broker.core.stored import StoredQueue, stored_queue

INGEST = 4


def stored(rig: Rig) -> StoredQueue:
    rig.commit()
    found = stored_queue(rig.store.rows, "orders")
    assert found is not None
    return found


# --- What waits -------------------------------------------------------------


async def test_what_waits_is_dropped_where_its_retention_has_ended() -> None:
    # Given messages of two priorities, not in memory any more, and a place without any
    rig = Rig()
    rig.create()
    for message_id, deadline_ms in ((1, 0), (2, START_MS + 9), (3, START_MS + 10)):
        await rig.route([message_id], deadline_ms=deadline_ms)
    await rig.route([4], deadline_ms=START_MS + 11)
    await rig.route([5], deadline_ms=START_MS + 1, priority=9)
    rig.commit()
    await rig.restart()
    queue = rig.queue()
    places = [Place(lane.priority, lane.kind, lane.head_order) for lane in stored(rig).state.lanes]
    nowhere = Place(7, BucketKind.READY, places[0].order)
    wanted = {nowhere: [1, 2], places[0]: [4, 3, 2, 2, 1], places[1]: [5]}

    # When those are dropped that ended by some time
    outcomes = await rig.run(lambda: drop_waiting(queue, wanted, START_MS + 10))

    # Then the others stay
    assert outcomes[nowhere] == [Outcome.GONE] * 2
    assert outcomes[places[0]] == [
        Outcome.NOT_EXPIRED,
        Outcome.REMOVED,
        Outcome.REMOVED,
        Outcome.GONE,
        Outcome.NOT_EXPIRED,
    ]
    assert outcomes[places[1]] == [Outcome.REMOVED]
    assert stored(rig).waiting.keys() == {1, 4}


# --- Done -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retention_s", "before_ms", "removable_ms"),
    [
        (60, START_MS, START_MS - 60_000 - 7),
        (60, START_MS - 90_000, START_MS - 90_000),
        (0, START_MS, 0),
        (START_MS // 1000 + 1, START_MS, 0),
    ],
)
def test_done_messages_are_kept_for_the_retention_and_a_grace(
    retention_s: int, before_ms: int, removable_ms: int
) -> None:
    queue = Rig().create()
    queue.settings = queue.settings.changed(done_retention_s=retention_s)

    assert done_before(queue, before_ms, 7, START_MS) == removable_ms


def test_of_a_done_row_goes_what_was_done_before_then() -> None:
    early, late = DoneMessage(1, 99, 1), DoneMessage(2, 100, 1)

    assert done_row(5, [late], 100, ()) is None
    assert done_row(5, [early, late], 100, ()) == DoneRow(5, 2, [late], [])


def test_the_history_of_a_done_message_goes_with_it_unless_it_was_transferred() -> None:
    acked, transferred = DoneMessage(1, 9, 3), DoneMessage(2, 9, 3, transferred_to="next")
    at_once, late = DoneMessage(3, 9, 1), DoneMessage(4, 200, 3)

    row = done_row(5, [acked, transferred, at_once, late], 100, {1, 2, 4})

    assert row == DoneRow(5, 4, [late], [1])


async def test_what_is_in_flight_again_keeps_the_history_of_what_was_done() -> None:
    rig = Rig()
    queue = rig.create()
    for message_id in (1, 2):
        queue.done.add((DoneMessage(message_id, START_MS, 2),))
        rig.shard.attempts.add(attempts_at(queue, message_id), FailedAttempt("c", 1))
    await rig.route([2])
    await rig.claim(1)
    queue.touch()
    rig.commit()

    row = DoneRow(queue.done.oldest_order, 2, [], [1, 2])
    assert prune_done(rig.shard, queue, [row]) == 2
    rig.commit()

    histories = [attempts_key("orders", message_id) in rig.store.rows for message_id in (1, 2)]
    assert histories == [False, True]


def test_a_done_list_is_pruned_up_to_the_middle_of_a_row() -> None:
    rig = Rig()
    queue = rig.create()
    rows: list[DoneRow] = []
    for ids in ((1, 2), (3, 4, 5)):
        messages = [DoneMessage(message_id, START_MS + message_id, 1) for message_id in ids]
        queue.done.add(messages)
        rig.commit()
        row = done_row(queue.orders.last - 1, messages, START_MS + 4, ())
        assert row is not None
        rows.append(row)

    assert prune_done(rig.shard, queue, rows) == 3
    assert stored(rig).done.keys() == {4, 5}
    assert queue.done.count == 2


def test_a_done_row_that_a_purge_left_behind_is_not_counted_again() -> None:
    rig = Rig()
    queue = rig.create()
    queue.done.add((DoneMessage(1, START_MS, 1),))
    rig.commit()
    former = DoneRow(queue.done.oldest_order, 1, [], [])
    rig.shard.purge(queue, {Purge.DONE})

    assert prune_done(rig.shard, queue, [former]) == 0
    assert queue.done.count == 0
    queue.done.add((DoneMessage(2, START_MS, 1),))
    rig.commit()
    later = DoneRow(queue.done.oldest_order, 1, [], [])
    assert prune_done(rig.shard, queue, [former, later]) == 1
    assert stored(rig).done == {}


# --- Failed and archived ----------------------------------------------------


def archived(
    *messages: tuple[int, int], run: str = "run 1"
) -> tuple[Rig, Queue, StoredRow[ArchivedMessage]]:
    """A queue with one row of archived messages, by ID and retention deadline; all are wanted."""
    rig = Rig()
    queue = rig.create()
    failed = [
        FailedMessage(message_id, START_MS, 5, 0, deadline_ms, "no")
        for message_id, deadline_ms in messages
    ]
    archive(queue, failed, run, START_MS + 1)
    rows = list(stored(rig).archived.values())
    wanted = [DeadLetter(message_id, START_MS, run) for message_id, _ in messages]
    return rig, queue, StoredRow(queue.archived.oldest_order, rows, wanted)


def test_dead_letters_go_that_failed_by_then() -> None:
    rig = Rig()
    queue = rig.create()
    each = [FailedMessage(n, START_MS + n, 5, 0, 0, "no") for n in (1, 2, 3)]
    queue.failed.add(each)
    rig.commit()
    wanted = [DeadLetter(n, START_MS + n) for n in (1, 2, 3, 4)]
    row = StoredRow(queue.failed.oldest_order, each, wanted)

    [outcomes], taken = take_dead_letters(rig.shard, queue, [row], failed_by_ms=START_MS + 2)

    assert outcomes == [Outcome.REMOVED, Outcome.REMOVED, Outcome.NOT_EXPIRED, Outcome.GONE]
    assert taken == each[:2]
    assert stored(rig).failed.keys() == {3}


def test_an_archived_message_may_be_redriven_until_its_retention_ends() -> None:
    _, queue, row = archived((1, 0), (2, START_MS + 9), (3, START_MS + 10), (4, START_MS + 11))

    outcomes, places = judge_archived(queue, row, START_MS + 10)

    assert outcomes == [Outcome.REMOVED, Outcome.EXPIRED, Outcome.EXPIRED, Outcome.REMOVED]
    assert places == {0: 0, 3: 3}


def test_what_is_redriven_of_archived_messages_is_pushed_and_gone() -> None:
    rig, queue, row = archived((1, 0), (2, START_MS + 9), (3, 0))
    pushes = {0: b"first", 2: b"third"}
    rig.shard.outbox.rows_max = 2
    rig.shard.outbox.push(INGEST, b"", START_MS)
    rig.commit()

    with pytest.raises(ResourceExhausted):
        redrive_archived(rig.shard, queue, row, pushes, INGEST, START_MS + 10)
    assert not rig.shard.has_changes
    rig.shard.outbox.sent(INGEST, 1, 0)
    outcomes = redrive_archived(rig.shard, queue, row, pushes, INGEST, START_MS + 10)

    assert outcomes == [Outcome.REMOVED, Outcome.EXPIRED, Outcome.REMOVED]
    assert stored(rig).archived.keys() == {2}
    assert rig.shard.outbox.counter(INGEST).waiting_bytes == len(b"first" + b"third")
    again = StoredRow(row.order, row.stored[1:2], row.wanted)
    assert redrive_archived(rig.shard, queue, again, {}, INGEST, START_MS + 10) == [
        Outcome.GONE,
        Outcome.EXPIRED,
        Outcome.GONE,
    ]


def test_archived_messages_are_dropped_whichever_run_archived_them() -> None:
    rig, queue, row = archived((1, START_MS + 9), (2, 0), run="run 7")
    rig.now_ms += 100
    wanted = [DeadLetter(1, START_MS), DeadLetter(1, START_MS), DeadLetter(2, START_MS + 1)]

    outcomes = drop_archived(rig.shard, queue, row._replace(wanted=wanted))

    assert outcomes == [Outcome.REMOVED, Outcome.GONE, Outcome.GONE]
    assert stored(rig).archived.keys() == {2}


@pytest.mark.parametrize("comes_after", [False, True])
def test_archived_messages_that_a_purge_left_behind_are_gone(comes_after: bool) -> None:
    rig, queue, row = archived((1, 0))
    rig.shard.purge(queue, {Purge.ARCHIVED})
    if comes_after:
        archive(queue, [FailedMessage(2, START_MS, 5, 0, 0, "no")], "run 2", START_MS + 2)
    rig.commit()

    assert drop_archived(rig.shard, queue, row) == [Outcome.GONE]
    assert judge_archived(queue, row, START_MS) == ([Outcome.GONE], {})
    assert stored(rig).archived.keys() == ({2} if comes_after else set())
