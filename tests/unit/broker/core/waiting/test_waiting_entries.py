"""Single messages that wait, counts and retention: each rule with the story that needs it."""

from __future__ import annotations

import asyncio

import pytest

from libs.storage.layout.buckets import BucketKind, order_in_time, split_order
from services.broker.core.queue import Choice
from services.broker.core.shard import Nack
from services.broker.core.waiting import available
from services.broker.core.waiting import lane as lanes
from services.broker.core.waiting.bucket import Place
from services.broker.core.waiting.lane import READY_BUCKET_MAX
from services.broker.entries.waiting_pages import WaitingReader
from services.broker.shard import loading
from tests.unit.broker.core.shards import START_MS, Each, Rig
from tests.unit.broker.core.stored import stored_queue

READY, TIMED = BucketKind.READY, BucketKind.TIMED


async def place_of(rig: Rig, message_id: int) -> Place:
    place = await WaitingReader(rig.store).locate(rig.queue(), message_id, [0])
    assert place is not None
    return place


async def cancel(rig: Rig, place: Place, message_id: int) -> bool:
    return await rig.run(lambda: rig.queue().waiting.cancel(place, message_id)) is not None


async def look(rig: Rig) -> None:
    while rig.queue().waiting.has_due(rig.now_ms):
        await rig.run(lambda: rig.queue().waiting.drop_expired(rig.now_ms, 1000))


def stored_ids(rig: Rig) -> set[int]:
    stored = stored_queue(rig.store.rows, "orders")
    assert stored is not None
    return set(stored.waiting)


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
    another = await place_of(rig, 2)
    assert another != place
    assert await cancel(rig, another, 2)
    rig.commit()
    await rig.restart()

    assert stored_ids(rig) == {9}
    rig.now_ms = due_ms
    assert await rig.all_ids(10) == [9]


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
    order = rig.queue().waiting.lanes()[0].first_unknown
    place = Place(0, READY, order)

    assert not await cancel(rig, place, 1)
    assert await cancel(rig, place, 2)
    rig.commit()
    await rig.restart()

    assert await rig.ids(10) == [3]


async def test_buckets_that_were_looked_at_for_nothing_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "PINNED_MAX", 3)
    rig = Rig()
    rig.create()
    for number in range(1, 21):
        await rig.route([number], visible_at_ms=START_MS + 100 * number)
    rig.commit()
    await rig.restart()
    (lane,) = rig.queue().waiting.lanes()

    for number in range(1, 21):
        assert not await cancel(rig, await place_of(rig, number), 77)

    assert len(lane.in_memory()) == 3

    for number in range(1, 21):  # buckets that do not exist
        order = (await place_of(rig, number)).order + 1
        assert not await cancel(rig, Place(0, TIMED, order), number)

    assert len(lane._gone) == 3
    assert not lane.in_memory()
    rig.now_ms += 2000
    assert await rig.ids(100) == list(range(1, 21))


async def test_commands_that_read_the_same_bucket_change_it_one_after_the_other() -> None:
    due_ms = START_MS + 500
    rig = Rig()
    rig.create()
    await rig.route([9], visible_at_ms=START_MS + 10)
    await rig.route([1, 2, 3], visible_at_ms=due_ms)
    await rig.route([4], visible_at_ms=due_ms + 1)
    rig.commit()
    await rig.restart()
    several, single = [await place_of(rig, message_id) for message_id in (1, 4)]

    # When each begins to read before any other has changed it
    cancelled = await asyncio.gather(
        *(cancel(rig, several, message_id) for message_id in (1, 2, 1)),
        *(cancel(rig, single, 4) for _ in range(2)),
    )
    rig.commit()

    assert cancelled == [True, True, False, True, False]
    assert stored_ids(rig) == {3, 9}


@pytest.mark.parametrize("visible_at_ms", [0, START_MS + 500])
async def test_what_lies_behind_a_memory_whose_messages_were_all_cancelled_comes(
    visible_at_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "CACHED_MAX", 2)
    rig = Rig()
    rig.create()
    for ids in ([1, 2], [3, 4]):
        await rig.route(ids, visible_at_ms=visible_at_ms)
        rig.commit()
    place = await place_of(rig, 1)

    assert [await cancel(rig, place, message_id) for message_id in (1, 2)] == [True, True]
    rig.commit()
    await rig.restart()

    rig.now_ms += 1000
    assert await rig.all_ids(4) == [3, 4]


@pytest.mark.parametrize("cancels", [False, True])
async def test_what_stays_of_a_bucket_that_was_begun_is_delivered(cancels: bool) -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3, 4, 5])
    rig.commit()
    place = await place_of(rig, 4)
    assert await rig.ids(2) == [1, 2]

    if cancels:
        assert await cancel(rig, place, 4)
    else:
        assert [one.message_id for one in await rig.claim(1, skip=[3])] == [4]

    assert await rig.ids(10) == [3, 5]


async def test_a_claim_that_stops_at_a_message_takes_none_behind_it() -> None:
    # Given a message that a claim has no room for, and smaller ones in buckets behind it
    rig = Rig()
    rig.create()
    await rig.route([1, 2])
    rig.commit()
    await rig.route([3])
    await rig.route([4], priority=1)
    rig.commit()
    fits = Each(lambda item: Choice.STOP if item.message_id == 2 else Choice.TAKE)

    claimed = rig.shard.leases.claim(rig.queue(), fits, 1000, "w", rig.now_ms)

    assert [lease.message_id for lease in claimed.leases()] == [1]


async def test_messages_routed_together_lie_in_buckets_that_a_claim_can_load() -> None:
    rig = Rig()
    count = 2 * READY_BUCKET_MAX + 1
    rig.create().waiting.assign(range(count), (), range(START_MS + 1, START_MS + 1 + count), (), 0)

    (lane,) = rig.queue().waiting.lanes()
    buckets = lane.in_memory()
    assert [bucket.count for bucket in buckets] == [READY_BUCKET_MAX, READY_BUCKET_MAX, 1]
    items = [item for bucket in buckets for item in bucket.items]
    assert [one.message_id for one in items] == list(range(count))
    assert [one.retention_deadline_ms - START_MS for one in items] == list(range(1, count + 1))


async def test_memory_that_a_read_keeps_is_dropped_once_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "CACHED_MAX", 4)
    rig = Rig()
    rig.create()
    rig.create("other")
    await rig.route([1, 2, 3])
    rig.commit()
    await rig.route([4, 5, 6])
    (lane,) = rig.queue().waiting.lanes()
    lane.begin_read(0, lane.tail)
    rig.commit()
    assert lane.cached_count == 6

    lane.end_read(0, lane.tail)
    await rig.route([1], queue_id="other")
    rig.commit()

    assert lane.cached_count == 3
    assert not rig.shard._lingering
    assert await rig.all_ids(6) == [1, 2, 3, 4, 5, 6]


async def test_messages_come_back_to_their_place_in_a_lane_that_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "CACHED_MAX", 4)
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    rig.commit()
    await rig.route([4, 5, 6])
    given = await rig.claim(1, skip=[1, 2, 3])
    rig.commit()

    rig.release(given)
    rig.commit()

    assert await rig.all_ids(6) == [1, 2, 3, 4, 5, 6]


async def test_messages_come_back_one_by_one_to_a_bucket_that_has_left_a_full_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a lane whose last bucket was taken, and whose first is all that memory may hold
    monkeypatch.setattr(lanes, "CACHED_MAX", 3)
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    rig.commit()
    head = await rig.claim(1)
    await rig.route([4, 5])
    first, second = await rig.claim(2, skip=[2, 3])
    rig.release(head)
    rig.commit()

    for lease in (second, first):
        rig.release([lease])
        rig.commit()

    assert await rig.all_ids(5) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("visible_at_ms", [0, START_MS + 500])
async def test_a_lane_whose_memory_is_just_full_delivers_each_message_once(
    visible_at_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "CACHED_MAX", 4)
    rig = Rig()
    rig.create()
    for ids in ([1, 2], [3, 4], [5, 6]):
        await rig.route(ids, visible_at_ms=visible_at_ms and visible_at_ms + ids[0])
        rig.commit()

    rig.now_ms += 1000
    assert await rig.all_ids(6) == [1, 2, 3, 4, 5, 6]
    assert await rig.ids(10) == []


async def test_what_lies_in_memory_may_go_as_soon_as_no_read_needs_it() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    rig.commit()
    (lane,) = rig.queue().waiting.lanes()
    durable = lane.in_memory()[0].generation

    for _ in range(2):
        lane.begin_read(0, lane.tail)
    for _ in range(2):
        lane.evict(durable)
        assert lane.in_memory()
        lane.end_read(0, lane.tail)
    lane.evict(durable)

    assert not lane.in_memory()
    assert await rig.all_ids(3) == [1, 2, 3]


async def test_a_rescheduled_message_moves_to_its_new_time_and_to_now() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    queue = rig.queue()
    place = await place_of(rig, 1)

    later = await rig.run(lambda: queue.waiting.reschedule(place, 1, START_MS + 500, rig.now_ms))
    assert later is not None
    moved = order_in_time(later.kind, later.order)
    assert (later.kind, split_order(moved).ms) == (TIMED, START_MS + 500)
    assert await rig.ids(10) == [2, 3]
    now = await rig.run(lambda: queue.waiting.reschedule(later, 1, START_MS, rig.now_ms))
    assert now is not None
    assert now.kind is READY
    assert await rig.ids(10) == [1]
    assert queue.waiting.entered_count == 3


# --- Counts and retention ---------------------------------------------------


async def test_counts_show_what_fell_due_without_a_claim_also_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "CACHED_MAX", 20)
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
    counts = rig.queue().waiting.counts(rig.now_ms)

    assert (counts.available, counts.delayed) == (82, 20)
    assert counts.by_priority == ((0, 40, 10), (1, 42, 10))
    assert counts.oldest_claimable_ms is not None
    assert 790 <= counts.oldest_claimable_ms <= 800
    reads = rig.store.rows_read
    await look(rig)
    assert rig.store.rows_read == reads, "what was counted is not read again"
    assert len(await rig.all_ids(40)) == 40, "of the most urgent ones"
    assert rig.queue().waiting.counts(rig.now_ms).by_priority == ((0, 0, 10), (1, 42, 10))


@pytest.mark.parametrize("visible_at_ms", [0, START_MS + 10])
async def test_the_age_of_the_oldest_message_is_that_of_the_next_when_it_was_cancelled(
    visible_at_ms: int,
) -> None:
    rig = Rig()
    rig.create()
    for message_id in (1, 2):
        await rig.route([message_id], visible_at_ms=visible_at_ms and rig.now_ms + 10)
        rig.commit()
        rig.now_ms += 100

    assert await cancel(rig, await place_of(rig, 1), 1)

    oldest_ms = 90 if visible_at_ms else 100
    assert rig.queue().waiting.counts(rig.now_ms).oldest_claimable_ms == oldest_ms


async def test_messages_due_together_in_many_buckets_are_counted_in_steps_and_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(available, "TIMED_BUCKET_MAX", 2)
    rig = Rig()
    rig.create()
    await rig.route(range(1, 12), visible_at_ms=START_MS + 10)
    await rig.route([20], visible_at_ms=START_MS + 11)
    waiting = rig.queue().waiting
    rig.now_ms += 10

    counts, looked_at = [waiting.counts(rig.now_ms)], 0
    while waiting.has_due(rig.now_ms):
        looked_at += waiting.drop_expired(rig.now_ms, 1)
        counts.append(waiting.counts(rig.now_ms))

    assert len(counts) > 5
    assert {(one.available, one.delayed) for one in counts} == {(11, 1)}
    assert looked_at == 11


async def test_a_look_at_what_is_due_has_one_bound_for_all_priorities() -> None:
    rig = Rig()
    rig.create()
    for number in range(1, 41):  # one in each bucket
        await rig.route([number], visible_at_ms=START_MS + number, priority=number % 4)
    rig.now_ms += 100
    waiting = rig.queue().waiting

    looks = []
    while waiting.has_due(rig.now_ms):
        looks.append(waiting.drop_expired(rig.now_ms, 15))

    assert looks == [15, 15, 10]


async def test_the_age_of_the_oldest_message_counts_from_when_it_could_be_claimed() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1])
    waiting = rig.queue().waiting

    assert waiting.counts(rig.now_ms).oldest_claimable_ms == 0
    assert waiting.counts(rig.now_ms + 7).oldest_claimable_ms == 7
    assert waiting.counts(rig.now_ms - 7).oldest_claimable_ms == 0, "the clock was set back"


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
    assert rig.queue().waiting.timed_count == 3
    rig.now_ms += 1
    await look(rig)
    rig.commit()

    assert stored_ids(rig) == {2, 3}
    assert rig.queue().waiting.expired_count == 1
    rig.now_ms += 5000
    assert await rig.ids(10) == [2]


async def test_a_message_that_comes_past_its_retention_is_counted_and_does_not_wait() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1], deadline_ms=START_MS)
    await rig.route([2], deadline_ms=START_MS + 1)

    waiting = rig.queue().waiting
    assert (waiting.expired_count, waiting.ready_count) == (1, 1)
    assert await rig.ids(10) == [2]


@pytest.mark.parametrize("back", ["release", "nack", "expire"])
async def test_a_lease_that_comes_back_late_does_not_bring_back_what_has_expired(back: str) -> None:
    rig = Rig()
    rig.create()
    await rig.route([1], deadline_ms=START_MS + 100)
    (lease,) = await rig.claim(1, lease_ms=200)
    rig.now_ms += 300

    if back == "release":
        rig.release([lease])
    elif back == "nack":
        await rig.run(lambda: rig.shard.leases.nack([Nack(lease.token)], rig.now_ms))
    else:
        await rig.expire()

    assert await rig.ids(10) == []
    rig.commit()
    assert stored_ids(rig) == set()


async def test_a_nack_with_a_delay_over_the_retention_leaves_at_its_end() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1], deadline_ms=START_MS + 100)
    (lease,) = await rig.claim(1)
    await rig.run(lambda: rig.shard.leases.nack([Nack(lease.token, delay_ms=60_000)], rig.now_ms))
    assert rig.queue().waiting.timed_count == 1

    rig.now_ms += 100
    await look(rig)

    assert rig.queue().waiting.timed_count == 0
