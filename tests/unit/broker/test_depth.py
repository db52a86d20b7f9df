"""What a claim costs, in rows, bytes and memory, however deep the queue is."""

from __future__ import annotations

import pytest

from services.broker import lane_memory
from services.broker.lane_memory import CACHED_MAX
from services.broker.queue_machine import Choice
from tests.unit.broker.shards import START_MS, Rig


@pytest.mark.parametrize("kind", ["ready", "timed"])
async def test_a_deep_lane_costs_what_a_shallow_one_does(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_memory, "CACHED_MAX", 2_000)
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
    lanes_of = rig.queue()._available._lanes.values()
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

    assert rig.queue().ready_count == 100_000
    assert in_memory(rig) <= CACHED_MAX + 2000
    assert rig.store.reads == 0


async def test_delayed_messages_that_come_from_the_end_stay_few_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_memory, "CACHED_MAX", 100)
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
        rig.shard.ack([leased[0].token], rig.now_ms)
        sizes[depth] = (claim_bytes, rig.commit())

    assert sizes[1_000] == sizes[100_000]
    assert max(sizes[1_000]) < 400


async def test_a_claim_that_skips_leaves_what_it_looked_at_alone() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3])
    rig.commit()

    assert rig.queue().peek(2, lambda message_id: message_id != 2, rig.now_ms) == [1, 3]
    given = rig.shard.claim(rig.queue(), lambda item: Choice.SKIP, 1000, "w", rig.now_ms)

    assert given == []
    assert rig.commit() == 0
