"""A bucket of available messages in memory, and where in it each message stood."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import NamedTuple

from libs.storage.layout.buckets import BucketKind
from libs.storage.records.queues import (
    AvailableMessage,
    available_message,
    encode_active,
    encode_new,
)

_BY_PLACE = itemgetter(0)
_ATTEMPTS, _DEADLINE = attrgetter("attempts"), attrgetter("retention_deadline_ms")


class Place(NamedTuple):
    """Which bucket a waiting message lies in."""

    priority: int
    kind: BucketKind
    order: int


class Columns(NamedTuple):
    """Messages of one priority that wait for nothing and were never claimed.

    `deadlines_ms` is empty if none has one.
    """

    message_ids: Sequence[int]
    priority: int
    deadlines_ms: Sequence[int]

    def parts(self, count: int) -> Sequence[Columns]:
        """Splits them into parts of at most `count` messages."""
        ids, priority, deadlines_ms = self
        if len(ids) <= count:
            return (self,) if ids else ()
        return [
            Columns(ids[start : start + count], priority, deadlines_ms[start : start + count])
            for start in range(0, len(ids), count)
        ]

    def messages(self) -> list[AvailableMessage]:
        zeros = repeat(0)
        ids, priority, deadlines_ms = self
        rows = zip(ids, repeat(priority), zeros, deadlines_ms or zeros, zeros, strict=False)
        return list(map(available_message, rows))


class Bucket:
    """One record of available messages. Its first `start` messages are removed already.

    What was assigned stays in columns until a message is looked at: most wait for long, and ten
    thousand queues may get a few each in one commit.
    """

    __slots__ = (
        "_columns",
        "_items",
        "_worst",
        "first_place",
        "generation",
        "next_place",
        "order",
        "places",
        "start",
        "stored",
    )

    def __init__(
        self,
        order: int,
        items: list[AvailableMessage],
        *,
        start: int = 0,
        stored: bool = False,
        columns: Columns | None = None,
    ) -> None:
        """Pass the messages as `items` or as `columns`, not both."""
        self.order = order
        self._items = items
        self._columns = columns
        self._worst: tuple[int, int] | None = None
        self.start = start
        self.stored = stored  # whether a commit wrote a row for it, so that removing it deletes one
        self.generation = 0  # the commit that wrote it last
        # Where each message stood when it came, so that it can be reinserted there. As long as
        # messages only leave at the front, the place of the first one implies the others.
        self.first_place = 0
        self.next_place = len(items) if columns is None else len(columns.message_ids)
        self.places: list[int] | None = None

    @property
    def items(self) -> list[AvailableMessage]:
        """The messages, including those already removed."""
        if self._columns is not None:
            self._items, self._columns = self._columns.messages(), None
        return self._items

    @property
    def count(self) -> int:
        """How many messages it has, including those already removed."""
        return len(self._items if self._columns is None else self._columns.message_ids)

    def value(self) -> bytes:
        if self._columns is None:
            return encode_active(self._items, ())
        return encode_new(*self._columns)

    @property
    def worst(self) -> tuple[int, int]:
        """The most attempts of a message here, and the first retention deadline; 0: none.

        Messages that were removed since may still count.
        """
        if self._worst is None:
            deadlines_ms = set(map(_DEADLINE, self.items)) - {0}
            attempts = max(map(_ATTEMPTS, self.items), default=0)
            self._worst = attempts, min(deadlines_ms, default=0)
        return self._worst

    @property
    def left(self) -> int:
        return self.count - self.start

    def index_of(self, message_id: int) -> int | None:
        items = self.items
        for index in range(self.start, len(items)):
            if items[index].message_id == message_id:
                return index
        return None

    def place(self, index: int) -> int:
        """Where the message at this index stood when it came."""
        return self.first_place + index if self.places is None else self.places[index]

    def places_of(self, first: int, end: int) -> Sequence[int]:
        """Like `place`, of the messages between two indexes."""
        if self.places is None:
            return range(self.first_place + first, self.first_place + end)
        return self.places[first:end]

    def append(self, items: Iterable[AvailableMessage]) -> None:
        before = self.count
        self.items.extend(items)
        self._worst = None
        first = self.next_place
        self.next_place += self.count - before
        if self.places is not None:
            self.places.extend(range(first, self.next_place))

    def trim(self) -> None:
        """Drops the messages that are removed already."""
        if self.places is None:
            self.first_place += self.start
        else:
            del self.places[: self.start]
        del self.items[: self.start]
        self.start = 0

    def keep(self, until: int, kept: Sequence[int]) -> None:
        """Drops the messages before index `until`, except those at the indexes `kept`."""
        items = self.items
        left = [*kept, *range(until, len(items))]
        self.places = [self.place(index) for index in left]
        self._items = [items[index] for index in left]
        self._worst = None
        self.start = 0

    def remove(self, indexes: Collection[int]) -> None:
        """Drops the messages at these indexes, and those before `start`."""
        end = self.count
        self.keep(end, [index for index in range(self.start, end) if index not in indexes])

    def insert(self, items: Iterable[tuple[int, AvailableMessage]]) -> None:
        """Inserts messages at their places: (place, message)."""
        self.trim()
        here = [(self.place(index), item) for index, item in enumerate(self.items)]
        merged = sorted([*here, *items], key=_BY_PLACE)
        self.places = [place for place, _ in merged]
        self.next_place = max(self.next_place, self.places[-1] + 1)
        self._items = [item for _, item in merged]
        self._worst = None
