"""How far the logs from before a queue's creation are brought into it. Pure, like the shard.

::

    log   ....|------------------|=====================|- - - - - - - - -
            start             cursor                  end
              └ backfilled: done ┘└── still to come ──┘└ live routing, from the beginning

The end is the routing cursor at the moment of the creation, read by the very command that creates
the queue: an entry behind it is judged by the queue with all others, one up to it by its replay.
So every entry is judged once, and the two never meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from libs.storage.own_keys import replay_key
from libs.storage.replay_records import ReplayRange, encode_replay
from slatemq.errors import Unavailable

Ranges = tuple[ReplayRange, ...]


def ranges_from(starts: Mapping[int, int] | None, cursors: Mapping[int, int]) -> Ranges:
    """What a queue created now has to catch up on; no starts: nothing.

    `starts` has for each log where to begin. Raises Unavailable for a log that it does not have.
    """
    if starts is None:
        return ()
    ranges = []
    for log, cursor in sorted(cursors.items()):
        if log not in starts:
            raise Unavailable(f"ingest {log} came up meanwhile", reason="INGEST_ADDED")
        if cursor > starts[log]:
            ranges.append(ReplayRange(log, starts[log], starts[log], cursor))
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
        self._changed: set[str] = set()

    @property
    def has_changes(self) -> bool:
        """Whether a drain would give any rows."""
        return bool(self._changed)

    def of(self, queue_id: str) -> Ranges:
        """A queue's replay, by log; empty when it has none."""
        return self.by_queue.get(queue_id, ())

    def range_of(self, queue_id: str, log: int) -> ReplayRange | None:
        """A queue's replay of one log; None when it has none."""
        return next((one for one in self.of(queue_id) if one.ingest_shard == log), None)

    def begin(self, queue_id: str, ranges: Ranges) -> None:
        """Notes what a new queue has to catch up on, if anything."""
        if ranges:
            self._put(queue_id, ranges)

    def move(self, queue_id: str, log: int, cursor: int) -> None:
        """Notes that a log is brought in up to here."""
        self._put(
            queue_id,
            tuple(
                one._replace(cursor=cursor) if one.ingest_shard == log else one
                for one in self.of(queue_id)
            ),
        )

    def drop(self, queue_id: str) -> None:
        """Forgets the replay of a queue that is deleted."""
        if queue_id in self.by_queue:
            self.by_queue = {name: rs for name, rs in self.by_queue.items() if name != queue_id}
            self._changed.add(queue_id)

    def drain(self) -> list[tuple[bytes, bytes | None]]:
        """The rows of what changed since the last drain."""
        changed, self._changed = self._changed, set()
        return [
            (
                replay_key(queue_id),
                encode_replay(self.by_queue[queue_id]) if queue_id in self.by_queue else None,
            )
            for queue_id in changed
        ]

    def _put(self, queue_id: str, ranges: Ranges) -> None:
        self.by_queue = {**self.by_queue, queue_id: ranges}
        self._changed.add(queue_id)
