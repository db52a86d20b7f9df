"""Patterns of names, as a policy has them."""

from __future__ import annotations

import re
from collections.abc import Iterable


class Pattern:
    """Texts that a `*` may stand in for any number of characters of."""

    def __init__(self, patterns: Iterable[str]) -> None:
        parts = [".*".join(re.escape(part) for part in text.split("*")) for text in patterns]
        self._matches = re.compile("|".join(parts), re.DOTALL).fullmatch

    def matches(self, text: str) -> bool:
        return self._matches(text) is not None
