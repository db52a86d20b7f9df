"""Lists of what waits: in order, across what memory holds and what it does not."""

from __future__ import annotations

import pytest

from services.broker.core.waiting import available
from services.broker.core.waiting import lane as lanes
from services.broker.entries.waiting_pages import QueuePosition, WaitingReader
from services.broker.shard import loading
from tests.unit.broker.core.shards import START_MS, Rig


async def waiting(rig: Rig, *, delayed: bool = False, limit: int = 100) -> list[int]:
    """IDs in the order of delivery, as listed page by page."""
    reader, after, ids = WaitingReader(rig.store), None, []
    while True:
        page = await reader.page(
            rig.queue(), delayed=delayed, after=after, limit=limit, now_ms=rig.now_ms
        )
        ids += [item.message_id for _, item in page.entries]
        after = page.next
        if after is None:
            return ids


async def test_a_list_is_in_the_order_of_delivery_and_takes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "CACHED_MAX", 4)
    monkeypatch.setattr(loading, "LOAD_MESSAGES", 3)
    monkeypatch.setattr(available, "READY_BUCKET_MAX", 2)
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3], priority=5)
    await rig.route([4], visible_at_ms=START_MS + 10, priority=5)
    rig.now_ms += 20
    await rig.route([5, 6, 7], priority=5)
    await rig.route([8], priority=0)
    await rig.route([9, 10], visible_at_ms=START_MS + 5000, priority=5)
    rig.commit()
    claimed = await rig.claim(2)
    rig.commit()
    await rig.restart()

    for limit in (1, 2, 3, 100):
        assert await waiting(rig, limit=limit) == [2, 3, 4, 5, 6, 7]
        assert await waiting(rig, delayed=True, limit=limit) == [9, 10]
    assert [lease.message_id for lease in claimed] == [8, 1]
    assert [*await rig.ids(10), *await rig.ids(10), *await rig.ids(10)] == [2, 3, 4, 5, 6, 7]


async def test_a_page_goes_on_behind_what_was_reported_though_others_left_meanwhile() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2, 3, 4])
    rig.commit()
    reader = WaitingReader(rig.store)
    first = await reader.page(rig.queue(), delayed=False, after=None, limit=2, now_ms=rig.now_ms)
    assert isinstance(first.next, QueuePosition)
    assert await rig.ids(1) == [1]

    rest = await reader.page(
        rig.queue(), delayed=False, after=first.next, limit=9, now_ms=rig.now_ms
    )

    assert [item.message_id for _, item in rest.entries] == [3, 4]
