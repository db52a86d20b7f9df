"""The commands of a shard, in its own words, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from services.broker.core.waiting.scan import Needs

__all__ = ["Assignment", "Finish", "Nack", "Needs", "Purge", "Range"]


class Finish(Enum):
    """The result of an ack, nack or extension."""

    OK = 1
    ENDED = 2  # the lease ran out, or was finished otherwise
    UNKNOWN = 3  # never given out, or forgotten


class Assignment(NamedTuple):
    """The messages of one range that belong to one queue, in log order, as columns."""

    queue_id: str
    message_ids: Sequence[int]
    priorities: Sequence[int] = ()
    retention_deadlines_ms: Sequence[int] = ()
    visible_at_ms: Sequence[int] = ()

    def split(self, count: int) -> tuple[Assignment, Assignment | None]:
        """The first `count` messages, and the others, if there are any."""
        if len(self.message_ids) <= count:
            return self, None
        queue_id, *columns = self
        return (
            Assignment(queue_id, *(column[:count] for column in columns)),
            Assignment(queue_id, *(column[count:] for column in columns)),
        )


NEWEST = 1 << 62
"""The revision of a judgement that is newer than any other."""


@dataclass(frozen=True, slots=True)
class Range:
    """A piece of one metadata log, judged; `revision` is of the oldest configs used for it."""

    log: int
    previous: int
    last: int
    assignments: Sequence[Assignment]
    revision: int = NEWEST


@dataclass(frozen=True, slots=True)
class Nack:
    """A lease that ends without success."""

    token: int
    reason: str = ""
    delay_ms: int | None = None
    """How long the message waits; None: the queue's backoff, or 0 for a release."""
    release: bool = False
    """The message was not worked on: the attempt is not counted."""


class Purge(Enum):
    """Which of a queue's lists to empty; the values are the states of their messages."""

    AVAILABLE = ("available", "delayed")
    IN_FLIGHT = ("in_flight",)
    DONE = ("done",)
    FAILED = ("failed",)
    ARCHIVED = ("archived",)
