"""Decoded entries in memory: bounded by what they take, whatever they hold."""

from __future__ import annotations

import tracemalloc

import pytest

from libs.storage.records.metadata import MessageMetadata, encode_log_entry
from services.ingest.read.entries import DecodedEntry, EntryCache, decoded


def entry_of(first_id: int, count: int, *, are_alike: bool = True) -> bytes:
    """An entry with this many messages."""
    return encode_log_entry(
        [
            MessageMetadata(
                number,
                1_700_000_000_000,
                1_700_000_000_000,
                0,
                604_800,
                {"queue": "orders", "number": "0" if are_alike else str(number)},
                payload_bytes=20,
            )
            for number in range(first_id, first_id + count)
        ]
    )


@pytest.mark.parametrize("are_alike", [False, True])
async def test_what_is_kept_takes_no_more_memory_than_it_counts(are_alike: bool) -> None:
    cache = EntryCache(2 << 20)
    values = {first: entry_of(first, 500, are_alike=are_alike) for first in range(1, 20_000, 500)}

    tracemalloc.start()
    try:
        for first, value in values.items():
            cache.add(await decoded(first, value))
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert 1 << 20 <= cache.size_bytes <= 2 << 20
    assert used_bytes <= cache.size_bytes
    # The newest are there, the oldest are not
    assert cache.of(1) is None
    found = cache.of(19_900)
    assert found is not None
    assert found.messages[19_900].headers["queue"] == "orders"


async def test_one_that_is_larger_than_the_bound_is_kept_alone() -> None:
    cache = EntryCache(1)
    cache.add(await decoded(1, entry_of(1, 10)))
    cache.add(await decoded(11, entry_of(11, 10)))

    assert cache.of(5) is None
    assert cache.of(15) is not None
    assert cache.of(21) is None


async def test_one_that_is_read_again_is_counted_once_and_one_that_is_forgotten_not_at_all() -> (
    None
):
    cache = EntryCache(1 << 20)
    for _ in range(3):
        cache.add(await decoded(1, entry_of(1, 10)))
    cache.add(await decoded(11, entry_of(11, 10)))
    twice_bytes = cache.size_bytes

    cache.forget([11, 12])

    assert twice_bytes == 2 * cache.size_bytes
    cache.forget([1])
    assert cache.size_bytes == 0
    assert cache.of(1) is None


def test_an_entry_is_found_by_any_id_up_to_its_last() -> None:
    cache = EntryCache(100)
    for first in (20, 10, 30):  # in whatever order they were read
        cache.add(DecodedEntry(first, first + 5, {}, 1))

    found = [cache.of(number) for number in (9, 10, 15, 16, 20, 25, 35, 36)]
    assert [one.sequence if one else 0 for one in found] == [0, 10, 10, 0, 20, 20, 30, 0]
