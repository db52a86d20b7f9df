"""Lease tokens, taken apart: many at once as each by itself."""

import re
from typing import Any

import pytest

from slatemq._consume.handles import places_by_shard, shard_of
from slatemq.errors import InvalidArgument

ONE, OTHER = "0-00000000000000a1", "1f-00000000000000a2"


def test_tokens_of_one_claim_are_all_of_its_shard() -> None:
    assert places_by_shard([OTHER, "1f-x", OTHER]) == ({31: range(3)}, {})
    assert places_by_shard([ONE]) == ({0: range(1)}, {})


def test_no_tokens_are_of_no_shard() -> None:
    assert places_by_shard([]) == ({}, {})


def test_tokens_of_several_shards_keep_their_places() -> None:
    assert places_by_shard([ONE, OTHER, ONE, "00-x"]) == ({0: [0, 2, 3], 31: [1]}, {})


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "0",
        "0-",
        "0-ü",
        f"{ONE}\n",
        f"\n{ONE}",
        f"{ONE}\n{ONE}",
        "0-" + "x" * 63,
        5,
        None,
        b"0-x",
    ],
)
def test_what_is_no_token_is_refused_among_others(wrong: Any) -> None:
    for tokens, place in (
        ([wrong], 0),
        ([wrong, ONE], 0),
        ([ONE, wrong, ONE], 1),
        ([ONE, wrong], 1),
    ):
        places, refused = places_by_shard(tokens)

        others = [at for at in range(len(tokens)) if at != place]
        assert places == ({0: others} if others else {})
        assert list(refused) == [place]
        assert refused[place].field == f"lease_tokens[{place}]"
        with pytest.raises(InvalidArgument, match=re.escape(refused[place].description)):
            shard_of(wrong)
