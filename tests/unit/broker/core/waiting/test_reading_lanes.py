"""How much of a lane is read at once: enough messages, and few rows that no one looks at."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from libs.storage.layout.buckets import BucketKind, bucket_number, last_order, order_of
from libs.storage.layout.keys import active_key
from libs.storage.records.queues import AvailableMessage, encode_active
from services.broker.core.waiting.lane import Lane
from services.broker.shard.loading import FIRST_ROWS, LOAD_MESSAGES, LOAD_ROWS, read_buckets

FIRST = order_of(0, 1_767_225_600_000, 0)
LAST = last_order(0)


class Rows:
    """Buckets in a dict; counts the rows that scans would fetch."""

    def __init__(self, sizes: list[int]) -> None:
        self.fetched = 0
        self._rows: dict[bytes, bytes] = {}
        for number, size in enumerate(sizes):
            bucket = bucket_number(128, BucketKind.READY, FIRST + number)
            items = [AvailableMessage(number * 1000 + n, 128, 0, 0, 0) for n in range(size)]
            self._rows[active_key("q", bucket)] = encode_active(items, ())

    async def get(self, key: bytes) -> bytes | None:
        return self._rows.get(key)

    async def scan(
        self, start: bytes, end: bytes, limit: int | None = None
    ) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        rows = sorted((k, v) for k, v in self._rows.items() if start <= k < end)[:limit]
        self.fetched += len(rows)
        if rows:
            yield rows


async def orders_read(store: Rows) -> tuple[list[int], int]:
    """The numbers of the buckets that one read gives, and how far it went."""
    lane = Lane(128, BucketKind.READY, 0)
    rows, through = await read_buckets(store, "q", lane, (FIRST, LAST), in_parts=True)
    for order, items in rows:
        number = order - FIRST
        assert all(item.message_id // 1000 == number for item in items)
    return [order - FIRST for order, _ in rows], through


@pytest.mark.parametrize(
    ("size", "count"),
    [(1000, LOAD_MESSAGES // 1000), (100, LOAD_MESSAGES // 100), (7, LOAD_ROWS), (1, LOAD_ROWS)],
)
async def test_a_read_fetches_few_rows_beyond_those_it_gives(size: int, count: int) -> None:
    store = Rows([size] * 2 * LOAD_ROWS)

    numbers, through = await orders_read(store)

    assert numbers == list(range(count))
    assert through == FIRST + count - 1
    assert store.fetched <= max(FIRST_ROWS, count)


async def test_small_buckets_before_large_ones_make_no_large_read_of_few_messages() -> None:
    # Ten messages, and then a thousand in each
    store = Rows([1] * 10 + [1000] * LOAD_ROWS)

    numbers, _ = await orders_read(store)

    assert numbers == list(range(14))


@pytest.mark.parametrize("size", [0, 1, FIRST_ROWS - 1, FIRST_ROWS, FIRST_ROWS + 1, 40])
async def test_a_read_to_the_end_says_so(size: int) -> None:
    store = Rows([3] * size)

    numbers, through = await orders_read(store)

    assert numbers == list(range(size))
    assert through == LAST
