"""A bucket of available messages in memory, and where in it each message stood."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from libs.storage.buckets import BucketKind
from libs.storage.queues import AvailableMessage

_BY_PLACE = itemgetter(0)


class Place(NamedTuple):
    """Which bucket a waiting message lies in."""

    priority: int
    kind: BucketKind
    order: int


class Bucket:
    """One record of available messages. Its first `start` messages are taken already."""

    __slots__ = (
        "first_place",
        "generation",
        "items",
        "next_place",
        "order",
        "places",
        "start",
        "stored",
    )

    def __init__(
        self, order: int, items: list[AvailableMessage], *, start: int = 0, stored: bool = False
    ) -> None:
        self.order = order
        self.items = items
        self.start = start
        self.stored = stored  # whether a commit wrote a row for it, so that removing it deletes one
        self.generation = 0  # the commit that wrote it last
        # Where each message stood when it came, so that it can be given back there. As long as
        # messages only leave at the front, that of the first one says it all.
        self.first_place = 0
        self.next_place = len(items)
        self.places: list[int] | None = None

    @property
    def left(self) -> int:
        """How many messages are left."""
        return len(self.items) - self.start

    def index_of(self, message_id: int) -> int | None:
        """Where a message is, if it is here."""
        for index in range(self.start, len(self.items)):
            if self.items[index].message_id == message_id:
                return index
        return None

    def place(self, index: int) -> int:
        """Where the message at this index stood when it came."""
        return self.first_place + index if self.places is None else self.places[index]

    def places_of(self, first: int, end: int) -> Sequence[int]:
        """As `place`, of the messages between two indexes."""
        if self.places is None:
            return range(self.first_place + first, self.first_place + end)
        return self.places[first:end]

    def append(self, items: Iterable[AvailableMessage]) -> None:
        """Adds messages at the end."""
        before = len(self.items)
        self.items.extend(items)
        first = self.next_place
        self.next_place += len(self.items) - before
        if self.places is not None:
            self.places.extend(range(first, self.next_place))

    def trim(self) -> None:
        """Forgets the messages that are taken."""
        if self.places is None:
            self.first_place += self.start
        else:
            del self.places[: self.start]
        del self.items[: self.start]
        self.start = 0

    def keep(self, until: int, kept: Sequence[int]) -> None:
        """Forgets the messages before index `until`, but for those at the indexes `kept`."""
        left = [*kept, *range(until, len(self.items))]
        self.places = [self.place(index) for index in left]
        self.items = [self.items[index] for index in left]
        self.start = 0

    def remove(self, indexes: Collection[int]) -> None:
        """Forgets the messages at these indexes, and those that are taken."""
        end = len(self.items)
        self.keep(end, [index for index in range(self.start, end) if index not in indexes])

    def insert(self, items: Iterable[tuple[int, AvailableMessage]]) -> None:
        """Puts messages in at their (place, message)."""
        self.trim()
        here = [(self.place(index), item) for index, item in enumerate(self.items)]
        merged = sorted([*here, *items], key=_BY_PLACE)
        self.places = [place for place, _ in merged]
        self.next_place = max(self.next_place, self.places[-1] + 1)
        self.items = [item for _, item in merged]
