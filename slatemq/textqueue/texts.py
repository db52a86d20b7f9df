r"""The texts of many entries at once; no entry is looked at by itself.

Continuations are folded into their first lines, so that a text ends where its line does, whatever
else follows; one expression finds these lines. Where entries are alike, a split is enough::

    -a\n second line\n\v=1\n=unwanted\n-b\n
    -a\x1esecond line\n\v=1\n=unwanted\n-b\n
     [             ]                     []       what is found

Where lines are long, so that looking at each byte takes longer than looking at each line, only the
first characters of lines are looked at: here `-`, a space, `\`, `=` and `-`.
"""

from __future__ import annotations

import io
import re
from functools import lru_cache
from itertools import compress, count, repeat
from operator import itemgetter
from typing import NamedTuple

from slatemq.textqueue.controls import CONTROLS, STATES, State

EVERY = frozenset(State)

SAMPLE_LENGTH = 1000
"""At the beginning, which tells how long lines are and whether most entries are alike."""

MIXED_LENGTH, LONG_LENGTH = 80, 200
"""Of lines of several kinds, and of any, from which on looking at each line takes less time than at
each character."""

ALIKE_SHARE = 0.7
"""Of lines that begin wanted entries, from which on a split takes less time than an expression."""

_FOLD = "\x1e"
"""Between lines of a text, while it is found; rare in texts."""

_FIRST = itemgetter(0)
_WITHOUT_ENDS = itemgetter(slice(1, -1))

# Where literals come first and alone, searching is fast.
_CONTINUATION = re.compile(r"\n ")
_LATE = re.compile(r"\n\\[^\n]*+\n++ ")
_APART = re.compile(rf"\n(?:\\[^\n{_FOLD}]*+)?+{_FOLD}")
"""A folded continuation after a blank line or a variable."""


_TEXT_LINES = re.compile(rb"\x01 *+")
"""Of an entry that is wanted, in the kinds of lines."""


class Found(NamedTuple):
    """The texts, and how many newlines are in the bytes that they are from."""

    texts: list[str]
    newlines_count: int


def is_late(text: str) -> bool:
    """Whether a continuation follows a variable; most files have none of the two."""
    return "\\" in text and bool(_CONTINUATION.search(text) and _LATE.search(text))


def texts_in(content: bytes, states: frozenset[State] = EVERY) -> Found | None:
    """The texts of the entries in these states; the content is whole entries.

    None where a continuation follows a variable. Raises UnicodeDecodeError.
    """
    lines_count = content.count(b"\n", 0, SAMPLE_LENGTH)
    length = min(len(content), SAMPLE_LENGTH) // (lines_count or 1)
    if length > LONG_LENGTH:
        return _line_by_line(content, states)
    text = "\n" + content.decode()
    is_open = text[-1] != "\n"
    if is_open:
        text += "\n"
    found = _split(text, states)
    if found is None:
        is_folded = _CONTINUATION.search(text) is not None
        if _FOLD in text or (length > MIXED_LENGTH and not is_folded):
            return _line_by_line(content, states)
        if is_folded:
            found = _folded(text, states)
        else:
            found = Found(_first_lines(states).findall(text), text.count("\n") - 1)
    if found is None:
        return _line_by_line(content, states)
    return Found(found.texts, found.newlines_count - is_open)


def all_texts(content: bytes) -> list[str]:
    """Of every entry; the content is whole entries, and known to be sound."""
    found = texts_in(content)
    return found.texts if found is not None else []


def _folded(text: str, states: frozenset[State]) -> Found | None:
    """What is found when continuations are folded; None where one stands apart from its text."""
    folded = _FOLD.join(text.split("\n "))
    folds_count = len(text) - len(folded)
    found = _split(folded, states)
    if found is None:
        found = Found(_first_lines(states).findall(folded), folded.count("\n") - 1)
    # Continuations that are not in these texts: of unwanted entries, or after something else.
    if "".join(found.texts).count(_FOLD) < folds_count and _APART.search(folded):
        return None
    texts = list(map(str.replace, found.texts, repeat(_FOLD), repeat("\n")))
    return Found(texts, found.newlines_count + folds_count)


def _split(text: str, states: frozenset[State]) -> Found | None:
    """The texts, if most lines begin wanted entries; None where there are continuations."""
    between = _between(text[:SAMPLE_LENGTH], states)
    if not between:
        return None
    parts = text[2:].split(between)
    last = parts[-1]
    parts[-1] = last.rstrip("\n")
    newlines_count = (len(between) - 1) * (len(parts) - 1) + len(last) - len(parts[-1])
    if "\n" not in "".join(parts):
        return Found(parts, newlines_count)
    if len(between) > 2 or len(states) > 1:
        return None
    others: list[str] = []

    def first_line(part: str) -> str:
        first, newline, rest = part.partition("\n")
        others.append(newline + rest)
        return first

    texts = [first_line(part) if "\n" in part else part for part in parts]
    between_texts = "".join(others)
    if _CONTINUATION.search(between_texts):
        return None
    return Found(texts, newlines_count + between_texts.count("\n"))


def _between(sample: str, states: frozenset[State]) -> str:
    """Newlines and a control character, with which most lines begin; else nothing."""
    control = sample[1]
    found = re.search(rf"\n++{re.escape(control)}", sample[1:])
    if found is None or STATES.get(ord(control)) not in states:
        return ""
    lines_count = sample.count(found[0]) * (len(found[0]) - 1)
    return found[0] if lines_count > ALIKE_SHARE * sample.count("\n") else ""


@lru_cache
def _first_lines(states: frozenset[State]) -> re.Pattern[str]:
    """The first line of an entry in one of these states, without its control character."""
    if State.UNKNOWN in states:
        others = "".join(re.escape(CONTROLS[state]) for state in EVERY - states)
        return re.compile(rf"\n[^ \\\n{others}]([^\n]*+)")
    wanted = "".join(re.escape(CONTROLS[state]) for state in states)
    return re.compile(rf"\n[{wanted}]([^\n]*+)")


def _line_by_line(content: bytes, states: frozenset[State]) -> Found | None:
    """As `texts_in`, for lines that are long or cannot be folded."""
    if not content.isascii():
        content.decode()
    lines = io.BytesIO(content).readlines()
    newlines_count = len(lines) - (not content.endswith(b"\n"))
    if newlines_count < len(lines):
        lines[-1] += b"\n"
    firsts = bytes(map(_FIRST, lines))
    if b"\n" in firsts:
        lines = list(filter(b"\n".__ne__, lines))
        firsts = firsts.replace(b"\n", b"")
    if b"\\ " in firsts:
        return None
    kept = list(map(_WITHOUT_ENDS, lines))
    if not firsts.isascii():
        # The first character has several bytes.
        for place in compress(count(), map((0x7F).__lt__, firsts)):
            kept[place] = lines[place].decode()[1:-1].encode()
    kinds = firsts.translate(_kinds(states))
    if b" " not in kinds:
        return Found(list(map(bytes.decode, compress(kept, kinds))), newlines_count)
    texts = [
        b"\n".join(kept[start:end]).decode()
        for start, end in map(re.Match.span, _TEXT_LINES.finditer(kinds))
    ]
    return Found(texts, newlines_count)


@lru_cache
def _kinds(states: frozenset[State]) -> bytes:
    """To translate first characters: 1 where an entry is wanted, a space, and 0 for the others."""
    kinds = bytearray([State.UNKNOWN in states] * 256)
    for state, control in CONTROLS.items():
        kinds[ord(control)] = state in states
    kinds[ord("\\")], kinds[ord(" ")] = 0, ord(" ")
    return bytes(kinds)
