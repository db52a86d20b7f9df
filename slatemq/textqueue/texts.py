r"""The texts of many entries at once; no entry is looked at by itself.

Continuations are folded into their first lines, so that a text ends where its line does, whatever
else follows; one expression finds these lines. Where all lines are alike, a split is enough, and
where they are long, each is looked for by itself::

    -a\n second line\n\v=1\n=unwanted\n-b\n
    -a\x1esecond line\n\v=1\n=unwanted\n-b\n
     [             ]                     []       what is found
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from slatemq.textqueue.controls import CONTROLS, STATES, State

EVERY = frozenset(State)

SAMPLE_LENGTH = 1000
"""At the beginning, which tells how long lines are and whether they may all be alike."""

MIDDLE_LENGTH, LONG_LENGTH = 130, 300
"""Of lines, at which another way of finding them is the faster one."""

_FOLD, _GAP = "\x1e", "\x1d"
"""Between lines of a text, and between texts, while they are found; rare in texts."""

_KNOWN = "".join(CONTROLS.values())

_FIRST = itemgetter(0)
_WITHOUT_ENDS = itemgetter(slice(1, -1))

# Where a literal comes first and alone, searching is fast.
_CONTINUATION = re.compile(r"\n(?= )")
_LATE = re.compile(r"\n\\[^\n]*+\n++ ")
_APART = re.compile(rf"\n(?:\\[^\n{_FOLD}]*+)?+{_FOLD}")
"""A folded continuation after a blank line or a variable."""


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
    text = "\n" + content.decode()
    is_open = text[-1] != "\n"
    if is_open:
        text += "\n"
    found = _found(text, content, states)
    return found if found is None or not is_open else Found(found.texts, found.newlines_count - 1)


def _found(text: str, content: bytes, states: frozenset[State]) -> Found | None:
    """The text is that of the content, between newlines."""
    sample = text[:SAMPLE_LENGTH]
    lines_count = sample.count("\n") - 1
    is_middle = len(sample) > MIDDLE_LENGTH * lines_count
    if sample.count(sample[:2]) >= lines_count and STATES.get(content[0]) in states:
        texts = _alike_lines(content) if is_middle else text[2:-1].split(sample[:2])
        if texts and (is_middle or text.count("\n") == len(texts) + 1):
            return Found(texts, len(texts))
    if len(sample) > LONG_LENGTH * lines_count:
        return _line_by_line(text, states)
    first_lines = _first_lines(states).findall
    if _CONTINUATION.search(text) is None:
        return Found(first_lines(text), text.count("\n") - 1)
    if is_middle or _FOLD in text or _GAP in text:
        return _line_by_line(text, states)
    folded = _FOLD.join(text.split("\n "))
    texts = first_lines(folded)
    joined = _GAP.join(texts)
    # Continuations that are not in these texts: of unwanted entries, or after something else.
    are_missed = joined.count(_FOLD) < len(text) - len(folded)
    if are_missed and _APART.search(folded):
        return _line_by_line(text, states)
    texts = joined.replace(_FOLD, "\n").split(_GAP) if texts else []
    return Found(texts, text.count("\n") - 1)


def _alike_lines(content: bytes) -> list[str]:
    """The texts, if all lines begin with the same character as the first one; else none."""
    lines = io.TextIOWrapper(io.BytesIO(content), "utf-8", newline="\n").readlines()
    if "".join(map(_FIRST, lines)).count(lines[0][0]) < len(lines):
        return []
    if lines[-1][-1] != "\n":
        lines[-1] += "\n"
    return list(map(_WITHOUT_ENDS, lines))


def all_texts(content: bytes) -> list[str]:
    """Of every entry; the content is whole entries, and known to be sound."""
    found = texts_in(content)
    return found.texts if found is not None else []


@lru_cache
def _first_lines(states: frozenset[State]) -> re.Pattern[str]:
    """The first line of an entry in one of these states, without its control character."""
    if State.UNKNOWN in states:
        others = "".join(re.escape(CONTROLS[state]) for state in EVERY - states)
        return re.compile(rf"\n[^ \\\n{others}]([^\n]*+)")
    wanted = "".join(re.escape(CONTROLS[state]) for state in states)
    return re.compile(rf"\n[{wanted}]([^\n]*+)")


def _line_by_line(text: str, states: frozenset[State]) -> Found | None:
    """As `_found`, for lines that are long or cannot be folded."""
    wanted = "".join(CONTROLS[state] for state in states if state in CONTROLS)
    passed_over = _KNOWN if State.UNKNOWN in states else None
    texts: list[str] = []
    more: defaultdict[int, list[str]] = defaultdict(list)  # lines of each text that has several
    find, start, newlines_count, is_wanted, is_over = text.find, 1, 0, False, False
    while (end := find("\n", start)) >= 0:
        control = text[start]
        if control in wanted:
            is_wanted, is_over = True, False
            texts.append(text[start + 1 : end])
        elif control == " ":
            if is_over:
                return None
            if is_wanted:
                more[len(texts) - 1].append(text[start + 1 : end])
        elif control == "\\":
            is_over = True
        elif control != "\n":
            is_wanted, is_over = passed_over is not None and control not in passed_over, False
            if is_wanted:
                texts.append(text[start + 1 : end])
        start = end + 1
        newlines_count += 1
    for place, lines in more.items():
        texts[place] = "\n".join((texts[place], *lines))
    return Found(texts, newlines_count)
