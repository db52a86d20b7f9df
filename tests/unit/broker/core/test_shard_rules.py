"""The odd rules of a shard, each with the story that needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from libs.storage.layout.keys import (
    active_key,
    attempts_key,
    config_key,
    done_key,
    failed_key,
    queue_state_key,
)
from libs.storage.layout.own_keys import (
    CONFIG_REVISION_KEY,
)
from libs.storage.records.move_records import MoveRecord, MoveStage
from libs.storage.records.queues import FailedAttempt
from libs.storage.records.redrive_records import RedriveRecord, RedriveState
from libs.storage.records.replay_records import ReplayRange
from services.broker.core import lifecycle as queue_lifecycle
from services.broker.core.changes import ShardEvents
from services.broker.core.config_log import ConfigChange, ConfigLog
from services.broker.core.lifecycle import new_state
from services.broker.core.queue import Queue
from services.broker.core.settings import QueueSettings
from services.broker.core.shard import Assignment, Finish, Nack, Range, Shard
from services.broker.core.waiting import available
from slatemq.errors import Unavailable
from tests.unit.broker.core.applied import assign_all
from tests.unit.broker.core.shards import START_MS, Rig
from tests.unit.broker.core.stored import stored_attempts, stored_queue

REDRIVE = RedriveRecord(1, RedriveState.RUNNING, 0, 0, 0, 9, 0, 0, 4, 0, 9, "orders", "orders")


# --- Queues -----------------------------------------------------------------


def test_a_new_queue_is_its_config_three_empty_records_the_revision_and_its_state() -> None:
    rig = Rig()

    rig.create("orders")
    rows = dict(rig.shard.drain(rig.now_ms))

    assert rows.keys() == {
        config_key("orders"),
        active_key("orders", 0),
        done_key("orders", 0),
        failed_key("orders", 0),
        CONFIG_REVISION_KEY,
        queue_state_key("orders"),
    }
    assert rows[CONFIG_REVISION_KEY] == (1).to_bytes(8, "little")
    assert rows[active_key("orders", 0)] == bytes(12)
    assert rows[done_key("orders", 0)] == bytes(8)
    assert rows[failed_key("orders", 0)] == bytes(8)


def test_a_queue_that_nothing_happens_to_is_not_written() -> None:
    rig = Rig()
    rig.create("orders")
    rig.create("idle")
    rig.commit()

    assert rig.shard.drain(rig.now_ms) == []
    assign_all(rig.shard, [Range(0, 0, 1, [Assignment("orders", [1])])], rig.now_ms)
    written = [key for key, _ in rig.shard.drain(rig.now_ms)]

    assert written
    assert not any(b"idle" in key for key in written)


@pytest.mark.parametrize(
    "change",
    [
        lambda shard: shard.outbox.push(1, b"push", START_MS),
        lambda shard: shard.executed.add("request", bytes(16)),
        lambda shard: shard.replays.begin("orders", (ReplayRange(0, 0, 0, 9),)),
        lambda shard: shard.redrives.put(1, REDRIVE),
        lambda shard: shard.moves.expect("orders", MoveRecord(MoveStage.COPYING, 7, shard=1)),
        lambda shard: shard.write_rows([(config_key("orders"), None)]),
        lambda shard: shard.begin(Range(0, 0, 1, [])),
    ],
    ids=["push", "request ID", "replay", "redrive", "move", "row", "cursor"],
)
def test_each_kind_of_change_alone_is_committed(change: Callable[[Shard], object]) -> None:
    rig = Rig()

    change(rig.shard)

    assert rig.shard.has_changes
    assert rig.commit() > 0
    unchanged = not rig.shard.has_changes
    assert unchanged


def test_queues_are_written_early_also_beside_one_that_was_deleted_meanwhile() -> None:
    rig = Rig()
    gone, orders = rig.create("gone"), rig.create("orders")
    rig.shard.delete_queue(gone)

    rig.shard.drain_early([gone, orders], rig.now_ms)

    assert not rig.shard.notes.to_commit
    rig.commit()
    assert stored_queue(rig.store.rows, "orders") is not None
    assert stored_queue(rig.store.rows, "gone") is None


async def test_dead_letters_are_reported_before_they_are_written() -> None:
    class Unseen(ShardEvents):
        def __init__(self) -> None:
            self.ids: list[int] = []

        def collect(self, queues: Iterable[Queue]) -> None:
            for queue in queues:
                self.ids += [one.message_id for one in queue.failed.take_unseen()]

    rig = Rig()
    rig.shard.events = events = Unseen()
    rig.create()
    await rig.route([1, 2])
    for lease in await rig.claim(2):
        rig.shard.leases.fail([lease], "no", rig.now_ms)
        rig.commit()

    assert events.ids == [1, 2]


def test_a_shard_that_is_being_removed_gives_the_reason_that_an_ingest_gives() -> None:
    rig = Rig()
    rig.shard.check_stays()
    assert not rig.shard.is_draining
    rig.shard.is_leaving = True

    with pytest.raises(Unavailable) as refused:
        rig.shard.check_stays()

    assert refused.value.reason == "SHARD_LEAVING"


async def test_a_queue_made_again_knows_nothing_of_the_former_one() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    (lease, _) = await rig.claim(2)
    rig.commit()

    rig.shard.delete_queue(rig.queue())
    rig.create()
    rig.commit()
    await rig.restart()

    assert await rig.ids(10) == []
    assert rig.shard.leases.ack([lease.token], rig.now_ms) == [Finish.UNKNOWN]
    await rig.route([4])
    assert await rig.ids(10) == [4]


async def test_a_queue_made_again_counts_failed_attempts_from_the_first() -> None:
    rig = Rig()
    for _ in range(2):
        rig.create()
        await rig.route([1])
        (lease,) = await rig.claim(1)
        await rig.nack(Nack(lease.token, "no"))
        rig.commit()
        result = stored_attempts(rig.store.rows, "orders", 1)
        rig.shard.delete_queue(rig.queue())
        # No queue of this name is made before the sweeper is through with them.
        rig.shard.write_rows([(attempts_key("orders", 1), None)])
        rig.commit()

    assert result == (FailedAttempt("worker", START_MS, "nack: no"),)


async def test_leases_of_a_deleted_queue_do_not_end_any_more() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1])
    await rig.claim(1, lease_ms=1000)

    rig.shard.delete_queue(rig.queue())

    assert rig.shard.leases.deadlines.ended(rig.now_ms + 5000, 100) == []
    assert rig.shard.leases.deadlines.next_ms() is None


def test_a_name_can_be_used_again_only_while_one_of_its_32_epochs_is_clean() -> None:
    rig = Rig()
    for _ in range(32):
        assert rig.shard.epoch_is_free("orders")
        rig.shard.delete_queue(rig.create())

    assert not rig.shard.epoch_is_free("orders")
    rig.shard.swept("orders", 0)

    assert rig.shard.epoch_is_free("orders")
    assert rig.create().epoch == 0


async def test_what_is_swept_of_former_queues_is_garbage_of_the_present_one_no_more() -> None:
    rig = Rig()
    for _ in range(3):
        rig.shard.delete_queue(rig.create())
    queue = rig.create()
    rig.commit()
    assert set(queue.garbage_epochs) == {0, 1, 2}

    rig.shard.swept("orders", 1)

    assert set(queue.garbage_epochs) == {0, 2}
    rig.commit()
    await rig.restart()
    assert set(rig.queue().garbage_epochs) == {0, 2}

    # Nor of one that is deleted
    rig.shard.delete_queue(rig.queue())
    rig.commit()
    rig.shard.swept("orders", 0)
    rig.commit()
    await rig.restart()
    assert set(rig.shard.deleted["orders"].garbage_epochs) == {2, 3}


# --- Routing ----------------------------------------------------------------


async def test_an_assign_with_a_hole_changes_nothing() -> None:
    rig = Rig()
    rig.create()
    assign_all(rig.shard, [Range(7, 0, 5, [Assignment("orders", [1])])], rig.now_ms)
    rig.commit()

    applied = assign_all(rig.shard, [Range(7, 6, 9, [Assignment("orders", [2])])], rig.now_ms)

    assert applied == [False]
    assert rig.shard.cursors == {7: 5}
    assert rig.commit() == 0
    assert await rig.ids(10) == [1]


async def test_a_range_without_entries_changes_nothing() -> None:
    rig = Rig()
    rig.create()
    assign_all(rig.shard, [Range(7, 0, 5, [])], rig.now_ms)
    rig.commit()

    for last in (4, 5):
        piece = Range(7, 5, last, [Assignment("orders", [1])])
        assert assign_all(rig.shard, [piece], rig.now_ms) == [False]

    assert not rig.shard.has_changes
    assert await rig.ids(10) == []


async def test_of_two_routers_the_second_changes_nothing() -> None:
    rig = Rig()
    rig.create()
    judged = Range(7, 0, 5, [Assignment("orders", [1, 2])])

    assert assign_all(rig.shard, [judged], rig.now_ms) == [True]
    assert assign_all(rig.shard, [judged], rig.now_ms) == [False]
    assert assign_all(rig.shard, [judged, judged], rig.now_ms) == [False, False]

    assert await rig.ids(10) == [1, 2]


async def test_the_same_range_twice_in_one_call_counts_once_and_the_next_one_follows() -> None:
    rig = Rig()
    rig.create()
    first = Range(7, 0, 5, [Assignment("orders", [1])])
    second = Range(7, 5, 6, [Assignment("orders", [2])])

    assert assign_all(rig.shard, [first, first, second], rig.now_ms) == [True, False, True]

    assert rig.shard.cursors == {7: 6}
    assert await rig.ids(10) == [1, 2]


async def test_a_range_without_a_match_moves_the_cursor_permanently() -> None:
    rig = Rig()
    assign_all(rig.shard, [Range(7, 0, 5, [])], rig.now_ms)
    rig.commit()

    await rig.restart()

    assert rig.shard.cursors == {7: 5}


# --- Order and time ---------------------------------------------------------


async def test_what_falls_due_stands_in_line_with_what_is_routed() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1])
    await rig.route([2], visible_at_ms=START_MS + 10)
    rig.now_ms += 20
    await rig.route([3])

    assert await rig.ids(10) == [1, 2, 3]


async def test_a_message_is_not_seen_a_millisecond_early() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1], visible_at_ms=START_MS + 10)

    rig.now_ms = START_MS + 9
    assert rig.queue().waiting.next_due_ms() == START_MS + 10
    assert await rig.ids(1) == []
    rig.now_ms = START_MS + 10
    assert await rig.ids(1) == [1]


async def test_a_million_messages_may_be_due_in_the_same_millisecond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(available, "TIMED_BUCKET_MAX", 3)
    rig = Rig()
    rig.create()

    for first in range(1, 100, 10):
        await rig.route(list(range(first, first + 10)), visible_at_ms=START_MS + 10)
        rig.commit()

    stored = stored_queue(rig.store.rows, "orders")
    assert stored is not None
    assert stored.waiting.keys() == set(range(1, 101))
    rig.now_ms += 10
    assert await rig.ids(1000) == list(range(1, 101))


async def test_a_message_due_after_the_year_2248_is_kept() -> None:
    rig = Rig()
    rig.create()

    await rig.route([1], visible_at_ms=1 << 62)
    rig.commit()

    assert await rig.ids(1) == []
    assert rig.queue().waiting.timed_count == 1


async def test_a_message_past_its_retention_is_gone_without_an_attempt() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3], deadline_ms=START_MS + 10)
    (lease,) = await rig.claim(1, lease_ms=1000)
    rig.now_ms += 10

    assert await rig.ids(10) == []
    assert await rig.nack(Nack(lease.token)) == [Finish.OK]
    rig.commit()

    stored = stored_queue(rig.store.rows, "orders")
    assert stored is not None
    assert (stored.waiting, stored.failed, stored.done) == ({}, {}, {})
    assert rig.queue().waiting.expired_count == 3


async def test_an_ingest_that_is_down_holds_up_its_own_messages_only() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2], priority=0)
    await rig.route([3, 4], priority=9)
    rig.commit()
    await rig.restart()

    given = await rig.claim(10, skip=[1, 2])

    assert [lease.message_id for lease in given] == [3, 4]
    assert [lease.attempts for lease in await rig.claim(10)] == [1, 1]


async def test_a_bucket_that_is_stored_is_not_written_again_for_what_comes_next() -> None:
    rig = Rig()
    rig.create()
    await rig.route(range(1, 501))
    first_bytes = rig.commit()

    await rig.route([501])

    assert rig.commit() < first_bytes / 10
    assert await rig.all_ids(501) == list(range(1, 502))


async def test_queues_deleted_long_ago_are_forgotten_in_memory_and_on_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue_lifecycle, "DELETED_KEPT", 3)
    rig = Rig()
    names = [f"q{number}" for number in range(10)]
    for name in names:
        rig.create(name)
        await rig.route([1], queue_id=name)
        rig.commit()
        rig.shard.delete_queue(rig.queue(name))
        rig.commit()
        if name != "q2":  # the cleaning of one lags
            rig.shard.swept(name, 0)
            rig.commit()

    remembered = ["q2", "q7", "q8", "q9"]
    assert list(rig.shard.deleted) == remembered
    assert rig.shard.forgotten_revision == 14  # the deletion of q6
    await rig.restart()
    assert list(rig.shard.deleted) == remembered
    assert rig.shard.forgotten_revision == 14

    # The cleaning that lagged is done: an older deletion takes back nothing
    rig.shard.swept("q2", 0)
    rig.commit()
    await rig.restart()
    assert list(rig.shard.deleted) == remembered[1:]
    assert rig.shard.forgotten_revision == 14

    # One made again under a name that was forgotten is as new
    rig.create("q0")
    await rig.route([2], queue_id="q0")
    rig.commit()
    assert [one.message_id for one in await rig.claim(5, queue_id="q0")] == [2]


def made_again(rig: Rig) -> None:
    rig.create()


def came_again(rig: Rig) -> None:
    state = new_state(rig.shard.deleted["orders"], 1)
    rig.shard.admit_moved("orders", QueueSettings("true"), state, (), rig.now_ms)


@pytest.mark.parametrize("again", [made_again, came_again])
async def test_a_queue_that_is_here_again_is_not_forgotten_with_those_deleted_long_ago(
    again: Callable[[Rig], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_lifecycle, "DELETED_KEPT", 1)
    rig = Rig()
    rig.shard.delete_queue(rig.create())
    rig.shard.swept("orders", 0)
    rig.commit()

    again(rig)
    rig.commit()
    for name in ("first", "second"):
        rig.shard.delete_queue(rig.create(name))
        rig.shard.swept(name, 0)
    rig.commit()

    assert list(rig.shard.deleted) == ["second"]
    assert stored_queue(rig.store.rows, "orders") is not None
    await rig.restart()
    assert list(rig.shard.queues) == ["orders"]
    await rig.route([1])
    rig.commit()
    assert rig.queue().waiting.ready_count == 1


def test_a_log_of_configs_forgets_deletions_and_says_up_to_where() -> None:
    settings = QueueSettings("true")
    log = ConfigLog(deleted_kept=2)
    for revision in range(1, 11, 2):
        log.add([ConfigChange(f"q{revision}", revision, settings, revision)])
        log.add([ConfigChange(f"q{revision}", revision + 1, None, revision + 1)])

    assert [change.revision for change in log.after(0)] == [8, 10]
    assert log.forgotten_revision == 6
    again = ConfigLog(log.after(0), forgotten_revision=6, deleted_kept=2)
    assert again.forgotten_revision == 6
    again.add([ConfigChange("q11", 11, None, 11)])
    assert again.forgotten_revision == 8


def test_a_deletion_that_is_stored_for_longer_than_newer_ones_forgets_no_less() -> None:
    log = ConfigLog([ConfigChange("swept late", 2, None, 2)], forgotten_revision=6, deleted_kept=1)
    log.add([ConfigChange("q", 7, None, 7)])
    assert log.forgotten_revision == 6
