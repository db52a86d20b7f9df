"""Single messages that wait, and all of them at once: each rule with the story that needs it."""

from __future__ import annotations

import pytest

from libs.storage.buckets import BucketKind, split_order
from services.broker import available, lane_memory, loading
from services.broker.commands import Purge
from services.broker.queue_machine import NeedsLane
from services.broker.shard_machine import Finish, Nack
from services.broker.waiting_buckets import Place
from services.broker.waiting_pages import WaitingReader
from tests.unit.broker.shards import START_MS, Rig
from tests.unit.broker.stored import garbage_lists, garbage_rows, stored_queue

READY, TIMED = BucketKind.READY, BucketKind.TIMED


async def place_of(rig: Rig, message_id: int) -> Place:
    place = await WaitingReader(rig.store).locate(rig.queue(), message_id, [0])
    assert place is not None
    return place


async def cancel(rig: Rig, place: Place, message_id: int) -> bool:
    return await rig.run(lambda: rig.queue().cancel(place, message_id)) is not None


async def look(rig: Rig) -> None:
    while rig.queue().has_due(rig.now_ms):
        await rig.run(lambda: rig.queue().drop_expired(rig.now_ms, 1000))


async def claimed(rig: Rig, count: int) -> list[int]:
    """IDs of the next messages; one claim gives what is in memory, rather than wait for more."""
    ids: list[int] = []
    while len(ids) < count and (more := await rig.ids(count - len(ids))):
        ids += more
    return ids


def stored_ids(rig: Rig) -> set[int]:
    stored = stored_queue(rig.store.rows, "orders")
    assert stored is not None
    return set(stored.waiting)


# --- Purges -----------------------------------------------------------------


async def test_a_purge_leaves_what_is_in_flight_done_and_failed() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3, 4])
    await rig.route([5], visible_at_ms=START_MS + 500)
    acked, failed, held = await rig.claim(3)
    rig.shard.ack([acked.token], rig.now_ms)
    rig.shard.fail([failed], "gone", rig.now_ms)
    rig.commit()

    assert rig.shard.purge(rig.queue(), {Purge.AVAILABLE}) == 2
    rig.commit()
    await rig.restart()

    rig.now_ms += 1000
    assert await rig.ids(10) == []
    queue = rig.queue()
    assert (queue.done_count, queue.failed_count, queue.in_flight_count) == (1, 1, 1)
    assert rig.shard.ack([held.token], rig.now_ms) == [Finish.OK]


async def test_what_comes_after_a_purge_stays_also_when_the_old_rows_are_swept() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2])
    rig.commit()
    rig.shard.purge(rig.queue(), {Purge.AVAILABLE})
    await rig.route([3])
    await rig.route([4], visible_at_ms=START_MS + 10)
    rig.commit()
    await rig.restart()

    queue = rig.queue()
    (epoch,) = queue.garbage_lane_epochs
    rig.shard.delete_rows(garbage_rows(rig.store.rows, "orders", epoch, lanes_only=True))
    queue.lanes_swept(epoch)
    rig.commit()
    await rig.restart()

    rig.now_ms += 10
    assert await claimed(rig, 10) == [3, 4]
    assert rig.queue().garbage_lane_epochs == ()


async def test_a_lease_from_before_a_purge_gives_its_message_back_behind_it() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    released, nacked = await rig.claim(2)
    rig.shard.purge(rig.queue(), {Purge.AVAILABLE})
    await rig.route([4])

    rig.shard.release([released])
    await rig.run(lambda: rig.shard.nack([Nack(nacked.token)], rig.now_ms))
    rig.commit()
    await rig.restart()

    assert await rig.ids(10) == [4, 1, 2]


async def test_purged_leases_have_ended_and_their_messages_are_gone() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    leases = await rig.claim(2)
    rig.commit()

    assert rig.shard.purge(rig.queue(), {Purge.IN_FLIGHT}) == 2
    rig.commit()
    await rig.restart()

    tokens = [lease.token for lease in leases]
    assert rig.shard.ack(tokens, rig.now_ms) == [Finish.ENDED, Finish.ENDED]
    assert rig.shard.expire(rig.now_ms + 60_000, 10) == []
    assert await rig.ids(10) == [3]


async def test_a_purged_list_of_dead_letters_begins_anew_behind_its_garbage() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    first, second, third = await rig.claim(3)
    rig.shard.fail([first], "a", rig.now_ms)
    rig.commit()
    rig.shard.fail([second], "b", rig.now_ms)  # not written yet

    assert rig.shard.purge(rig.queue(), {Purge.FAILED}) == 2
    rig.shard.fail([third], "c", rig.now_ms)
    rig.commit()
    await rig.restart()

    stored = stored_queue(rig.store.rows, "orders")
    assert stored is not None
    assert stored.failed.keys() == {3}
    ((_, garbage),) = garbage_lists(rig.store.rows, rig.queue())
    assert len(garbage) == 1


async def test_a_queue_can_be_purged_only_while_an_epoch_is_free() -> None:
    rig = Rig()
    rig.create()
    queue = rig.queue()
    for _ in range(31):
        assert queue.can_purge_available
        rig.shard.purge(queue, {Purge.AVAILABLE})

    assert not queue.can_purge_available
    # One name may hold no more, also when the queue is deleted and made anew.
    rig.shard.delete_queue(queue)
    assert not rig.shard.epoch_is_free("orders")
    state = rig.shard.deleted["orders"]
    assert sorted(state.garbage_epochs) == list(range(32))
    rig.shard.swept("orders", state.epoch)
    rig.create()
    assert not rig.queue().can_purge_available


async def test_a_purge_after_a_restart_is_never_undone_by_a_read_that_began_before() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    rig.commit()
    await rig.restart()
    lane = rig.queue().available.lanes()[0]
    with pytest.raises(NeedsLane) as needs:
        rig.queue().peek(1, lambda _: True, rig.now_ms)

    rig.shard.purge(rig.queue(), {Purge.AVAILABLE})
    await rig.loader.answer(needs.value)

    assert lane not in rig.queue().available.lanes()
    assert await rig.ids(10) == []


# --- One of them ------------------------------------------------------------


@pytest.mark.parametrize("visible_at_ms", [0, START_MS + 500])
async def test_a_message_is_cancelled_where_memory_does_not_hold_it(visible_at_ms: int) -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3], visible_at_ms=visible_at_ms)
    rig.commit()
    await rig.restart()
    place = await place_of(rig, 2)

    assert await cancel(rig, place, 2)
    assert not await cancel(rig, place, 2)
    rig.commit()
    await rig.restart()

    rig.now_ms += 1000
    assert await rig.ids(10) == [1, 3]


async def test_a_bucket_that_was_emptied_does_not_come_back_with_a_read_that_began_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(available, "READY_BUCKET_MAX", 1)
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    rig.commit()
    await rig.restart()
    place = await place_of(rig, 2)
    assert await cancel(rig, place, 2)
    rows = dict(rig.store.rows)
    rig.store.write(rig.shard.drain(rig.now_ms), rig.now_ms, late=True)

    assert rig.store.rows != rows, "the bucket is being deleted"
    assert await rig.ids(10) == [1, 3]


async def cold_lane(due_ms: int) -> Rig:
    """A delayed message, 1, and another before it, so that memory does not hold its bucket."""
    rig = Rig()
    rig.create()
    await rig.route([9], visible_at_ms=START_MS + 10)
    await rig.route([1], visible_at_ms=due_ms)
    rig.commit()
    await rig.restart()
    return rig


async def test_a_bucket_that_was_emptied_and_filled_and_emptied_is_not_left_behind() -> None:
    due_ms = START_MS + 500
    rig = await cold_lane(due_ms)
    place = await place_of(rig, 1)
    assert await cancel(rig, place, 1)
    await rig.route([2], visible_at_ms=due_ms)
    assert await place_of(rig, 2) == place
    assert await cancel(rig, place, 2)
    rig.commit()
    await rig.restart()

    assert stored_ids(rig) == {9}
    rig.now_ms = due_ms
    assert await claimed(rig, 10) == [9]


async def test_a_bucket_remembered_for_those_who_join_it_is_the_one_that_is_changed() -> None:
    due_ms = START_MS + 500
    rig = await cold_lane(due_ms)
    await rig.route([2], visible_at_ms=due_ms)
    rig.commit()
    assert await cancel(rig, await place_of(rig, 1), 1)
    rig.commit()
    await rig.route([3], visible_at_ms=due_ms)
    rig.commit()

    assert stored_ids(rig) == {2, 3, 9}


async def test_a_bucket_that_is_being_deleted_is_not_joined() -> None:
    due_ms = START_MS + 500
    rig = await cold_lane(due_ms)
    assert await cancel(rig, await place_of(rig, 1), 1)
    await rig.route([2], visible_at_ms=due_ms)
    rig.commit()

    assert stored_ids(rig) == {2, 9}


async def test_a_taken_part_of_a_cold_head_is_not_found() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    rig.commit()
    await rig.claim(1)
    rig.commit()
    await rig.restart()
    order = rig.queue().available.lanes()[0].first_unknown
    place = Place(0, READY, order)

    assert not await cancel(rig, place, 1)
    assert await cancel(rig, place, 2)
    rig.commit()
    await rig.restart()

    assert await rig.ids(10) == [3]


async def test_buckets_that_were_looked_at_for_nothing_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_memory, "GUESTS_MAX", 3)
    rig = Rig()
    rig.create()
    for number in range(1, 21):
        await rig.route([number], visible_at_ms=START_MS + 100 * number)
    rig.commit()
    await rig.restart()
    (lane,) = rig.queue().available.lanes()

    for number in range(1, 21):
        place = Place(0, TIMED, lane.first_unknown + (number - 1) * 100 * 64)
        assert not await cancel(rig, place, 77)

    assert len(lane.in_memory()) <= 3
    rig.now_ms += 2000
    assert await rig.ids(100) == list(range(1, 21))


async def test_a_rescheduled_message_moves_to_its_new_time_and_to_now() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    queue = rig.queue()
    place = await place_of(rig, 1)

    later = await rig.run(lambda: queue.reschedule(place, 1, START_MS + 500, rig.now_ms))
    assert later is not None
    assert (later.kind, split_order(later.order).ms) == (TIMED, START_MS + 500)
    assert await rig.ids(10) == [2, 3]
    now = await rig.run(lambda: queue.reschedule(later, 1, START_MS, rig.now_ms))
    assert now is not None
    assert now.kind is READY
    assert await rig.ids(10) == [1]


# --- Counts and retention ---------------------------------------------------


async def test_counts_tell_what_fell_due_without_a_claim_also_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_memory, "CACHED_MAX", 20)
    monkeypatch.setattr(loading, "LOAD_MESSAGES", 10)
    rig = Rig()
    rig.create()
    for number in range(1, 101):
        await rig.route([number], visible_at_ms=START_MS + 10 * number, priority=number % 2)
        rig.commit()
    await rig.route([101, 102], priority=1)
    rig.commit()
    await rig.restart()
    rig.now_ms = START_MS + 800

    await look(rig)
    counts = rig.queue().counts(rig.now_ms)

    assert (counts.available, counts.delayed) == (82, 20)
    assert counts.by_priority == ((0, 40, 10), (1, 42, 10))
    assert counts.oldest_claimable_ms is not None
    assert 790 <= counts.oldest_claimable_ms <= 800
    reads = rig.store.rows_read
    await look(rig)
    assert rig.store.rows_read == reads, "what was counted is not read again"
    assert len(await claimed(rig, 40)) == 40, "of the most urgent ones"
    assert rig.queue().counts(rig.now_ms).by_priority == ((0, 0, 10), (1, 42, 10))


async def test_a_message_that_ends_before_its_delay_leaves_at_its_end_without_a_claim() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1], visible_at_ms=START_MS + 1000, deadline_ms=START_MS + 100)
    await rig.route([2], visible_at_ms=START_MS + 50)
    await rig.route([3], visible_at_ms=START_MS + 2000, deadline_ms=START_MS + 3000)
    rig.commit()
    await rig.restart()

    rig.now_ms = START_MS + 99
    await look(rig)
    assert rig.queue().timed_count == 3
    rig.now_ms += 1
    await look(rig)
    rig.commit()

    assert stored_ids(rig) == {2, 3}
    assert rig.queue().expired_count == 1
    rig.now_ms += 5000
    assert await rig.ids(10) == [2]


@pytest.mark.parametrize("back", ["release", "nack", "expire"])
async def test_a_lease_that_comes_back_late_does_not_bring_back_what_has_expired(back: str) -> None:
    rig = Rig()
    rig.create()
    await rig.route([1], deadline_ms=START_MS + 100)
    (lease,) = await rig.claim(1, lease_ms=200)
    rig.now_ms += 300

    if back == "release":
        rig.shard.release([lease])
    elif back == "nack":
        await rig.run(lambda: rig.shard.nack([Nack(lease.token)], rig.now_ms))
    else:
        await rig.run(lambda: rig.shard.expire(rig.now_ms, 10))

    assert await rig.ids(10) == []
    rig.commit()
    assert stored_ids(rig) == set()


async def test_a_nack_with_a_delay_over_the_retention_leaves_at_its_end() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1], deadline_ms=START_MS + 100)
    (lease,) = await rig.claim(1)
    await rig.run(lambda: rig.shard.nack([Nack(lease.token, delay_ms=60_000)], rig.now_ms))
    assert rig.queue().timed_count == 1

    rig.now_ms += 100
    await look(rig)

    assert rig.queue().timed_count == 0
