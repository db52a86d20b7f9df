"""Environment variables that look like a setting of SlateMQ's, misspelt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

PREFIX = "SLATEMQ_"

LIKENESS = 0.85
"""Of 1: one letter more, less or another in a name of ten, not two names of different settings."""


def misspelt(environ: Iterable[str], known: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The variables that are almost one of those known, each with that one.

    What resembles none is left alone: it may be another program's, or a setting of another service.
    """
    names = sorted(known)
    unknown = sorted({name for name in environ if name.startswith(PREFIX)} - set(names))
    if not unknown:
        return
    from difflib import get_close_matches

    words = [name.removeprefix(PREFIX) for name in names]
    for name in unknown:
        for meant in get_close_matches(name.removeprefix(PREFIX), words, 1, LIKENESS):
            yield name, PREFIX + meant
