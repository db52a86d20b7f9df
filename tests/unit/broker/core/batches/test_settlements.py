"""Decisions about single dead letters: all of them take effect, or none."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from libs.storage.layout.keys import RecordType, parse_failed_key
from libs.storage.records.queues import AvailableMessage, FailedAttempt, FailedMessage
from services.broker.core.batches.settle import Action, Settlement, Settlements, settle, was_done
from services.broker.core.changes import ShardEvents
from services.broker.core.commands import Purge
from services.broker.core.lists import executed
from services.broker.core.lists.attempts import attempts_at
from services.broker.core.queue import Queue
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from tests.unit.broker.core.shards import START_MS, Rig
from tests.unit.broker.core.stored import StoredQueue, stored_attempts, stored_queue
from tests.unit.storage.oracles import record_type_of

DEADLINE_MS = START_MS + 60_000
CONTENT = b"f" * 16


async def failed(*ids: int) -> tuple[Rig, int, list[FailedMessage]]:
    """A queue with these dead letters, and the row that has them."""
    rig = Rig()
    rig.create()
    await rig.route(ids, deadline_ms=DEADLINE_MS)
    rig.shard.leases.fail(await rig.claim(len(ids)), "boom", rig.now_ms)
    rig.commit()
    return rig, rig.queue().failed.oldest_order, list(stored(rig).failed.values())


def stored(rig: Rig) -> StoredQueue:
    found = stored_queue(rig.store.rows, "orders")
    assert found is not None
    return found


def decided(row: list[FailedMessage], *each: Settlement, request_id: str = "") -> Settlements:
    pushes = {n: b"new" for n, one in enumerate(each) if one.action is Action.IS_REPLACED}
    return Settlements(each, {one.order: row for one in each}, pushes, 0, "me", request_id, CONTENT)


async def test_each_dead_letter_goes_where_it_was_decided_and_the_others_stay() -> None:
    rig, order, row = await failed(1, 2, 3, 4, 5)
    each = [
        Settlement(1, order, Action.COMES_BACK),
        Settlement(2, order, Action.IS_DROPPED),
        Settlement(3, order, Action.IS_REPLACED),
        Settlement(4, order, Action.STAYS, note="look at it"),
    ]
    await rig.run(lambda: settle(rig.shard, rig.queue(), decided(row, *each), rig.now_ms))
    rig.commit()
    await rig.restart()

    now = stored(rig)
    assert now.waiting == {1: AvailableMessage(1, 0, 0, DEADLINE_MS, 0)}
    assert {one.message_id: one.transferred_to for one in now.done.values()} == {2: "", 3: "orders"}
    assert set(now.failed) == {4, 5}
    assert rig.queue().failed.count == 2
    assert rig.shard.outbox.waiting_count(0) == 1


async def test_a_message_that_failed_twice_is_settled_once_for_each_time() -> None:
    rig, order, row = await failed(7)
    twice = [*row, *row]
    rig.shard.write_rows([rig.queue().failed.rewrite(order, twice, -1)])
    drop = Settlement(7, order, Action.IS_DROPPED)

    settle(rig.shard, rig.queue(), decided(twice, drop, drop), rig.now_ms)
    assert rig.queue().failed.count == 0
    assert rig.queue().done.count == 2
    with pytest.raises(NotFound):
        settle(rig.shard, rig.queue(), decided(twice, drop), rig.now_ms)


@pytest.mark.parametrize("action", list(Action))
async def test_what_is_no_dead_letter_any_more_changes_nothing(action: Action) -> None:
    rig, order, row = await failed(1, 2)
    each = [Settlement(1, order, Action.IS_DROPPED), Settlement(3, order, action)]
    with pytest.raises(NotFound) as unknown:
        settle(rig.shard, rig.queue(), decided(row, *each), rig.now_ms)
    assert unknown.value.metadata["settlement"] == "1"
    assert rig.queue().failed.count == 2

    rig.shard.purge(rig.queue(), {Purge.FAILED})
    with pytest.raises(NotFound):
        settle(rig.shard, rig.queue(), decided(row, each[0]), rig.now_ms)
    assert rig.queue().done.count == 0


@pytest.mark.parametrize("action", [Action.COMES_BACK, Action.IS_REPLACED])
async def test_what_no_consumer_would_get_does_not_come_back_and_may_be_dropped(
    action: Action,
) -> None:
    rig, order, row = await failed(1)

    with pytest.raises(FailedPrecondition):
        settle(rig.shard, rig.queue(), decided(row, Settlement(1, order, action)), DEADLINE_MS)
    assert rig.queue().failed.count == 1

    drop = Settlement(1, order, Action.IS_DROPPED)
    settle(rig.shard, rig.queue(), decided(row, drop), DEADLINE_MS)
    assert rig.queue().failed.count == 0


@pytest.mark.parametrize(
    ("action", "full"), [(Action.IS_REPLACED, "outbox"), (Action.IS_DROPPED, "request IDs")]
)
async def test_what_there_is_no_room_for_changes_nothing(
    action: Action, full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, order, row = await failed(1)
    if full == "outbox":
        rig.shard.outbox.rows_max = 1
        rig.shard.outbox.push(0, b"other", rig.now_ms)
    else:
        monkeypatch.setattr(executed, "REQUEST_IDS_MAX", 1)
        rig.shard.executed.add("other", CONTENT)
    rig.commit()
    wanted = decided(row, Settlement(1, order, action), request_id="r")

    with pytest.raises(ResourceExhausted):
        settle(rig.shard, rig.queue(), wanted, rig.now_ms)
    assert not rig.shard.has_changes
    assert rig.queue().failed.count == 1

    # What needs none of it has room
    drop = decided(row, Settlement(1, order, Action.IS_DROPPED))
    settle(rig.shard, rig.queue(), drop, rig.now_ms)
    assert rig.queue().failed.count == 0


async def test_a_note_is_the_newest_of_the_messages_history() -> None:
    rig, order, row = await failed(1)
    key = attempts_at(rig.queue(), 1)
    rig.shard.attempts.add(key, FailedAttempt("worker", START_MS, "boom"))
    rig.commit()
    await rig.restart()
    rig.now_ms += 5
    noted = decided(row, Settlement(1, order, Action.STAYS, note="look at it"))

    await rig.run(lambda: settle(rig.shard, rig.queue(), noted, rig.now_ms))
    rig.commit()

    assert stored_attempts(rig.store.rows, "orders", 1) == (
        FailedAttempt("worker", START_MS, "boom"),
        FailedAttempt("me", START_MS + 5, "note: look at it"),
    )


async def test_what_consumers_get_again_is_reported_as_redriven_with_its_request() -> None:
    class Redriven(ShardEvents):
        def __init__(self) -> None:
            self.calls: list[tuple[str, str, list[int], int, str]] = []

        def redriven(
            self,
            queue: Queue,
            target_id: str,
            message_ids: Iterable[int],
            now_ms: int,
            request_id: str = "",
        ) -> None:
            self.calls.append((queue.queue_id, target_id, list(message_ids), now_ms, request_id))

    rig, order, row = await failed(1, 2, 3, 4)
    rig.shard.events = events = Redriven()
    each = [Settlement(n, order, action) for n, action in enumerate(Action, 1)]

    settle(rig.shard, rig.queue(), decided(row, *each, request_id="r"), rig.now_ms)

    back = [one.message_id for one in each if one.action in (Action.COMES_BACK, Action.IS_REPLACED)]
    assert events.calls == [("orders", "orders", back, rig.now_ms, "r")]


async def test_a_repeat_is_known_also_after_a_restart_and_other_content_is_refused() -> None:
    rig, order, row = await failed(1)
    drop = Settlement(1, order, Action.IS_DROPPED)
    assert not was_done(rig.shard, "r", CONTENT)
    settle(rig.shard, rig.queue(), decided(row, drop, request_id="r"), rig.now_ms)
    rig.commit()
    await rig.restart()

    assert was_done(rig.shard, "r", CONTENT)
    assert not was_done(rig.shard, "", CONTENT)
    with pytest.raises(InvalidArgument):
        was_done(rig.shard, "r", b"other")


async def test_the_dead_letters_on_both_sides_of_an_emptied_row_stay() -> None:
    rig = Rig()
    rig.create()
    rows: dict[int, list[FailedMessage]] = {}
    for message_id in (1, 2, 3):
        await rig.route([message_id])
        rig.shard.leases.fail(await rig.claim(1), "boom", rig.now_ms)
        rig.commit()
        rows[message_id] = [stored(rig).failed[message_id]]
    orders = dict(zip(rows, failed_orders(rig), strict=True))

    for left, message_id in ((2, 2), (1, 1), (0, 3)):
        drop = Settlement(message_id, orders[message_id], Action.IS_DROPPED)
        settle(rig.shard, rig.queue(), decided(rows[message_id], drop), rig.now_ms)
        rig.commit()
        await rig.restart()
        assert len(stored(rig).failed) == rig.queue().failed.count == left
    assert set(stored(rig).done) == {1, 2, 3}


def failed_orders(rig: Rig) -> list[int]:
    keys = sorted(key for key in rig.store.rows if record_type_of(key) is RecordType.FAILED)
    return [order for order in (parse_failed_key(key).bucket for key in keys) if order]
