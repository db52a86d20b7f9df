"""Lease tokens in a row are found, and nothing is taken for some that is none."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slatemq._consume.finishing import LAST, ROW_MIN, TokenRows, rows_among
from slatemq._consume.handles import places_by_shard

BLOCKS = st.tuples(
    st.sampled_from(
        ["0-00000000000000", "0-aaaaaaaaaaaaaa", "1-00000000000000", "", "\n", "0-a\n"]
    ),
    st.integers(0, 255),
    st.integers(1, 300),
).map(lambda block: [block[0] + last for last in LAST[block[1] : block[1] + block[2]]])
OTHERS = st.lists(
    st.sampled_from(["0-0000000000000007", "00", "", "0-x", "é", "01\n02"]), max_size=20
)
TOKENS = st.lists(BLOCKS | OTHERS, max_size=6).map(lambda parts: list(chain(*parts)))


@given(TOKENS)
def test_rows_are_what_they_claim_to_be(tokens: list[str]) -> None:
    end = 0
    rows, others = rows_among(tokens) or TokenRows([], list(range(len(tokens))))
    in_rows = [place for row in rows for place in range(row.at, row.at + row.size)]
    assert sorted([*in_rows, *others]) == list(range(len(tokens)))
    for row in rows:
        assert row.at >= end
        assert row.size >= ROW_MIN
        first = tokens[row.at]
        place = LAST.index(first[-2:])
        counted = [first[:-2] + last for last in LAST[place : place + row.size]]
        assert tokens[row.at : row.at + row.size] == counted
        end = row.at + row.size


@given(TOKENS)
def test_the_shards_of_tokens_in_rows_are_those_of_each(tokens: list[str]) -> None:
    rows = rows_among(tokens)
    places, refused = places_by_shard(tokens, rows and rows.heads(tokens))
    expected, each_refused = places_by_shard(tokens)

    assert {shard: list(some) for shard, some in places.items()} == {
        shard: list(some) for shard, some in expected.items()
    }
    assert refused.keys() == each_refused.keys()


def test_what_a_claim_gave_is_all_in_rows() -> None:
    blocks = [[f"0-{block:014x}{last}" for last in LAST[:200]] for block in range(5)]
    rows = rows_among(list(chain(*blocks)))
    assert rows == ([(at, 200) for at in range(0, 1000, 200)], [])


def test_a_row_ends_where_one_is_left_out() -> None:
    tokens = [f"0-{'a' * 14}{last}" for last in LAST]
    del tokens[100]
    assert rows_among(tokens) == ([(0, 100), (100, 155)], [])


@pytest.mark.parametrize("wrong", [5, None, b"00", ["00"], {}])
def test_what_is_no_text_is_in_no_row(wrong: object) -> None:
    tokens: list[object] = [f"0-{'a' * 14}{last}" for last in LAST[: 2 * ROW_MIN]]
    for place in (0, 5, ROW_MIN - 1, ROW_MIN, 2 * ROW_MIN - 1):
        given = [*tokens[:place], wrong, *tokens[place + 1 :]]
        rows = rows_among(given)  # type: ignore[arg-type]
        assert rows is None or place in rows.others


def test_a_text_that_looks_like_two_tokens_is_in_no_row() -> None:
    tokens = [f"0-{'a' * 14}{last}" for last in LAST[: 2 * ROW_MIN]]
    both = ["\n".join(tokens[3:5]), "0-x", *tokens[5:]]
    rows = rows_among([*tokens[:3], *both])
    assert rows is None or rows.others[:5] == [0, 1, 2, 3, 4]
