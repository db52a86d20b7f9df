"""Purges: what goes, what stays, and what comes back after them."""

from __future__ import annotations

import asyncio

import pytest

from libs.storage.layout.buckets import BucketKind
from services.broker.core.commands import Needs, Purge
from services.broker.core.queue import NeedsLane
from services.broker.core.shard import Finish, Nack
from services.broker.core.waiting.bucket import Place
from tests.unit.broker.core.shards import START_MS, Rig
from tests.unit.broker.core.stored import garbage_lists, garbage_rows, stored_queue


async def test_a_purge_leaves_what_is_in_flight_done_and_failed() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3, 4])
    await rig.route([5], visible_at_ms=START_MS + 500)
    acked, failed, held = await rig.claim(3)
    rig.shard.leases.ack([acked.token], rig.now_ms)
    rig.shard.leases.fail([failed], "gone", rig.now_ms)
    rig.commit()

    assert rig.shard.purge(rig.queue(), {Purge.AVAILABLE}) == 2
    rig.commit()
    await rig.restart()

    rig.now_ms += 1000
    assert await rig.ids(10) == []
    queue = rig.queue()
    assert (queue.done.count, queue.failed.count, queue.leases.count) == (1, 1, 1)
    assert rig.shard.leases.ack([held.token], rig.now_ms) == [Finish.OK]


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
    (epoch,) = queue.waiting.garbage_epochs
    rig.shard.write_rows(
        (key, None) for key in garbage_rows(rig.store.rows, "orders", epoch, lanes_only=True)
    )
    queue.waiting.note_swept(epoch)
    rig.commit()
    await rig.restart()

    rig.now_ms += 10
    assert await rig.all_ids(10) == [3, 4]
    assert rig.queue().waiting.garbage_epochs == ()


async def test_a_lease_from_before_a_purge_gives_its_message_back_behind_it() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    released, nacked = await rig.claim(2)
    rig.shard.purge(rig.queue(), {Purge.AVAILABLE})
    await rig.route([4])

    rig.release([released])
    await rig.run(lambda: rig.shard.leases.nack([Nack(nacked.token)], rig.now_ms))
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
    assert rig.shard.leases.ack(tokens, rig.now_ms) == [Finish.ENDED, Finish.ENDED]
    assert rig.shard.leases.deadlines.ended(rig.now_ms + 60_000, 10) == []
    assert await rig.ids(10) == [3]


async def test_a_purged_list_of_dead_letters_starts_over_behind_its_garbage() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    first, second, third = await rig.claim(3)
    rig.shard.leases.fail([first], "a", rig.now_ms)
    rig.commit()
    rig.shard.leases.fail([second], "b", rig.now_ms)  # not written yet

    assert rig.shard.purge(rig.queue(), {Purge.FAILED}) == 2
    rig.shard.leases.fail([third], "c", rig.now_ms)
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
    # One name may hold no more, also when the queue is deleted and made again.
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
    lane = rig.queue().waiting.lanes()[0]
    with pytest.raises(NeedsLane) as needs:
        rig.queue().peek(1, lambda ids: ids, rig.now_ms)

    rig.shard.purge(rig.queue(), {Purge.AVAILABLE})
    await rig.loader.answer(needs.value)

    assert lane not in rig.queue().waiting.lanes()
    assert await rig.ids(10) == []


async def test_a_lane_that_is_emptied_before_it_is_read_is_not_read() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1])
    rig.commit()
    await rig.restart()
    lane = rig.queue().waiting.lanes()[0]
    with pytest.raises(NeedsLane) as needs:
        rig.queue().peek(1, lambda ids: ids, rig.now_ms)
    place = Place(0, BucketKind.READY, lane.first_unknown)

    # Given a command that takes the message out between the wish to read and the reading.
    with pytest.raises(Needs) as bucket:
        rig.queue().waiting.find_bucket(place)
    await rig.loader.answer(bucket.value)
    answering = asyncio.create_task(rig.loader.answer(needs.value))
    await asyncio.sleep(0)
    found = rig.queue().waiting.find_bucket(place)
    assert found is not None
    lane.remove(found[1], {0})

    await answering

    assert lane.complete
    assert not lane.loading
