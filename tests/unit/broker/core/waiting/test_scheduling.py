"""Many messages for later, on lanes that memory does not hold: they come in without a read."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.storage.errors import Unstorable
from libs.storage.layout.keys import RecordType
from libs.storage.records.queues import decode_active
from services.broker.core import shard as shards
from services.broker.core.waiting import available
from services.broker.core.waiting.available import TIMED_BUCKET_MAX
from tests.forms import examples
from tests.unit.broker.core.shards import START_MS, Rig
from tests.unit.broker.core.stored import stored_queue
from tests.unit.storage.oracles import record_type_of

DUE_MS = START_MS + 3_600_000


def bucket_sizes(rig: Rig) -> list[int]:
    return [
        len(decode_active(value)[0])
        for key, value in rig.store.rows.items()
        if record_type_of(key) is RecordType.ACTIVE
    ]


async def test_after_a_restart_a_message_for_any_time_is_assigned_without_a_read() -> None:
    # Given a thousand scheduled messages that memory does not hold
    rig = Rig()
    rig.create()
    times = random.Random(7)
    for message_id in range(1, 1001):
        due_ms = DUE_MS + times.randrange(100_000)
        await rig.route([message_id], visible_at_ms=due_ms)
    rig.commit()
    await rig.restart()
    reads = rig.store.reads

    # when as many come, for times of their own and for the same ones
    times = random.Random(7)
    for message_id in range(1001, 2001):
        due_ms = DUE_MS + times.randrange(100_000) + message_id % 2
        await rig.route([message_id], visible_at_ms=due_ms)
        if message_id % 100 == 0:
            rig.commit()

    # then nothing was read, and none is lost
    assert rig.store.reads == reads
    rig.commit()
    await rig.restart()
    rig.now_ms = DUE_MS + 200_000
    assert sorted(await rig.all_ids(2000)) == list(range(1, 2001))


async def test_more_messages_than_a_record_can_count_may_be_due_together_after_a_restart() -> None:
    # Given 31,600 messages for one millisecond, and another behind them
    rig = Rig()
    rig.create()
    await rig.route(range(1, 31_601), visible_at_ms=DUE_MS)
    await rig.route([31_601], visible_at_ms=DUE_MS + 1)
    rig.commit()
    await rig.restart()

    # when 65,535 more come for it at once
    await rig.route(range(40_001, 40_001 + 65_535), visible_at_ms=DUE_MS)
    rig.commit()

    # then every record is small, and all of them come in the order in which they were routed
    assert max(bucket_sizes(rig)) <= TIMED_BUCKET_MAX
    await rig.restart()
    rig.now_ms = DUE_MS
    expected = [*range(1, 31_601), *range(40_001, 40_001 + 65_535)]
    assert await rig.all_ids(len(expected)) == expected


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 1700), st.integers(0, 2), st.sampled_from("ncr")),
        min_size=1,
        max_size=8,
    )
)
def test_batches_for_the_same_times_never_overfill_a_record(
    batches: list[tuple[int, int, str]],
) -> None:
    async def run() -> None:
        rig = Rig()
        rig.create()
        expected: dict[int, list[int]] = {}
        first = 1
        for count, later_ms, then in batches:
            ids = range(first, first + count)
            first += count
            await rig.route(ids, visible_at_ms=DUE_MS + later_ms)
            expected.setdefault(later_ms, []).extend(ids)
            if then in "cr":
                rig.commit()
            if then == "r":
                await rig.restart()
        rig.commit()

        assert max(bucket_sizes(rig)) <= TIMED_BUCKET_MAX
        stored = stored_queue(rig.store.rows, "orders")
        assert stored is not None
        assert len(stored.waiting) == first - 1
        await rig.restart()
        for later_ms in sorted(expected):
            rig.now_ms = DUE_MS + later_ms
            assert await rig.all_ids(first) == expected[later_ms]

    asyncio.run(run())


async def test_a_record_that_cannot_be_stored_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if nothing bounded it
    monkeypatch.setattr(available, "TIMED_BUCKET_MAX", 1 << 20)
    monkeypatch.setattr(shards, "STEP_MATCHES", 1 << 20)
    rig = Rig()
    rig.create()
    await rig.route(range(1, 65_537), visible_at_ms=DUE_MS)

    with pytest.raises(Unstorable, match="queue 'orders': available has 65536 elements"):
        rig.commit()
