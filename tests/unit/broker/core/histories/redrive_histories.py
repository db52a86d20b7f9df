"""Random histories, the part about dead letters that are moved back, here or elsewhere."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from libs.storage.layout.keys import RecordType, attempts_key, parse_failed_key
from libs.storage.records.queues import (
    AvailableMessage,
    FailedMessage,
    decode_attempts,
    decode_failed,
)
from libs.storage.records.redrive_records import RedriveRecord, RedriveState
from services.broker.core.lists.attempts import carried
from services.broker.core.queue import Queue
from services.broker.core.redrives import RedriveStep, moved
from tests.unit.broker.core.histories.entry_histories import EntryHistory
from tests.unit.broker.core.histories.histories import queue_ids
from tests.unit.broker.core.histories.model import Done, ModelQueue
from tests.unit.storage.oracles import record_type_of


class RedriveHistory(EntryHistory):
    """Its rule does what the runner does: waits, reads a row, moves some of it."""

    @rule(
        source=queue_ids,
        into=queue_ids,
        chosen=st.lists(st.booleans(), min_size=1, max_size=5),
        sure=st.integers(0, 1),
    )
    def redrive(self, source: str, into: str, chosen: list[bool], sure: int) -> None:
        queue, target = self.queue(source), self.queue(into)
        if queue is None or target is None or sure:
            return
        self.commit()
        while self.written:
            self.durable()
        row = self.first_row(queue)
        if row is None:
            return
        order, dead_letters = row
        source_model, target_model = self.model.queues[source], self.model.queues[into]
        places = [
            place
            for place, dead_letter in enumerate(dead_letters)
            if chosen[place % len(chosen)]
            # The model holds a message once in each queue.
            and (queue is target or dead_letter.message_id not in target_model.entries)
        ]
        self.tick()
        now_ms = self.now_ms
        taken = [
            dead_letters[place]
            for place in places
            if not self.is_over(dead_letters[place], now_ms, source_model, target_model)
        ]
        record = self.record_of(queue, source, into, order)

        attempts = self.shard.attempts
        ids = [dead_letter.message_id for dead_letter in dead_letters]
        for cold in carried(ids, queue, target):
            value = self.store.rows.get(attempts_key(cold[0], cold[2]))
            attempts.offer(cold, decode_attempts(value) if value else [])

        def enter(item: AvailableMessage) -> bool:
            if target.waiting.enqueue(item, now_ms) is None:
                return False
            attempts.carry(item.message_id, queue, target)
            return True

        step = RedriveStep(order, dead_letters, len(dead_letters), places)
        after, _, rows = moved(queue, record, step, enter, now_ms)

        self.shard.write_rows(rows)
        assert after.redriven_count == len(taken)
        assert (after.examined_count, after.next_order) == (len(dead_letters), order + 1)
        for dead_letter in taken:
            source_model.entries[dead_letter.message_id] = Done(0, dead_letter.attempts, into)
            self.model.carry(dead_letter.message_id, source_model, into)
            target_model.entries[dead_letter.message_id] = self.waiting(
                target_model, dead_letter.priority, 0, dead_letter.retention_deadline_ms, 0, now_ms
            )

    def record_of(self, queue: Queue, source: str, into: str, order: int) -> RedriveRecord:
        """A redrive of a whole queue that begins at a row."""
        return RedriveRecord(
            queue_revision=queue.created_revision,
            state=RedriveState.RUNNING,
            rate=0,
            created_at_ms=self.now_ms,
            ended_at_ms=0,
            total_count=queue.failed.count,
            examined_count=0,
            redriven_count=0,
            next_order=order,
            next_place=0,
            end_order=queue.orders.last,
            queue_id=source,
            target_queue_id=into,
        )

    def is_over(self, dead_letter: FailedMessage, now_ms: int, *queues: ModelQueue) -> bool:
        latest_ms = max(now_ms, *(queue.walked_ms for queue in queues))
        return 0 < dead_letter.retention_deadline_ms <= latest_ms

    def first_row(self, queue: Queue) -> tuple[int, list[FailedMessage]] | None:
        """The first row of the failed list, as it is stored."""
        oldest = queue.failed.oldest_order
        rows = {}
        for key, value in self.store.rows.items():
            if record_type_of(key) is RecordType.FAILED:
                parsed = parse_failed_key(key)
                if parsed.queue == queue.queue_id and parsed.bucket and parsed.bucket >= oldest > 0:
                    rows[parsed.bucket] = decode_failed(value)
        return min(rows.items()) if rows else None
