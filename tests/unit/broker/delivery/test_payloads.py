"""The messages that a broker keeps in memory: which are kept, fetched, and let go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from libs.storage.layout.ids import MAX_SHARD, SEQUENCE_BITS
from services.broker.delivery.message_cache import (
    CachedMessage,
    IngestMessages,
    Payloads,
    size_of,
)

OVERHEAD = 500


class Disk:
    """Ingests that have every message; each is as long as its own number says."""

    def __init__(self, size: int = 500) -> None:
        self.size = size
        self.fetches: list[tuple[int, list[int]]] = []

    async def fetch(self, shard: int, ids: Sequence[int], max_bytes: int) -> IngestMessages:
        self.fetches.append((shard, list(ids)))
        held = dict.fromkeys(ids, (b"p" * self.size, b""))
        return IngestMessages(held, size_of(held), {})


def cache(disk: Disk, bytes_max: int) -> Payloads:
    return Payloads(cast("Any", disk), bytes_max)


def fetch(payloads: Payloads, ids: Sequence[int]) -> dict[int, CachedMessage]:
    async def run() -> dict[int, CachedMessage]:
        with payloads.pin() as hand:
            await payloads.fetch(ids, hand)
            return dict(hand)

    return asyncio.run(run())


def here(payloads: Payloads, ids: Sequence[int]) -> list[int]:
    found, missing = payloads.look(ids)
    assert [one for one in ids if one not in found] == list(missing)
    assert all(payloads.get(one) is found.get(one) for one in ids)
    return list(found)


def test_the_last_are_kept_at_least_half_of_the_bound_and_at_most_all() -> None:
    payloads = cache(Disk(), 40 * (500 + OVERHEAD))

    for first in range(0, 1000, 5):
        fetch(payloads, range(first, first + 5))
        kept = here(payloads, range(first + 5))
        assert kept == list(range(first + 5))[-len(kept) :]
        assert min(20, first + 5) <= len(kept) <= 40


def test_more_than_fits_is_handed_out_all_and_kept_in_part() -> None:
    payloads = cache(Disk(), 40 * (500 + OVERHEAD))

    handed = fetch(payloads, range(100))

    assert list(handed) == list(range(100))
    kept = here(payloads, range(100))
    assert kept == list(range(100))[-len(kept) :]
    assert 20 <= len(kept) <= 40


def test_a_message_longer_than_the_bound_is_handed_out_and_not_kept() -> None:
    payloads = cache(Disk(size=5000), 4000)

    assert list(fetch(payloads, [1])) == [1]
    assert here(payloads, [1]) == []


def test_what_is_forgotten_is_gone_from_both_halves_and_from_hands() -> None:
    payloads = cache(Disk(), 8 * (500 + OVERHEAD))
    fetch(payloads, range(4))
    fetch(payloads, range(4, 8))

    with payloads.pin() as hand:
        hand.update(payloads.look(range(8))[0])
        payloads.forget(1)
        payloads.forget(6)
        assert sorted(hand) == [0, 2, 3, 4, 5, 7]

    assert here(payloads, range(8)) == [0, 2, 3, 4, 5, 7]


def test_each_ingest_is_asked_for_its_own_in_the_order_of_delivery() -> None:
    disk = Disk()
    payloads = cache(disk, 1 << 20)
    late = MAX_SHARD << SEQUENCE_BITS

    fetch(payloads, [9, late | 5, 3, late | 8, 7])

    assert sorted(disk.fetches) == [(0, [9, 3, 7]), (MAX_SHARD, [late | 5, late | 8])]
    disk.fetches.clear()
    fetch(payloads, [30, 10, 20])
    fetch(payloads, [])
    assert disk.fetches == [(0, [30, 10, 20])]
