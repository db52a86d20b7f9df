"""Numbers with their nouns, as people read them."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 message`, `1,200 messages`, `2 processes`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith('s') else 's'}"
