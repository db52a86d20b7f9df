r"""The texts of many entries at once; no entry is looked at by itself.

Continuations are folded into their first lines, and other lines end with another character from
then on, so that a text ends where its line does. Where most lines begin wanted entries, a split is
enough; else one expression finds these lines::

    -a\n second line\n\v=1\n=unwanted\n-b\n
    -a\nsecond line\x1d\v=1\x1d=unwanted\x1d-b\x1d
     [            ]                         []         what is found

Where lines are long, so that looking at each byte takes longer than looking at each line, only the
first characters of lines are looked at: here `-`, a space, `\`, `=` and `-`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import compress
from operator import itemgetter

from slatemq.textqueue.controls import CONTROLS, State

EVERY = frozenset(State)

SAMPLE_LENGTH = 2000
"""At the beginning, or the first two lines, which tell what kinds of lines there are."""

ALIKE_SHARE = 0.7
"""Of lines that begin wanted entries, from which on a split takes less time than an expression."""

LONG_LENGTH = 150
"""Of continued lines, from which on looking at each line takes less time than at each character."""

_FOLD, _END = "\x1e", "\x1d"
"""Before a continuation while it is folded, and then after each other line; rare in texts."""

_FIRST = itemgetter(0)
_WITHOUT_ENDS = itemgetter(slice(1, -1))

# Where one literal character comes first, searching is fast: faster than by str for two of them.
_CONTINUATION = re.compile(r"\n ")
_CONTINUATIONS = re.compile(r"(?:\n++ [^\n]*+)++")
_BEFORE_CONTINUATION = re.compile(r"\n++ ")
_LATE = re.compile(r"\n\\[^\n]*+\n++ ")
_APART = re.compile(rf"{_END}(?:\\[^\n{_END}]*+)?+\n")
"""A folded continuation after a blank line or a variable."""

_SECOND_FIRSTS = re.compile(rb"\n(?=(.))", re.DOTALL)
"""The first characters of all lines but the first."""

_UNWANTED = re.compile(rb"\0[\0 ]*+")
"""Entries with their continuations, and variables, in the kinds of lines."""


def is_late(text: str) -> bool:
    """Whether a continuation follows a variable; most files have none of the two."""
    return "\\" in text and bool(_CONTINUATION.search(text) and _LATE.search(text))


def texts_in(content: bytes | memoryview, states: frozenset[State] = EVERY) -> list[str] | None:
    """The texts of the entries in these states; the content is whole entries.

    None where a continuation follows a variable. Raises UnicodeDecodeError.
    """
    text = str(content, "utf-8")
    if not states:
        return []
    sample = bytes(content[: max(SAMPLE_LENGTH, 2 * text.find("\n"))])
    firsts = b"".join(_SECOND_FIRSTS.findall(sample))
    folds_count, blanks_count = firsts.count(b" "), firsts.count(b"\n")
    if folds_count and len(sample) > LONG_LENGTH * len(firsts):
        return _line_by_line(bytes(content), states)
    begun_count = firsts.translate(_kinds(states)).count(1)
    ends_count = 2 if blanks_count > ALIKE_SHARE * begun_count else 1
    if begun_count < ALIKE_SHARE * (len(firsts) - folds_count - blanks_count):
        ends_count = 0
    found: list[str] | None = None
    if not folds_count and (ends_count or not _CONTINUATION.search(text)):
        found = _found(text, "\n", states, ends_count)
    elif _FOLD not in text and _END not in text:
        folded = _FOLD.join(_CONTINUATION.split(text)).replace("\n", _END).replace(_FOLD, "\n")
        found = _found(folded, _END, states, ends_count)
    return found if found is not None else _line_by_line(bytes(content), states)


def all_texts(content: bytes) -> list[str]:
    """Of every entry; the content is whole entries, and known to be sound."""
    return texts_in(content) or []


def _found(text: str, end: str, states: frozenset[State], ends_count: int) -> list[str] | None:
    """What lines that end so give; None where a continuation is not beside its text.

    Most of them begin wanted entries, after so many ends; 0 where they do not.
    """
    found = _split(text, end, states, end * ends_count) if ends_count else None
    if found is not None:
        return found
    if ends_count and end == "\n" and _CONTINUATION.search(text):
        return None
    texts = _first_line(end, states).findall(end + text)
    # Others are of entries that nobody wants.
    if end != "\n" and "".join(texts).count("\n") < text.count("\n") and _APART.search(text):
        return None
    return texts


def _split(text: str, end: str, states: frozenset[State], ends: str) -> list[str] | None:
    """What is between such ends, if hardly anything else is between the texts."""
    between = _beginning(ends, end, states)
    texts = between.split(text)
    texts[-1] = texts[-1].rstrip(end)
    joined = "".join(texts)
    head = ""
    if between.match(ends + text[0]):
        texts[0] = texts[0][1:]
    else:
        head = texts.pop(0)
    if end not in joined:
        return texts
    if ends != end:
        return None
    others = [head]

    def first_text(part: str) -> str:
        text, _, other = part.partition(end)
        others.append(other)
        if other[:1] in (" ", "\n") and (more := _CONTINUATIONS.match(part, len(text))):
            return text + _BEFORE_CONTINUATION.sub("\n", more[0])
        return text

    texts = [first_text(part) if end in part else part for part in texts]
    # After each of them a wanted entry begins, so that none goes on with the next.
    rest = f"{end}-{end}".join(others)
    if (_LATE if end == "\n" else _APART).search(rest):
        return None
    return texts


@lru_cache
def _beginning(before: str, end: str, states: frozenset[State]) -> re.Pattern[str]:
    """Of an entry in one of these states, with what is before it; a line ends so."""
    return re.compile(before + _wanted(end, states))


@lru_cache
def _first_line(end: str, states: frozenset[State]) -> re.Pattern[str]:
    """Of an entry in one of these states, without its control character; it ends so."""
    rest = "(.*)" if end == "\n" else rf"([^{end}]*+)"
    return re.compile(f"{end}{_wanted(end, states)}{rest}")


def _wanted(end: str, states: frozenset[State]) -> str:
    """What an entry in one of these states begins with, for an expression."""
    if State.UNKNOWN in states:
        others = "".join(re.escape(CONTROLS[state]) for state in EVERY - states)
        return rf"[^ \\\n{end}{others}]"
    return "[" + "".join(re.escape(CONTROLS[state]) for state in states) + "]"


def _line_by_line(content: bytes, states: frozenset[State]) -> list[str] | None:
    """As `texts_in`, for lines that are long or cannot be folded."""
    lines = io.BytesIO(content).readlines()
    if not content.endswith(b"\n"):
        lines[-1] += b"\n"
    firsts = bytes(map(_FIRST, lines))
    if b"\n" in firsts:
        lines = list(filter(b"\n".__ne__, lines))
        firsts = firsts.replace(b"\n", b"")
    if b"\\ " in firsts:
        return None
    kept: Iterator[bytes] = map(_WITHOUT_ENDS, lines)
    if not firsts.isascii():
        # The first character has several bytes.
        firsts_too = zip(lines, kept, firsts, strict=True)
        kept = (
            line.decode()[1:-1].encode() if first > 0x7F else most
            for line, most, first in firsts_too
        )
    kinds = firsts.translate(_kinds(states))
    if b"\0" in kinds:
        kinds = _UNWANTED.sub(lambda found: bytes(len(found[0])), kinds)
        kept, kinds = compress(kept, kinds), kinds.replace(b"\0", b"")
    each_count = max(kinds.find(1, 1), 1)
    groups: Iterable[Sequence[bytes]]
    if kinds == (b"\1" + b" " * (each_count - 1)) * (len(kinds) // each_count):
        # As many lines in each: taking them together is twice as fast.
        groups = zip(*[kept] * each_count, strict=True)
    else:
        starts = [place for place, kind in enumerate(kinds) if kind == 1]
        groups = map(list(kept).__getitem__, map(slice, starts, [*starts[1:], None]))
    return list(map(bytes.decode, map(b"\n".join, groups)))


@lru_cache
def _kinds(states: frozenset[State]) -> bytes:
    """To translate first characters: 1 where an entry is wanted, a space, and 0 for the others."""
    kinds = bytearray([State.UNKNOWN in states] * 256)
    for state, control in CONTROLS.items():
        kinds[ord(control)] = state in states
    kinds[ord("\\")], kinds[ord("\n")], kinds[ord(" ")] = 0, 0, ord(" ")
    return bytes(kinds)
