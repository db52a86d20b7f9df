"""The lists of what is finished: which rows they have, and which are left to the sweeper."""

from __future__ import annotations

import pytest

from libs.storage.layout.keys import queue_state_key
from libs.storage.records.queues import FailedMessage
from libs.storage.records.states import (
    OrderRange,
    PurgesRecord,
    QueueStateRecord,
    decode_queue_state,
)
from services.broker.core.lists import finished_lists
from services.broker.core.queue import Queue
from tests.unit.broker.core.shards import START_MS, Rig


def dead_letter(message_id: int) -> FailedMessage:
    return FailedMessage(message_id, START_MS, 5, 0, 0, "no")


def commit(rig: Rig, queue: Queue, *ids: int) -> int:
    """Adds dead letters, as one row; gives its order."""
    queue.failed.add(dead_letter(message_id) for message_id in ids)
    order = queue.orders.last + 1
    rig.commit()
    return order


def test_what_is_purged_while_an_earlier_purge_is_swept_is_swept_later() -> None:
    rig = Rig()
    queue = rig.create()
    rig.now_ms = 0  # so that orders go up by one
    commit(rig, queue, 1)
    queue.failed.purge()
    sweeping = queue.failed.garbage
    second = commit(rig, queue, 2)
    queue.failed.purge()
    through = queue.failed.garbage.last
    assert (sweeping.last + 1, queue.failed.garbage.first) == (second, sweeping.first)

    queue.failed.note_swept(sweeping.last)
    rig.commit()
    assert queue.failed.garbage == OrderRange(second, through)

    queue.failed.note_swept(through)
    assert queue.failed.garbage == OrderRange()


def test_what_no_commit_has_written_leaves_no_garbage() -> None:
    queue = Rig().create()
    queue.failed.add([dead_letter(1), dead_letter(2)])

    assert queue.failed.purge() == 2
    assert (queue.failed.count, queue.failed.garbage) == (0, OrderRange())
    assert not queue.failed.has_new


def test_of_what_was_added_each_is_seen_once_though_a_commit_or_a_purge_comes_between() -> None:
    rig = Rig()
    failed = rig.create().failed

    def seen() -> list[int]:
        return [one.message_id for one in failed.take_unseen()]

    failed.add([dead_letter(1)])
    assert (seen(), seen()) == ([1], [])
    failed.add([dead_letter(2)])
    assert seen() == [2]
    rig.commit()
    failed.add([dead_letter(3), dead_letter(4)])
    assert seen() == [3, 4]
    failed.purge()
    failed.add([dead_letter(5), dead_letter(6)])
    assert seen() == [5, 6]


def test_each_change_of_a_list_is_written_by_the_next_commit() -> None:
    rig = Rig()
    queue = rig.create()
    rig.commit()

    def committed() -> QueueStateRecord:
        rig.commit()
        return decode_queue_state(rig.store.rows[queue_state_key("orders")])

    queue.failed.add([dead_letter(1), dead_letter(2)])
    added = committed()
    order = added.oldest_failed_order
    assert (added.failed_count, order) == (2, queue.failed.oldest_order)
    rig.shard.write_rows([queue.failed.rewrite(order, [dead_letter(2)], 1)])
    assert committed().failed_count == 1
    queue.failed.purge()
    purged = committed()
    assert (purged.failed_count, purged.purges) == (
        0,
        PurgesRecord(queue.epoch, garbage_failed=queue.failed.garbage),
    )
    queue.failed.note_swept(queue.failed.garbage.last)
    assert committed().purges is None


def test_a_list_counts_what_is_stored_apart_from_what_the_next_commit_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finished_lists, "LIST_ROW_MAX", 2)
    rig = Rig()
    failed = rig.create().failed
    failed.add(map(dead_letter, (1, 2, 3)))
    assert (failed.count, failed.stored_count, failed.has_new) == (3, 0, True)

    rig.commit()
    failed.add([dead_letter(4)])

    assert (failed.count, failed.stored_count) == (4, 3)
    first = failed.oldest_order
    failed.rewrite(first, [], 2)
    assert (failed.count, failed.stored_count, failed.oldest_order) == (2, 1, first + 1)
    failed.rewrite(first + 1, [], 1)
    assert (failed.count, failed.stored_count, failed.oldest_order) == (1, 0, 0)
