"""What the tests of queue files share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slatemq.textqueue import Claim, TextQueue

Make = Callable[[bytes], TextQueue]

NOBODY = 65534
"""A user who owns nothing."""


class Clock:
    """Unix time that stands still until it is set."""

    def __init__(self) -> None:
        self.now_ms = 1_800_000_000_000

    def __call__(self) -> int:
        return self.now_ms


def taken(queue: TextQueue) -> Claim:
    claim = queue.claim()
    assert claim is not None
    return claim


def claims(queue: TextQueue) -> list[str]:
    """Claims all there is, and keeps it."""
    found = []
    while (claim := queue.claim()) is not None:
        found.append(claim.text)
    return found


@contextmanager
def as_a_reader(*paths: Path) -> Iterator[None]:
    """As someone who may read the files, and not write them."""
    for path in paths:
        path.chmod(0o444)
    own = os.geteuid()
    if own == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(own)
        for path in paths:
            path.chmod(0o644)
