"""How far the logs from before a queue's creation are brought into it. Pure, like the shard.

::

    log   ....|------------------|=====================|- - - - - - - - -
            start             cursor                  end
              └ backfilled: done ┘└── still to come ──┘└ live routing, from the beginning

The end is the routing cursor at the moment of the creation, read by the very command that creates
the queue: an entry behind it is judged by the queue with all others, one up to it by its replay.
A range behind it that was judged before the queue was known moves the end along, in the command
that applies it. So every entry is judged once, and the two never meet.

A queue in quarantine is left out of live routing. From the moment at which that begins, all of the
logs is left to a replay without an end; the end is the cursor at the moment at which it is lifted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from libs.storage.layout.own_keys import replay_key
from libs.storage.records.replay_records import OPEN_END, UNCOUNTED, ReplayRange, encode_replay
from services.broker.core.lists.storable import storable

Ranges = tuple[ReplayRange, ...]


class Starts(NamedTuple):
    """Where a queue begins that starts in the past.

    Attributes:
        since_ms: The time of its start.
        sequences: By log, the sequence behind which that is; logs that could not be asked are left
            out.
    """

    since_ms: int
    sequences: Mapping[int, int]


class Counts(NamedTuple):
    """Messages judged in a piece, and left behind it up to the end."""

    judged: int
    left: int


def ranges_from(starts: Starts | None, cursors: Mapping[int, int]) -> Ranges | None:
    """What a queue created now has to catch up on; no starts: None, it begins with its creation."""
    if starts is None:
        return None
    ranges = []
    for log, cursor in sorted(cursors.items()):
        start = starts.sequences.get(log)
        if start is None and cursor:
            ranges.append(ReplayRange(log, 0, 0, cursor, starts.since_ms))
        elif start is not None and cursor > start:
            ranges.append(ReplayRange(log, start, start, cursor))
    return tuple(ranges)


class Replays:
    """The replays of a shard's queues.

    Attributes:
        by_queue: Those there are, done ones too. Replaced whenever one changes, so that whoever
            holds it has what was true then.
    """

    def __init__(self, stored: Mapping[str, Sequence[ReplayRange]] | None = None) -> None:
        self.by_queue: Mapping[str, Ranges] = {
            queue_id: tuple(ranges) for queue_id, ranges in (stored or {}).items()
        }
        self._changed: dict[str, bytes | None] = {}  # by queue, the record; None: to delete

    @property
    def has_changes(self) -> bool:
        """Whether a drain would give any rows."""
        return bool(self._changed)

    def of(self, queue_id: str) -> Ranges:
        """A queue's replay, by log; empty when it has none."""
        return self.by_queue.get(queue_id, ())

    def range_of(self, queue_id: str, log: int) -> ReplayRange | None:
        """The part of a log that is to be brought in next, or the last one; None: there is none."""
        parts = [one for one in self.of(queue_id) if one.ingest_shard == log]
        return next((one for one in parts if one.cursor < one.end), parts[-1] if parts else None)

    def _last_of(self, queue_id: str, log: int) -> ReplayRange | None:
        return next((one for one in self.of(queue_id)[::-1] if one.ingest_shard == log), None)

    def is_under_way(self, queue_id: str) -> bool:
        """Whether a queue has something to catch up on."""
        return any(one.cursor < one.end for one in self.of(queue_id))

    def begin(self, queue_id: str, ranges: Ranges) -> None:
        """Notes what a new queue has to catch up on, if anything."""
        if ranges:
            self._put(queue_id, ranges)

    def extend(self, queue_ids: Iterable[str], log: int, end: int, new_end: int) -> None:
        """Leaves more of a log to queues' replays: what is behind `end`, up to `new_end`."""
        changed = {one: self._extended(one, log, end, new_end) for one in queue_ids}
        if changed:
            self._put_all(changed)

    def _extended(self, queue_id: str, log: int, end: int, new_end: int) -> Ranges:
        last = self._last_of(queue_id, log)
        if last is None or last.end != end:
            last = ReplayRange(log, end, end, end)
        others = [other for other in self.of(queue_id) if other != last]
        return tuple(sorted([*others, last._replace(end=new_end, left_count=UNCOUNTED)]))

    def found(self, queue_id: str, waiting: ReplayRange, start: int) -> None:
        """Notes where a range begins that had to wait for its ingest, if it waits still.

        Its end may have moved meanwhile; while it is open, the start is left to a later look-up.
        """
        one = self.range_of(queue_id, log := waiting.ingest_shard)
        if one is not None and not one.is_found and one.since_ms == waiting.since_ms:
            if one.end == OPEN_END:
                return
            start = min(start, one.end)
            found = ReplayRange(log, start, start, one.end)
            parts = (found if other == one else other for other in self.of(queue_id))
            self._put(queue_id, tuple(parts))

    def open(self, queue_id: str, cursors: Mapping[int, int]) -> None:
        """Leaves all behind these cursors to a replay whose end is not known yet; see `close`.

        What is done already is forgotten.
        """
        parts = {one for one in self.of(queue_id) if one.cursor < one.end}
        for log, cursor in cursors.items():
            joined = next((p for p in parts if p.ingest_shard == log and p.end == cursor), None)
            if joined is not None:
                parts.remove(joined)
            begun = joined or ReplayRange(log, cursor, cursor, cursor)
            parts.add(begun._replace(end=OPEN_END, left_count=UNCOUNTED))
        self._put(queue_id, tuple(sorted(parts)))

    def close(self, queue_id: str, cursors: Mapping[int, int]) -> None:
        """Ends what is open at these cursors: live routing judges what is behind them.

        A range that begins behind its log's cursor ends empty there.
        """
        parts = []
        for one in self.of(queue_id):
            if one.end == OPEN_END:
                end = cursors[one.ingest_shard]
                start, cursor = min(one.start, end), min(one.cursor, end)
                one = one._replace(start=start, cursor=cursor, end=end)
            parts.append(one)
        self._put(queue_id, tuple(parts))

    def move(self, queue_id: str, log: int, cursor: int, counts: Counts) -> None:
        """Notes that a log is brought in up to here; see `range_of`."""
        moved = self.range_of(queue_id, log)
        self._put(
            queue_id,
            tuple(
                one._replace(
                    cursor=cursor,
                    done_count=one.done_count + counts.judged,
                    left_count=counts.left,
                )
                if one == moved
                else one
                for one in self.of(queue_id)
            ),
        )

    def drop(self, queue_id: str) -> None:
        """Forgets the replay of a queue that is deleted."""
        if queue_id in self.by_queue:
            self.by_queue = {name: rs for name, rs in self.by_queue.items() if name != queue_id}
            self._changed[queue_id] = None

    def drain(self) -> list[tuple[bytes, bytes | None]]:
        """The rows of what changed since the last drain."""
        changed, self._changed = self._changed, {}
        return [(replay_key(queue_id), value) for queue_id, value in changed.items()]

    def _put(self, queue_id: str, ranges: Ranges) -> None:
        self._put_all({queue_id: ranges})

    def _put_all(self, changed: Mapping[str, Ranges]) -> None:
        """Changes all of them, or none where one cannot be stored."""
        self._changed |= {
            queue_id: storable(f"replay of queue {queue_id!r}", encode_replay, ranges)
            for queue_id, ranges in changed.items()
        }
        self.by_queue = {**self.by_queue, **changed}
