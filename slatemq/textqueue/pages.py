r"""A part of a file in memory, with the properties of all its entries.

An entry of a scan is only its page and its place among the wanted entries, so that a scan does
next to nothing for each. A property is computed for all entries of the page in a few calls, on
first use; here where queued messages are wanted::

    place 0                            place 1
    -a\n second line\n\v=1\n\n   =b\n  -c
    starts[0]                  ends[0] starts[1]   ends[1]

The texts of many entries come without a look at each entry: one regular expression splits the
content at everything between two wanted texts, which leaves the texts with their continuations::

    -a\n second line\n\v=1\n=unwanted\n-b\n
    [][            ][                 ][]       [ ]: what is split at

Where all lines are alike, this is only a newline and a character. Where lines are long, so that
looking at each byte takes longer than looking at each line, only the first characters of lines are
used: here `-`, a space, `\`, `=` and `-`.
"""

from __future__ import annotations

import io
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, compress, count, islice
from operator import itemgetter

from slatemq.textqueue.controls import CONTROLS, STATES, State

EVERY = frozenset(State)

SAMPLE_LINES = 30
"""At the beginning, to see the kinds of lines."""

SAMPLE_BYTES = 4000
"""Of these; fewer, but at least two, where lines are long."""

ALIKE_SHARE = 0.8
"""Where entries have continuations: the share of wanted entries from which on folding all is
faster."""

LONG_CONTINUED_BYTES, LONG_BYTES = 120, 250
"""Lengths of lines from which on looking at each line is faster than at each character."""

_FOLD, _END = "\x1e", "\x1d"
"""Before each folded continuation, and after each other line; rare in texts."""

_FIRST = itemgetter(0)
_WITHOUT_ENDS = itemgetter(slice(1, -1))

# For two literal characters, a compiled expression is faster than str.
_CONTINUATION = re.compile(r"\n ")
_APART = re.compile(r"(?<!\n)\n\n++ ")
"""After blank lines, sought once in each row of them."""

_NEWLINES = b"\n" * 4096
"""Blank lines at the end of an entry, which are removed together."""

_UNWANTED = re.compile(rb"\0[\0 ]*+")
"""Unwanted entries with their continuations, and variables, in the kinds of lines."""


def first_bytes(lines: Iterable[bytes]) -> bytes:
    """The first byte of each line, which may be its newline."""
    return bytes(map(_FIRST, lines))


def is_late(firsts: bytes) -> bool:
    """Whether a continuation follows a variable, by the first bytes of all lines."""
    return b"\\ " in firsts.replace(b"\n", b"")


def begin_marks(firsts: bytes, states: frozenset[State]) -> bytes:
    """1 for each line that begins an entry in one of these states, else 0."""
    return firsts.translate(_kinds(states)).replace(b" ", b"\0").replace(b"\n", b"\0")


def texts_in(content: bytes | memoryview, states: frozenset[State]) -> list[str] | None:
    """The texts of the entries in these states; the content must be complete entries.

    None where a continuation follows a variable. Raises UnicodeDecodeError.
    """
    text = str(content, "utf-8")
    sample = io.BytesIO(content[: max(SAMPLE_BYTES, 2 * text.find("\n"))])
    firsts = first_bytes(islice(sample, SAMPLE_LINES))
    is_continued = b" " in firsts
    found: list[str] | None = None
    if sample.tell() < (LONG_CONTINUED_BYTES if is_continued else LONG_BYTES) * len(firsts):
        ends_count = _ends_count(firsts.translate(_kinds(states)))
        if ends_count:
            found = _separated(text, states, ends_count, is_continued)
        if found is None:
            found = _mixed(text, states, is_continued)
    return _line_by_line(bytes(content), states) if found is None else found


def text_of(raw: bytes) -> str:
    """The text of one valid entry, with at most two more copies of it in memory."""
    end = raw.find(b"\n\\")
    if end < 0:
        end = len(raw)
    while raw.endswith(_NEWLINES, 0, end):
        end -= len(_NEWLINES)
    while raw.endswith(b"\n", 0, end):
        end -= 1
    control = raw[:4].decode(errors="ignore")[0]
    text = str(memoryview(raw)[len(control.encode()) : end], "utf-8")
    while "\n\n" in text:
        text = text.replace("\n\n", "\n")
    return text.replace("\n ", "\n")


def _ends_count(kinds: bytes) -> int:
    """The newlines before each entry, if most are alike and wanted; else 0."""
    share = ALIKE_SHARE if b" " in kinds else 1
    kinds = kinds.replace(b" ", b"")
    if kinds.count(1) >= share * len(kinds):
        return 1
    return 2 * (kinds.replace(b"\1\n", b"") in (b"", b"\1"))


def _separated(
    text: str, states: frozenset[State], ends_count: int, is_continued: bool
) -> list[str] | None:
    """The texts where almost only `ends_count` newlines separate them; None where ambiguous."""
    end = "\n"
    if is_continued:
        if _FOLD in text or _END in text:
            return None
        text, end = _FOLD.join(_CONTINUATION.split(text)), _END
        text = text.replace("\n", _END).replace(_FOLD, "\n")
    ends = end * ends_count
    texts = _beginning(ends, states).split(ends + text)
    if texts.pop(0) or not texts:
        return None
    texts[-1] = texts[-1].rstrip(end)
    return _cut_off(texts, end, states) if end in "".join(texts) else texts


def _cut_off(parts: list[str], end: str, states: frozenset[State]) -> list[str] | None:
    """The texts without other lines that follow some of them; lines end with `end`."""
    places = [place for place, part in enumerate(parts) if end in part]
    rest = end.join([_sentinel(states) + parts[place] for place in places])
    if end != "\n":
        rest = rest.replace("\n", "\n ").replace(end, "\n")
    texts = _mixed(rest, states, True)
    if texts is None or len(texts) != len(places):
        return None
    for place, text in zip(places, texts, strict=True):
        parts[place] = text
    return parts


def _mixed(text: str, states: frozenset[State], is_continued: bool) -> list[str] | None:
    """The texts among lines of all kinds; None where a continuation follows a variable."""
    texts = _between(states).split(f"\n{text}\n{_sentinel(states)}\n")
    if not texts.pop():
        parts = _APART.split(text)
        return _mixed("\n ".join(parts), states, True) if len(parts) > 1 else None
    del texts[0]
    if is_continued or "\n" in "".join(texts):
        return [one.replace("\n ", "\n") if "\n" in one else one for one in texts]
    return texts


@lru_cache
def _beginning(ends: str, states: frozenset[State]) -> re.Pattern[str]:
    """The line ends before an entry in one of these states, and its first character."""
    if State.UNKNOWN in states:
        return re.compile(rf"{ends}[^ \\\n{ends}{_controls(EVERY - states)}]")
    return re.compile(f"{ends}[{_controls(states)}]")


@lru_cache
def _between(states: frozenset[State]) -> re.Pattern[str]:
    """Everything from the end of a wanted text to the next one.

    After a continuation that is not directly below its text, everything up to the end.
    """
    if State.UNKNOWN in states:
        known = _controls(EVERY - states)
        wanted, unwanted, inside = rf"[^ \\\n{known}]", f"[{known}]", f"[ {known}]"
    else:
        known = _controls(states)
        wanted, unwanted, inside = f"[{known}]", rf"[^ \\\n{known}]", rf"[^\\\n{known}]"
    if states == EVERY:
        unwanted = "(?!)"
    line, rest = r".*+\n++", r"(?s:.)*+"
    lines = rf"(?:{inside}{line}|\\{line}(?! ))*+(?:{wanted}|\\{rest})"
    cases = (
        wanted,
        f"{unwanted}{line}(?:{wanted}|{lines})",
        rf"\\{line}(?:\\{line})*+(?:{wanted}|(?! ){lines}|{rest})",
        rf"\n++(?! ){lines}",
        rf"\n{rest}",
    )
    return re.compile(rf"\n(?:{'|'.join(cases)})")


def _sentinel(states: frozenset[State]) -> str:
    return CONTROLS.get(next(iter(states)), "?")


def _controls(states: frozenset[State]) -> str:
    return "".join(re.escape(control) for state, control in CONTROLS.items() if state in states)


def _line_by_line(content: bytes, states: frozenset[State]) -> list[str] | None:
    """Like `texts_in`, for lines that are long, or of any kind."""
    lines = io.BytesIO(content).readlines()
    if not content.endswith(b"\n"):
        lines[-1] += b"\n"
    firsts = first_bytes(lines)
    if is_late(firsts):
        return None
    if b"\n" in firsts:
        lines = list(filter(b"\n".__ne__, lines))
        firsts = firsts.replace(b"\n", b"")
    kinds = firsts.translate(_kinds(states))
    if b"\0" in kinds:
        kinds = _UNWANTED.sub(lambda found: bytes(len(found[0])), kinds)
        lines = list(compress(lines, kinds))
        firsts = bytes(compress(firsts, kinds))
        kinds = kinds.replace(b"\0", b"")
    kept: Iterator[bytes] = map(_WITHOUT_ENDS, lines)
    if not firsts.isascii():
        # The first character has several bytes.
        kept = (line.decode()[1:-1].encode() for line in lines)
    if b" " not in kinds:
        return list(map(bytes.decode, kept))
    each_count = max(kinds.find(1, 1), 1)
    groups: Iterable[Sequence[bytes]]
    if kinds == (b"\1" + b" " * (each_count - 1)) * (len(kinds) // each_count):
        # Each entry has as many lines: grouping them together is twice as fast.
        groups = zip(*[kept] * each_count, strict=True)
    else:
        starts = [place for place, kind in enumerate(kinds) if kind == 1]
        groups = map(list(kept).__getitem__, map(slice, starts, [*starts[1:], None]))
    return list(map(bytes.decode, map(b"\n".join, groups)))


@lru_cache
def _kinds(states: frozenset[State]) -> bytes:
    """A table to translate first bytes: 1 for wanted entries, space, newline, else 0."""
    kinds = bytearray([State.UNKNOWN in states] * 256)
    for state, control in CONTROLS.items():
        kinds[ord(control)] = state in states
    kinds[ord("\\")], kinds[ord("\n")], kinds[ord(" ")] = 0, ord("\n"), ord(" ")
    return bytes(kinds)


NEWLINE = b"\n"

INNER = b" \\\n"
"""How a line begins that does not begin an entry."""

_STATES = [STATES.get(first, State.UNKNOWN) for first in range(256)]
"""By the first byte."""


class UsedProperties:
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
        used: Of the program that reads.
    """

    def __init__(
        self, content: bytes, offset: int, line: int, wanted: frozenset[State], used: UsedProperties
    ) -> None:
        self.content = content
        self.offset = offset
        self.line = line
        self.wanted = wanted
        self.state: State | None = next(iter(wanted)) if len(wanted) == 1 else None
        self.used = used

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
        self.used.texts = True
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
        self.used.texts = True
        return [text_of(self.content)]


def last_beginning(content: bytes, start: int = 0) -> int | None:
    """The offset of the last entry after a newline, from `start` on."""
    end = len(content)
    while (place := content.rfind(NEWLINE, start, end)) >= 0:
        if place + 1 < len(content) and content[place + 1] not in INNER:
            return place + 1
        end = place
    return None


def alone(raw: bytes, offset: int, line: int) -> Page:
    page = _Single(raw, offset, line, EVERY, UsedProperties())
    page.starts, page.ends, page.lines = (0,), (len(raw),), (line,)
    page.state = _STATES[raw[0]]
    return page
