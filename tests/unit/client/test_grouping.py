"""Groups of items: as many together as their bounds permit."""

from __future__ import annotations

from collections.abc import Iterator

from slatemq._grouping import groups_of


def test_a_group_ends_before_its_size_or_its_count_is_exceeded() -> None:
    assert [*groups_of([4, 4, 3, 9, 1, 1, 1], int, size_max=9, count_max=2)] == [
        [4, 4],
        [3],
        [9],
        [1, 1],
        [1],
    ]


def test_an_item_that_is_too_large_is_by_itself() -> None:
    assert [*groups_of([1, 50, 1], int, size_max=9)] == [[1], [50], [1]]
    assert [*groups_of([], int, size_max=9)] == []


def test_a_group_is_made_when_it_is_asked_for() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in (5, 5, 5, 5):
            taken.append(item)
            yield item

    next(groups_of(items(), int, size_max=9))

    assert len(taken) == 2
