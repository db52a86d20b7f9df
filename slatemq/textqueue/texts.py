r"""The texts of many entries at once; no entry is looked at by itself.

What stands between a text and the next one that is wanted is matched by one expression: variables,
blank lines, and whole entries that nobody wants::

    -a\n second line\n\v=1\n=unwanted\n its second line\n-b\n
     |-------------|[                                   ]|-| [-]
"""

from __future__ import annotations

import re
from functools import lru_cache

from slatemq.textqueue.controls import CONTROLS, STATES, State

EVERY = frozenset(State)

SAMPLE_LENGTH = 1000
"""At the beginning, which tells whether it may pay to suppose that all lines are alike."""

SHORT_LENGTH = 200
"""Of texts in which looking for two characters takes less than looking for a pattern."""

# Where a literal comes first, searching is as fast as memchr.
_CONTINUED = re.compile(r"\n(?= )")
_LATE = re.compile(r"\n\\[^\n]*+\n++ ")
_FOLD = re.compile(r"\n\n*+ ")


@lru_cache
def _between(states: frozenset[State], is_continued: bool) -> re.Pattern[str]:
    """From a text to the next of an entry in these states, or to the end."""
    known = {state: re.escape(control) for state, control in CONTROLS.items()}
    if State.UNKNOWN in states:
        others = "".join(control for state, control in known.items() if state not in states)
        begins, passed_over = rf"[^ \\\n{others}]", rf"[\\{others}]"
    else:
        wanted = "".join(known[state] for state in states)
        begins, passed_over = f"[{wanted}]", rf"[^ \n{wanted}]"
    # Nothing is tried a second way (possessive), nor again from each of many blank lines.
    if is_continued:
        blank = r"(?:\n(?<!\n\n\n)\n*+)?+"
        inner = rf"{blank}(?:{passed_over}[^\n]*+\n(?:(?: [^\n]*+)?+\n)*+)*+"
    else:
        inner = rf"(?:(?:{passed_over}[^\n]*+)?+\n)*+"
    return re.compile(rf"\n{inner}(?:{begins}|\Z)")


def is_late(text: str) -> bool:
    """Whether a continuation follows a variable; most files have none of the two."""
    return "\\" in text and bool(_CONTINUED.search(text) and _LATE.search(text))


def texts_in(
    content: bytes, newlines_count: int, states: frozenset[State] = EVERY
) -> list[str] | None:
    """The texts of the entries in these states; the content is whole entries.

    None where a continuation follows a variable. Raises UnicodeDecodeError.
    """
    text = content.decode()
    if not text.endswith("\n"):
        text, newlines_count = text + "\n", newlines_count + 1
    begins = "\n" + text[0]
    sample = text[:SAMPLE_LENGTH]
    if sample.count(begins) + 1 >= sample.count("\n") and STATES.get(content[0]) in states:
        found = text[1:-1].split(begins)
        if len(found) == newlines_count:
            return found
    is_continued = _CONTINUED.search(text) is not None
    if is_continued and is_late(text):
        return None
    found = _between(states, is_continued).split("\n" + text)[1:-1]
    if not is_continued:
        return found
    if len(text) < SHORT_LENGTH * len(found) and "\n\n" not in text:
        return [text.replace("\n ", "\n") for text in found]
    return [text if "\n" not in text else _FOLD.sub("\n", text) for text in found]
