"""Patterns of names, as a policy has them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_NOTHING: Final = "(?!)"


class Pattern:
    """Texts that a `*` may stand in for any number of characters of."""

    def __init__(self, patterns: Iterable[str]) -> None:
        texts = tuple(patterns)
        self._has_all = "*" in texts
        expression = "|".join(map(_expression, texts)) if texts else _NOTHING
        self._matches = re.compile(expression, re.DOTALL).fullmatch

    def matches(self, text: str) -> bool:
        return self._has_all or self._matches(text) is not None


def _expression(pattern: str) -> str:
    """The regular expression of a pattern, whose time grows with the text, and not faster.

    What stands between two `*` is looked for where it comes first, in an atomic group: no other
    place is tried, since what follows fits behind the first one if it fits anywhere.
    """
    first, *others = map(re.escape, pattern.split("*"))
    if not others:
        return first
    *middle, last = others
    return first + "".join(f"(?>.*?{part})" for part in middle if part) + ".*" + last
