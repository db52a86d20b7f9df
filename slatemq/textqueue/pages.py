r"""A piece of a file in memory, with what is known of all its entries together.

An entry that a scan gives is no more than its page and its place among those that are wanted, so
that there is next to nothing to do for each. What a program asks of one is found for all of the
page, in a few calls; here where queued messages are wanted::

    place 0                            place 1
    -a\n second line\n\v=1\n\n   =b\n  -c
    starts[0]                  ends[0] starts[1]   ends[1]
"""

from __future__ import annotations

import io
from array import array
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, compress, count

from slatemq.textqueue.controls import STATES, State
from slatemq.textqueue.texts import EVERY, begin_marks, first_bytes, text_of, texts_in

NEWLINE = b"\n"

_INNER = b" \\\n"
"""With what a line does not begin an entry."""


_STATES = [STATES.get(first, State.UNKNOWN) for first in range(256)]
"""By the first byte."""


class Wishes:
    """What a program asks for while it reads, so that the pages to come have it ready.

    Attributes:
        texts: The entries' texts.
    """

    __slots__ = ("texts",)

    def __init__(self) -> None:
        """Nothing yet."""
        self.texts = False


class Page:
    """Whole and sound entries, one after the other, of which those in some states are wanted.

    Attributes:
        content: All their bytes.
        offset: Of the first byte in the file.
        line: Of the file, counted from 1.
        wanted: The states.
        state: Of each entry, where it is known; else `states` tell.
        wishes: Of the program that reads.
    """

    def __init__(
        self, content: bytes, offset: int, line: int, wanted: frozenset[State], wishes: Wishes
    ) -> None:
        """The entries are not looked at before somebody asks."""
        self.content = content
        self.offset = offset
        self.line = line
        self.wanted = wanted
        self.state: State | None = next(iter(wanted)) if len(wanted) == 1 else None
        self.wishes = wishes

    @cached_property
    def firsts(self) -> bytes:
        """The first byte of each line."""
        return first_bytes(io.BytesIO(self.content))

    @cached_property
    def marks(self) -> bytes:
        """1 for each line that begins a wanted entry, 0 for the others."""
        return begin_marks(self.firsts, self.wanted)

    @cached_property
    def starts(self) -> Sequence[int]:
        """Where in the content each entry begins."""
        return self._wanted(self._bounds)

    @cached_property
    def ends(self) -> Sequence[int]:
        """Where in the content each entry ends: where another begins, wanted or not."""
        return self._wanted(self._bounds[1:])

    @cached_property
    def lines(self) -> Sequence[int]:
        """Of the file, on which each entry begins."""
        return array("Q", compress(count(self.line), self.marks))

    @cached_property
    def states(self) -> Sequence[State]:
        """Of each entry."""
        return list(map(_STATES.__getitem__, compress(self.firsts, self.marks)))

    @cached_property
    def texts(self) -> list[str]:
        """Of each entry."""
        self.wishes.texts = True
        return texts_in(self.content, self.wanted) or []

    def raw(self, place: int) -> bytes:
        """The entry with all its bytes."""
        return self.content[self.starts[place] : self.ends[place]]

    @cached_property
    def _bounds(self) -> array[int]:
        """Where in the content entries begin, wanted or not, and where one more would."""
        offsets = accumulate(map(len, io.BytesIO(self.content)), initial=0)
        return array("Q", compress(offsets, begin_marks(self.firsts, EVERY) + b"\1"))

    def _wanted(self, every: array[int]) -> array[int]:
        """Of what is known of every entry, what is of those that are wanted."""
        if self.wanted == EVERY:
            return every
        return array("Q", compress(every, compress(self.marks, begin_marks(self.firsts, EVERY))))


class _Single(Page):
    """A page of one entry, which may be long: it is never split into lines."""

    @cached_property
    def texts(self) -> list[str]:
        self.wishes.texts = True
        return [text_of(self.content)]


def last_beginning(content: bytes, start: int = 0) -> int | None:
    """Where the last entry begins that has a newline before it, not before `start`."""
    end = len(content)
    while (place := content.rfind(NEWLINE, start, end)) >= 0:
        if place + 1 < len(content) and content[place + 1] not in _INNER:
            return place + 1
        end = place
    return None


def alone(raw: bytes, offset: int, line: int) -> Page:
    """A page of one entry."""
    page = _Single(raw, offset, line, EVERY, Wishes())
    page.starts, page.ends, page.lines = (0,), (len(raw),), (line,)
    page.state = _STATES[raw[0]]
    return page
