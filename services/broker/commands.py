"""What a shard is told to do, in its own words, and how it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from services.broker.walks import NeedsSlot


class Needs(Exception):
    """A command needs records that are not in memory: read them all, then run it again."""

    def __init__(self, slots: Sequence[NeedsSlot], attempts: Sequence[tuple[str, int]]) -> None:
        super().__init__(f"{len(slots)} slots, {len(attempts)} attempts records")
        self.slots = slots
        self.attempts = attempts


class Finish(Enum):
    """What became of an ack, nack or extension."""

    OK = 1
    ENDED = 2  # the lease ran out, or was finished otherwise
    UNKNOWN = 3  # never given out, or forgotten


@dataclass(frozen=True, slots=True)
class Assignment:
    """The messages of one range that belong to one queue, in log order, as columns."""

    queue_id: str
    message_ids: Sequence[int]
    priorities: Sequence[int] = ()
    retention_deadlines_ms: Sequence[int] = ()
    visible_at_ms: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Range:
    """A piece of one metadata log, judged."""

    log: int
    previous: int
    last: int
    assignments: Sequence[Assignment]


@dataclass(frozen=True, slots=True)
class Nack:
    """A lease to give back."""

    token: int
    reason: str = ""
    delay_ms: int = 0
    release: bool = False
    """Nobody worked on the message: the attempt is not counted."""
