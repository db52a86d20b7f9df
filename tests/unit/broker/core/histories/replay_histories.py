"""Random histories, the part about the past: queues that are made again get what they once had."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from services.broker.core.commands import Assignment, Range
from services.broker.core.lists.replays import Counts
from services.broker.core.queue import Queue
from tests.unit.broker.core.applied import backfill_whole
from tests.unit.broker.core.histories.histories import queue_ids, slowly
from tests.unit.broker.core.histories.queue_histories import QueueHistory

PIECE = 10
"""As far as the logs of these histories go on at once."""


class ReplayHistory(QueueHistory):
    """Its rules bring the logs from before a queue's creation into it, piece by piece."""

    @rule(
        queue_id=queue_ids,
        log=st.sampled_from([1, 2]),
        back=st.sampled_from([0, 0, 0, PIECE]),
        beyond=st.sampled_from([0, 0, 0, PIECE]),
        later_ms=st.sampled_from([0, 0, 100]),
        count=st.integers(0, 6),
        slow=slowly,
    )
    def backfill(
        self,
        queue_id: str,
        log: int,
        back: int,
        beyond: int,
        later_ms: int,
        count: int,
        slow: bool,
    ) -> None:
        queue = self.queue(queue_id)
        if queue is None or log not in self.model.queues[queue_id].replays:
            return
        cursor, end = self.model.queues[queue_id].replays[log]
        again = sorted(self.former[queue_id] - self.model.queues[queue_id].entries.keys())[:count]
        self.former[queue_id] -= set(again)
        ids = [*again, *(next(self.messages) for _ in range(count - len(again)))]
        at_ms = later_ms and -(-(self.now_ms + later_ms) // 50) * 50
        columns = Assignment(queue_id, ids, [0] * count, [0] * count, [at_ms] * count)
        piece = Range(log, cursor - back, min(cursor + PIECE, end) + beyond, [columns])
        self.run(lambda now_ms: self.backfill_now(queue, piece, now_ms), slow)

    def backfill_now(self, queue: Queue, piece: Range, now_ms: int) -> None:
        if self.queue(queue.queue_id) is not queue:
            return
        expected = self.model.queues[queue.queue_id]
        cursor, end = expected.replays[piece.log]
        [columns] = piece.assignments
        if any(one in expected.entries for one in columns.message_ids):
            return  # it came by a transfer meanwhile: the model holds a message once in a queue

        applied = backfill_whole(self.shard, queue, piece, Counts(0, 0), now_ms)

        assert applied == (piece.previous == cursor and piece.last <= end)
        if applied:
            expected.replays = {**expected.replays, piece.log: (piece.last, end)}
            self.routed(columns, now_ms)

    def routed(self, assignment: Assignment, now_ms: int) -> None:
        """Does to the model what an assignment does."""
        queue = self.model.queues[assignment.queue_id]
        for message_id, priority, deadline_ms, visible_at_ms in zip(
            assignment.message_ids,
            assignment.priorities,
            assignment.retention_deadlines_ms,
            assignment.visible_at_ms,
            strict=True,
        ):
            assert message_id not in queue.entries, "routed twice"
            if not 0 < deadline_ms <= max(now_ms, queue.walked_ms):
                queue.entries[message_id] = self.waiting(
                    queue, priority, visible_at_ms, deadline_ms, 0, now_ms
                )
