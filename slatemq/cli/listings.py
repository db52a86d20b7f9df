"""Listings of all brokers: what came is shown, then the command fails for the brokers missing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from slatemq.errors import INCOMPLETE, SHARDS, Unavailable

T = TypeVar("T")


@dataclass
class Listing(Generic[T]):
    """The items that came, and why others are missing, if they are."""

    items: list[T]
    problem: Unavailable | None = None

    def check_complete(self) -> None:
        """Raises Unavailable (INCOMPLETE) that names the brokers which did not answer."""
        if self.problem is not None:
            raise self.problem


async def listing_of(items: AsyncIterator[T]) -> Listing[T]:
    """All items. Raises what the client raises, unless the listing is merely incomplete."""
    listing: Listing[T] = Listing([])
    try:
        async for item in items:
            listing.items.append(item)
    except Unavailable as error:
        if error.reason != INCOMPLETE or SHARDS not in error.metadata:
            raise
        listing.problem = error
    return listing


def silent_brokers(shards: Iterable[int]) -> str:
    """A note about brokers whose part of an answer is missing."""
    named = [str(shard) for shard in sorted(shards)]
    if len(named) == 1:
        return f"broker shard {named[0]} did not answer: its queues are not listed"
    return f"broker shards {', '.join(named)} did not answer: their queues are not listed"
