"""Items in groups that are not too large."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def groups_of(
    items: Iterable[T], size_of: Callable[[T], int], size_max: int, count_max: int = sys.maxsize
) -> Iterator[list[T]]:
    """The items in order, as many together as these bounds permit; a larger one is by itself."""
    group: list[T] = []
    size = 0
    for item in items:
        more = size_of(item)
        if group and (len(group) == count_max or size + more > size_max):
            yield group
            group, size = [], 0
        group.append(item)
        size += more
    if group:
        yield group
