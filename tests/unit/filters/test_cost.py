"""What an expression costs: a limit of a principal bounds it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.filters import Filter, check

PARTS = ("size > 1", "headers.a == 'x'", "headers.exists(k, k == 'y')", "headers.a.matches('x')")


@pytest.mark.parametrize(
    ("source", "cost"),
    [
        ("size > 1", 3),
        ('headers["queue"] == "q"', 5),
        ("headers.exists(k, k == 'y')", 2 + 3 * 255),
        ("[1, 2, 3].exists(k, k == 2)", 5 + 3 * 3),
        ("headers.a.matches('x')", 4 + 1000),
        ("headers.a.matches('[a-z]{20}')", 4 + 20_000),
        ("headers.a + headers.b == 'x'", 7 + 60),
    ],
)
def test_each_part_costs_a_step_for_each_turn(source: str, cost: int) -> None:
    assert check(source).cost == cost


@given(sources=st.lists(st.sampled_from(PARTS), min_size=1, max_size=8))
def test_what_is_joined_costs_its_parts(sources: list[str]) -> None:
    whole = check(" || ".join(sources)).cost

    assert whole == sum(check(one).cost for one in sources) + (len(sources) > 1)
    assert Filter(" || ".join(sources)).checked.cost == whole


def test_a_priority_costs_as_a_filter_does() -> None:
    assert check("size > 1 ? 0 : 5", "int").cost == check("size > 1").cost + 3
