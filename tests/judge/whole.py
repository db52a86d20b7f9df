"""What spans the messages of a history: what rules must know of all of them, or hold of all."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.judge.facts import Facts, Queue
from tests.judge.histories import NEVER

Log = tuple[str, int]
"""What keeps its order: a queue, and the ingest of its messages."""

LOG_BITS: Final = 48
"""Of a message ID, those that count within the log of one ingest; docs/reference/encodings.md."""

TAKEN_AT_ONCE: Final = 100_000
"""Deliveries that are held against late ones together: each takes some 200 bytes then."""


@dataclass(slots=True)
class Whole:
    """What the rules over some messages must know of all others.

    Attributes:
        delivering: The queues that gave a message.
        unknown_dead: Those with a dead letter whose ID clients have from nothing else.
    """

    delivering: set[str] = field(default_factory=set)
    unknown_dead: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, facts: Facts) -> Whole:
        """Of a history that these facts are all of."""
        known = {one for ids in facts.ids.values() for one in ids}
        unknown = {name for name, one in facts.queues.items() if one.dead.keys() - known}
        return cls({name for name, _ in facts.deliveries}, unknown)


@dataclass(frozen=True, slots=True)
class Late:
    """A delivery that came long after it was due.

    Attributes:
        place: Of its message in its log.
        limit: What was published later than that should not have come before.
        text: What is wrong if something has.
    """

    place: int
    limit: int
    began: int
    text: str


class Taken:
    """First deliveries of a log by claims with room, in 24 bytes each."""

    def __init__(self) -> None:
        self._places = array("Q")
        self._ended = array("q")
        self._sent = array("q")

    def add(self, message_id: int, ended: int, sent: int) -> None:
        """`sent`: when its first publish began."""
        self._places.append(place_in_log(message_id))
        self._ended.append(ended)
        self._sent.append(sent)

    def before(self, late: Sequence[Late]) -> list[Late]:
        """Those of these that one of the deliveries came before, and should not have."""
        found: list[Late] = []
        waiting = sorted(late, key=lambda one: one.limit, reverse=True)
        for begin in range(0, len(self._sent), TAKEN_AT_ONCE):
            part = slice(begin, begin + TAKEN_AT_ONCE)
            taken = zip(self._sent[part], self._ended[part], self._places[part], strict=True)
            published_later = [one for one in taken if one[0] > waiting[-1].limit]
            passed = {*_passed_over(waiting, published_later)}
            found += (one for one in waiting if one in passed)
            waiting = [one for one in waiting if one not in passed]
            if not waiting:
                break
        return found


def place_in_log(message_id: int) -> int:
    return message_id & ((1 << LOG_BITS) - 1)


def _passed_over(late: Sequence[Late], taken: list[tuple[int, int, int]]) -> Iterator[Late]:
    """Those that a delivery published after their limit came before, with a later place.

    `late` falls by its limits. Of what was published after them, those are kept of which none ended
    sooner with a later place: by their ends, their places rise.
    """
    taken.sort()
    ends: list[int] = []
    places: list[int] = []
    for one in late:
        while taken and taken[-1][0] > one.limit:
            _, ended, place = taken.pop()
            begin = bisect_right(ends, ended)
            if begin and places[begin - 1] >= place:
                continue
            end = bisect_right(places, place, begin)
            ends[begin:end], places[begin:end] = [ended], [place]
        before = bisect_left(ends, one.began)
        if before and places[before - 1] > one.place:
            yield one


class Spanning:
    """What is judged of the whole history at its end, gathered part by part.

    Attributes:
        queues: What clients did to queues, which is the same in all parts.
        again: By queue, how many messages began again after a redrive.
        released: By queue, how many leases may have been released.
        late, taken: By log.
    """

    def __init__(self) -> None:
        self.queues: dict[str, Queue] = {}
        self.again: Counter[str] = Counter()
        self.released: Counter[str] = Counter()
        self.late: dict[Log, list[Late]] = defaultdict(list)
        self.taken: dict[Log, Taken] = defaultdict(Taken)

    def never_drained(self) -> Iterator[str]:
        """Every queue is drained."""
        for queue in self.queues.values():
            if not queue.drained_at:
                yield f"{queue.name} was never drained, so what it lost is not known"

    def overdue(self) -> Iterator[str]:
        """What is due is not passed over for long by claims that take what came later."""
        for log, late in self.late.items():
            for one in self.taken[log].before(late):
                yield one.text

    def redrives(self) -> Iterator[str]:
        """A redrive makes as many messages begin again as it says."""
        for queue in self.queues.values():
            again = self.again[queue.name]
            counts = [one.result.get("moved_count") for one in queue.redrives]
            stated = sum(count for count in counts if count is not None)
            text = f"{queue.name}: {stated} were redriven, {again} began again"
            if again > stated and None not in counts:
                yield text
            if queue.drained_at and stated - again > self._unseen_at_most(queue):
                yield text

    def _unseen_at_most(self, queue: Queue) -> int:
        """How many messages may have begun again unseen: each came to a claim of no known outcome.

        One that may have been released is not known to have begun again, either.
        """
        if queue.moves or queue.purges:
            return NEVER
        unknown = sum(int(one.value.get("max", 1)) for one in queue.unknown_claims)
        return self.released[queue.name] + unknown


SPANNING: Final[dict[str, Callable[[Spanning], Iterator[str]]]] = {
    "lost": Spanning.never_drained,
    "overdue": Spanning.overdue,
    "redrives": Spanning.redrives,
}
