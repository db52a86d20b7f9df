"""How far the logs from before a queue's creation are brought into it. Pure, like the shard.

::

    log   ....|------------------|=====================|- - - - - - - - -
            start             cursor                  end
              └ backfilled: done ┘└── still to come ──┘└ live routing, from the beginning

The end is the routing cursor when the queue is created, read by the command that creates it: live
routing judges the entries behind it, the replay those up to it. A range behind it that was judged
before the queue was known moves the end along, in the command that applies the range. So every
entry is judged exactly once.

A queue in quarantine is left out of live routing: from then on everything in the logs is left to a
replay without an end. Its end is the cursor when the quarantine is lifted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from libs.storage.layout.own_keys import replay_key
from libs.storage.layout.primitives import RowChange
from libs.storage.records.replay_records import OPEN_END, UNCOUNTED, ReplayRange, encode_replay
from services.broker.core.lists.storable import storable

Ranges = tuple[ReplayRange, ...]


class Starts(NamedTuple):
    """Where a queue begins that starts in the past.

    Attributes:
        since_ms: The time of its start.
        sequences: By log, the sequence behind which it starts, without logs that did not answer.
    """

    since_ms: int
    sequences: Mapping[int, int]


class Counts(NamedTuple):
    """Messages judged in a piece, and left between it and the end."""

    judged: int
    left: int


def ranges_from(starts: Starts | None, cursors: Mapping[int, int]) -> Ranges | None:
    """What a queue created now has to catch up on; None (no starts): it begins now."""
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
        by_queue: All replays, done ones too. Replaced at every change, never changed: a reader
            keeps what was true when it read.
    """

    def __init__(self, stored: Mapping[str, Sequence[ReplayRange]] | None = None) -> None:
        self.by_queue: Mapping[str, Ranges] = {
            queue_id: tuple(ranges) for queue_id, ranges in (stored or {}).items()
        }
        self._changed: dict[str, bytes | None] = {}  # by queue, the record; None: to delete

    @property
    def has_changes(self) -> bool:
        return bool(self._changed)

    def of(self, queue_id: str) -> Ranges:
        """A queue's replay, by log; empty if it has none."""
        return self.by_queue.get(queue_id, ())

    def range_of(self, queue_id: str, log: int) -> ReplayRange | None:
        """The next part of a log to be replayed, or the last one; None if there is none."""
        parts = [one for one in self.of(queue_id) if one.ingest_shard == log]
        return next((one for one in parts if one.cursor < one.end), parts[-1] if parts else None)

    def is_running(self, queue_id: str) -> bool:
        return any(one.cursor < one.end for one in self.of(queue_id))

    def is_open(self, queue_id: str, log: int) -> bool:
        """Whether a range of this log has no end; see `open`."""
        return any(one.end == OPEN_END for one in self.of(queue_id) if one.ingest_shard == log)

    def can_close(self, queue_id: str, cursors: Mapping[int, int]) -> bool:
        """Whether live routing at these cursors has nothing to judge that is before an open range.

        It has where the queue came from another shard, whose cursors were further.
        """
        opened = (one for one in self.of(queue_id) if one.end == OPEN_END)
        return all(one.cursor <= cursors.get(one.ingest_shard, 0) for one in opened)

    def begin(self, queue_id: str, ranges: Ranges) -> None:
        if ranges:
            self._put(queue_id, ranges)

    def extend(self, queue_ids: Iterable[str], log: int, end: int, new_end: int) -> None:
        """Leaves the part of a log from `end` to `new_end` to the replays of these queues."""
        changed = {one: self._extended(one, log, end, new_end) for one in queue_ids}
        if changed:
            self._put_all(changed)

    def _extended(self, queue_id: str, log: int, end: int, new_end: int) -> Ranges:
        last = next((one for one in self.of(queue_id)[::-1] if one.ingest_shard == log), None)
        if last is None or last.end != end:
            last = ReplayRange(log, end, end, end)
        others = [other for other in self.of(queue_id) if other != last]
        return tuple(sorted([*others, last._replace(end=new_end, left_count=UNCOUNTED)]))

    def found(self, queue_id: str, waiting: ReplayRange, start: int) -> None:
        """Notes where a range begins that waited for its ingest, if it still does.

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
        """Leaves everything behind these cursors to a replay without an end; see `close`.

        Ranges that are done are forgotten.
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
        """Ends open ranges at these cursors: live routing judges what is behind them.

        A range that begins behind its log's cursor becomes empty.
        """
        parts = []
        for one in self.of(queue_id):
            if one.end == OPEN_END:
                end = cursors.get(one.ingest_shard, 0)  # Its former shard may have known the log.
                start, cursor = min(one.start, end), min(one.cursor, end)
                one = one._replace(start=start, cursor=cursor, end=end)
            parts.append(one)
        self._put(queue_id, tuple(parts))

    def move(self, queue_id: str, log: int, cursor: int, counts: Counts) -> None:
        """Notes that a log is replayed up to `cursor`; see `range_of`."""
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

    @property
    def logs(self) -> frozenset[int]:
        """The ingest shards whose logs any replay is of."""
        return frozenset(one.ingest_shard for ranges in self.by_queue.values() for one in ranges)

    def forget_log(self, log: int) -> None:
        changed: dict[str, Ranges] = {}
        emptied: dict[str, None] = {}
        for queue_id, ranges in self.by_queue.items():
            kept = tuple(one for one in ranges if one.ingest_shard != log)
            if not kept:
                emptied[queue_id] = None
            elif kept != ranges:
                changed[queue_id] = kept
        if changed:
            self._put_all(changed)
        if emptied:
            self._drop_all(emptied.keys())

    def drop(self, queue_id: str) -> None:
        if queue_id in self.by_queue:
            self._drop_all({queue_id})

    def drain(self) -> list[RowChange]:
        changed, self._changed = self._changed, {}
        return [(replay_key(queue_id), value) for queue_id, value in changed.items()]

    def _put(self, queue_id: str, ranges: Ranges) -> None:
        self._put_all({queue_id: ranges})

    def _put_all(self, changed: Mapping[str, Ranges]) -> None:
        """Changes all of them, or none if one cannot be stored."""
        self._changed |= {
            queue_id: storable(f"replay of queue {queue_id!r}", encode_replay, ranges)
            for queue_id, ranges in changed.items()
        }
        self.by_queue = {**self.by_queue, **changed}

    def _drop_all(self, queue_ids: Set[str]) -> None:
        self._changed |= dict.fromkeys(queue_ids)
        self.by_queue = {name: rs for name, rs in self.by_queue.items() if name not in queue_ids}
