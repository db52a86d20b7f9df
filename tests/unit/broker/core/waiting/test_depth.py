"""What a claim costs, in rows, bytes and memory, however deep the queue is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.broker.core.commands import Purge
from services.broker.core.queue import Choice
from services.broker.core.waiting import lane as lanes
from services.broker.core.waiting.lane import CACHED_MAX
from services.broker.entries.waiting_pages import WaitingReader
from tests.unit.broker.core.shards import START_MS, Each, Rig


@pytest.mark.parametrize("kind", ["ready", "timed"])
async def test_a_deep_lane_costs_what_a_shallow_one_does(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "CACHED_MAX", 2_000)
    costs = {depth: await cost_of_100_claims(depth, kind) for depth in (4_000, 40_000)}

    assert costs[4_000] == costs[40_000]


async def cost_of_100_claims(depth: int, kind: str) -> tuple[int, int, bool]:
    """Rows read, bytes written, and whether memory held no more than it may."""
    rig = Rig()
    rig.create()
    for first in range(0, depth, 1000):
        visible_at_ms = START_MS + first // 1000 + 1 if kind == "timed" else 0
        ids = list(range(first + 1, first + 1001))
        await rig.route(ids, visible_at_ms=visible_at_ms)
        rig.commit()
    rig.now_ms += 1000
    await rig.restart()
    rig.store.rows_read = 0
    written = 0
    held = 0
    for _ in range(100):
        await rig.claim(10)
        written += rig.commit()
        held = max(held, in_memory(rig))
    return rig.store.rows_read, written, held <= 2_000 + 4_000


def in_memory(rig: Rig) -> int:
    lanes_of = rig.queue().waiting.by_name.values()
    return sum(
        len(bucket.items)
        for lane in lanes_of
        for bucket in [*lane._cached, *lane._overlay.values()]
    )


async def test_a_lane_that_only_grows_stays_small_in_memory() -> None:
    rig = Rig()
    rig.create()

    for first in range(1, 100_001, 2000):
        await rig.route(list(range(first, first + 2000)))
        rig.commit()

    assert rig.queue().waiting.ready_count == 100_000
    assert in_memory(rig) <= CACHED_MAX + 2000
    assert rig.store.reads == 0


async def test_a_lane_that_gets_as_much_as_leaves_it_stays_small_in_memory() -> None:
    rig = Rig()
    rig.create()
    await rig.route(range(5000))
    held = []

    for first in range(5000, 50_000, 1000):
        await rig.route(range(first, first + 1000))
        taken = await rig.claim(1000)
        rig.shard.leases.ack([lease.token for lease in taken], rig.now_ms)
        rig.commit()
        held.append(in_memory(rig))

    assert rig.queue().waiting.ready_count == 5000
    assert max(held) == 5000


async def test_delayed_messages_that_come_from_the_end_stay_few_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "CACHED_MAX", 100)
    rig = Rig()
    rig.create()

    for number in range(1000, 0, -1):  # each is due before all others
        await rig.route([number], visible_at_ms=START_MS + 10 * number)
        rig.commit()

    assert in_memory(rig) <= 101
    rig.now_ms += 20_000
    assert [await rig.ids(1) for _ in range(1000)] == [[n] for n in range(1, 1001)]


async def test_a_claim_and_its_ack_write_the_same_few_bytes_at_any_depth() -> None:
    sizes = {}
    for depth in (1_000, 100_000):
        rig = Rig()
        rig.create()
        for first in range(0, depth, 1000):
            await rig.route(list(range(first + 1, first + 1001)))
            rig.commit()
        leased = await rig.claim(1)
        claim_bytes = rig.commit()
        rig.shard.leases.ack([leased[0].token], rig.now_ms)
        sizes[depth] = (claim_bytes, rig.commit())

    assert sizes[1_000] == sizes[100_000]
    assert max(sizes[1_000]) < 400


async def test_a_claim_that_skips_leaves_what_it_looked_at_alone() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    rig.commit()

    def wanted(ids: Sequence[int]) -> Sequence[int]:
        return [message_id for message_id in ids if message_id != 2]

    assert rig.queue().peek(2, wanted, rig.now_ms) == [1, 3]
    given = rig.shard.leases.claim(
        rig.queue(), Each(lambda item: Choice.SKIP), 1000, "w", rig.now_ms
    )

    assert given.leases() == []
    assert rig.commit() == 0


async def delayed_rig(depth: int) -> Rig:
    """A queue with this many delayed messages, of which memory holds none, and 100 ready ones."""
    rig = Rig()
    rig.create()
    for first in range(0, depth, 400):
        ids = list(range(first + 1, first + 401))
        await rig.route(ids, visible_at_ms=START_MS + 3_600_000 + first)
        rig.commit()
    await rig.route(list(range(depth + 1, depth + 101)))
    rig.commit()
    await rig.restart()
    rig.store.rows_read = 0
    return rig


async def test_delayed_messages_cost_claims_nothing_and_no_memory() -> None:
    costs = {}
    for depth in (4_000, 40_000):
        rig = await delayed_rig(depth)
        written = 0
        for number in range(10):
            leases = await rig.claim(10)
            rig.shard.leases.ack([lease.token for lease in leases], rig.now_ms)
            # Every second it is looked at what fell due.
            rig.now_ms += 1000
            assert not rig.queue().waiting.has_due(rig.now_ms), number
            written += rig.commit()
        costs[depth] = (rig.store.rows_read, written, in_memory(rig))

    assert costs[4_000] == costs[40_000]
    assert costs[40_000] == (1, costs[40_000][1], 0)


async def test_one_message_is_cancelled_or_moved_at_the_same_cost_at_any_depth() -> None:
    costs = {depth: await cost_of_repairs(depth) for depth in (4_000, 40_000)}

    assert costs[4_000] == costs[40_000]


async def cost_of_repairs(depth: int) -> tuple[int, int, int]:
    """Rows read, bytes written, messages left in memory."""
    rig = await delayed_rig(depth)
    queue, middle = rig.queue(), depth // 2
    at_ms = START_MS + 3_600_000 + middle
    place = await WaitingReader(rig.store).locate(queue, middle + 1, [at_ms])
    assert place is not None
    assert rig.store.rows_read <= 10, "4,000 messages at most"
    rig.store.rows_read = 0
    await rig.run(lambda: queue.waiting.cancel(place, middle + 1))
    await rig.run(lambda: queue.waiting.reschedule(place, middle + 2, at_ms + 100, rig.now_ms))
    written = rig.commit()
    assert rig.store.rows_read <= 3, "the bucket, and that of the new time"
    return rig.store.rows_read, written, in_memory(rig)


async def test_purging_and_dropping_what_expires_cost_the_same_at_any_depth() -> None:
    costs = {depth: await cost_of_dropping(depth) for depth in (4_000, 40_000)}

    assert costs[4_000] == costs[40_000]


async def cost_of_dropping(depth: int) -> tuple[int, int, int]:
    """Rows read and bytes written to drop one message, and bytes to purge all."""
    rig = await delayed_rig(depth)
    queue = rig.queue()
    await rig.route([depth + 500], visible_at_ms=START_MS + 9000, deadline_ms=START_MS + 10)
    rig.commit()
    rig.now_ms += 10
    rig.store.rows_read = 0
    while queue.waiting.has_due(rig.now_ms):
        await rig.run(lambda: queue.waiting.drop_expired(rig.now_ms, 100))
    written = rig.commit()
    assert queue.waiting.timed_count == depth
    assert rig.shard.purge(queue, {Purge.AVAILABLE}) == depth + 100
    return rig.store.rows_read, written, rig.commit()


async def test_what_fell_due_and_no_consumer_claims_is_counted_in_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "CACHED_MAX", 1_000)
    rig = await delayed_rig(20_000)
    rig.now_ms += 3_600_000 + 20_000

    steps = 0
    while rig.queue().waiting.has_due(rig.now_ms):
        await rig.run(lambda: rig.queue().waiting.drop_expired(rig.now_ms, 1000))
        steps += 1
        assert in_memory(rig) <= 1_000 + 4_000

    assert rig.queue().waiting.counts(rig.now_ms).available == 20_100
    assert rig.store.rows_read <= 20_000 // 400 + steps + 1, "each bucket once"
