"""What the tests of claims share."""

from __future__ import annotations

from collections.abc import Callable

from slatemq.textqueue import Claim, TextQueue

Make = Callable[[bytes], TextQueue]


class Clock:
    """Unix time that stands still until it is told otherwise."""

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
