"""Merging streams that are in one order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from heapq import heappop, heappush
from typing import Any, TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncIterator[T]], key: Callable[[T], Any]) -> AsyncIterator[T]:
    """The items of all streams by key, where each stream has its own in that order."""
    heads: list[tuple[Any, int, T]] = []

    async def take(number: int) -> None:
        item = await anext(streams[number], None)
        if item is not None:
            heappush(heads, (key(item), number, item))

    for number in range(len(streams)):
        await take(number)
    while heads:
        _, number, item = heappop(heads)
        yield item
        await take(number)
