"""Numbers with their nouns, as people read them."""

from __future__ import annotations


def counted(count: int, noun: str, nouns: str = "") -> str:
    """`1 message`, `1,200 messages`, `2 processes`.

    `nouns`: the plural, where it is another one or a verb follows: `1 claim waits`, `2 claims
    wait`.
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {nouns or noun + ('es' if noun.endswith('s') else 's')}"
