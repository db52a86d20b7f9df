r"""A piece of a file in memory, with what is known of all its entries together.

An entry that a scan gives is no more than its page and its place in it, so that there is next to
nothing to do for each. What a program asks of one is found for all of the page, in a few calls::

    place 0                       place 1   place 2
    -a\n second line\n\v=1\n\n    =b\n      -c
    starts[0]                     [1]       [2]   [3]
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, count, repeat
from operator import add

from slatemq.textqueue.texts import all_texts

NEWLINE = b"\n"

BEGINNING = re.compile(rb"\n(?=[^ \\\n])")
"""The newline before an entry. That it is a literal makes searching as fast as memchr."""

_INNER = b" \\\n"
"""With what a line does not begin an entry."""


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
    """Whole and sound entries, one after the other.

    Attributes:
        content: All their bytes.
        offset: Of the first byte in the file.
        line: Of the file, counted from 1.
        wishes: Of the program that reads.
        newlines_count: In the content.
    """

    def __init__(self, content: bytes, offset: int, line: int, wishes: Wishes) -> None:
        """The entries are not looked at before somebody asks."""
        self.content = content
        self.offset = offset
        self.line = line
        self.wishes = wishes
        self.newlines_count = content.count(NEWLINE)

    @cached_property
    def starts(self) -> Sequence[int]:
        """Where in the content each entry begins, and where one more would."""
        # What lies before each beginning, and the newlines that the split has taken.
        lengths = map(len, BEGINNING.split(self.content))
        return array("Q", map(add, accumulate(lengths, initial=0), count()))

    @cached_property
    def lines(self) -> Sequence[int]:
        """Of the file, on which each entry begins."""
        counts = map(bytes.count, BEGINNING.split(self.content), repeat(NEWLINE))
        return array("Q", map(add, accumulate(counts, initial=self.line), count()))

    def raw(self, place: int) -> bytes:
        """The entry with all its bytes."""
        return self.content[self.starts[place] : self.starts[place + 1]]

    @cached_property
    def texts(self) -> list[str]:
        """Of each entry."""
        self.wishes.texts = True
        return all_texts(self.content)


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
    page = Page(raw, offset, line, Wishes())
    page.starts, page.lines = (0, len(raw)), (line,)
    return page
