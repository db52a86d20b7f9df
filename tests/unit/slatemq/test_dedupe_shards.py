from collections import Counter
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slatemq.dedupe_shards import dedupe_shard

shards = st.sets(st.integers(0, 16_383), min_size=1, max_size=20)


@given(st.text(min_size=1, max_size=20), shards)
def test_the_rule_is_that_of_the_proto(key: str, some: set[int]) -> None:
    def drawn(shard: int) -> int:
        encode = key.encode() + shard.to_bytes(4, "big")
        return int.from_bytes(blake2b(encode, digest_size=8).digest(), "big")

    assert dedupe_shard(key, some) == max(some, key=drawn)
    assert dedupe_shard(key, sorted(some, reverse=True)) == max(some, key=drawn)


def test_keys_never_change_their_shards_between_versions() -> None:
    keys = ["a", "order-7", "ü", "x" * 255]
    assert [dedupe_shard(key, range(4)) for key in keys] == [3, 2, 1, 2]
    assert dedupe_shard("a", [7]) == 7


@given(st.text(min_size=1, max_size=20), shards, st.integers(0, 16_383))
def test_a_new_shard_takes_keys_and_moves_no_others(key: str, some: set[int], new: int) -> None:
    assert dedupe_shard(key, some | {new}) in (dedupe_shard(key, some), new)


def test_keys_are_spread_evenly() -> None:
    counts = Counter(dedupe_shard(f"key {n}", range(4)) for n in range(4000))
    assert min(counts.values()) > 850


def test_without_shards_there_is_none() -> None:
    with pytest.raises(ValueError, match="empty"):
        dedupe_shard("a", [])
