"""The order in which publishes are handed to the commit, whatever each of them waits for before.

Publishes of a line are prepared beside one another. Then each waits until it is the first that has
not been handed over, given up, or stepped aside. Who is aside waits for another publish, which may
be behind it in the line, and does not wait for its turn: so the first one always goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Line:
    """Places in the order in which they were taken. One event loop."""

    def __init__(self) -> None:
        self._places: dict[Place, None] = {}

    @contextmanager
    def place(self) -> Iterator[Place]:
        """A new place at the end, left at the end of the block if not before."""
        place = Place(self)
        self._places[place] = None
        try:
            yield place
        finally:
            self.leave(place)

    @property
    def is_taken(self) -> bool:
        """Whether there is any place."""
        return bool(self._places)

    def leave(self, place: Place) -> None:
        self._places.pop(place, None)
        self.wake_first()

    def has_before(self, place: Place) -> bool:
        """Whether the turn of this place has not come."""
        return place in self._places and self._first() is not place

    def wake_first(self) -> None:
        first = self._first()
        if first is not None:
            first.wake()

    def _first(self) -> Place | None:
        return next((place for place in self._places if not place.is_aside), None)


class Place:
    """One place of a line.

    Attributes:
        is_aside: Whether those behind it do not wait for it now.
    """

    def __init__(self, line: Line) -> None:
        self.is_aside = False
        self._line = line
        self._woken: asyncio.Future[None] | None = None

    async def turn(self) -> None:
        """Wait until it is the first; at once after `leave`."""
        while self._line.has_before(self):
            self._woken = asyncio.get_running_loop().create_future()
            await self._woken

    def wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def leave(self) -> None:
        """Let the next one come, at the next step of the event loop."""
        self._line.leave(self)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let those behind it pass meanwhile; do not wait for its turn inside."""
        self.is_aside = True
        self._line.wake_first()
        try:
            yield
        finally:
            self.is_aside = False
