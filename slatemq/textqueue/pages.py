r"""A part of a file in memory, with the properties of all its entries.

An entry of a scan is only its page and its place among the wanted entries, so that a scan does
next to nothing for each. A property is computed for all entries of the page in a few calls, on
first use; here where queued messages are wanted::

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
"""How a line begins that does not begin an entry."""

_STATES = [STATES.get(first, State.UNKNOWN) for first in range(256)]
"""By the first byte."""


class Wishes:
    """The properties that a program has used, which later pages compute in advance.

    Attributes:
        texts: Whether it has used texts.
    """

    __slots__ = ("texts",)

    def __init__(self) -> None:
        self.texts = False


class Page:
    """Consecutive complete and valid entries, of which those in some states are wanted.

    Attributes:
        content: All their bytes.
        offset: Of the first byte in the file.
        line: Of the first entry in the file, from 1.
        wanted: The wanted states.
        state: Of all wanted entries, where that is one; else see `states`.
        wishes: Of the program that reads.
    """

    def __init__(
        self, content: bytes, offset: int, line: int, wanted: frozenset[State], wishes: Wishes
    ) -> None:
        self.content = content
        self.offset = offset
        self.line = line
        self.wanted = wanted
        self.state: State | None = next(iter(wanted)) if len(wanted) == 1 else None
        self.wishes = wishes

    @cached_property
    def firsts(self) -> bytes:
        return first_bytes(io.BytesIO(self.content))

    @cached_property
    def marks(self) -> bytes:
        """1 for each line that begins a wanted entry, else 0."""
        return begin_marks(self.firsts, self.wanted)

    @cached_property
    def starts(self) -> Sequence[int]:
        """The offset in the content of each wanted entry."""
        return self._wanted(self._bounds)

    @cached_property
    def ends(self) -> Sequence[int]:
        """The end in the content of each wanted entry: where the next entry begins."""
        return self._wanted(self._bounds[1:])

    @cached_property
    def lines(self) -> Sequence[int]:
        """The line in the file of each wanted entry."""
        return array("Q", compress(count(self.line), self.marks))

    @cached_property
    def states(self) -> Sequence[State]:
        return list(map(_STATES.__getitem__, compress(self.firsts, self.marks)))

    @cached_property
    def texts(self) -> list[str]:
        self.wishes.texts = True
        return texts_in(self.content, self.wanted) or []

    def raw(self, place: int) -> bytes:
        return self.content[self.starts[place] : self.ends[place]]

    @cached_property
    def _bounds(self) -> array[int]:
        """The offsets in the content of all entries, and its end."""
        offsets = accumulate(map(len, io.BytesIO(self.content)), initial=0)
        return array("Q", compress(offsets, begin_marks(self.firsts, EVERY) + b"\1"))

    def _wanted(self, every: array[int]) -> array[int]:
        if self.wanted == EVERY:
            return every
        return array("Q", compress(every, compress(self.marks, begin_marks(self.firsts, EVERY))))


class _Single(Page):
    """A page of one entry, which is not split into lines, because it may be long."""

    @cached_property
    def texts(self) -> list[str]:
        self.wishes.texts = True
        return [text_of(self.content)]


def last_beginning(content: bytes, start: int = 0) -> int | None:
    """The offset of the last entry after a newline, from `start` on."""
    end = len(content)
    while (place := content.rfind(NEWLINE, start, end)) >= 0:
        if place + 1 < len(content) and content[place + 1] not in _INNER:
            return place + 1
        end = place
    return None


def alone(raw: bytes, offset: int, line: int) -> Page:
    page = _Single(raw, offset, line, EVERY, Wishes())
    page.starts, page.ends, page.lines = (0,), (len(raw),), (line,)
    page.state = _STATES[raw[0]]
    return page
