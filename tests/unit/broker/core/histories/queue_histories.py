"""The life of queues: made, changed, deleted, made again, more often than there are epochs."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from libs.storage.layout.keys import RecordType
from libs.storage.records.replay_records import ReplayRange
from services.broker.core.settings import Backoff, BackoffKind, QueueSettings
from tests.unit.broker.core.histories.histories import History, queue_ids
from tests.unit.broker.core.histories.model import ModelQueue
from tests.unit.broker.core.stored import garbage_lists, garbage_rows
from tests.unit.storage.oracles import parse_attempts_key, record_type_of


class QueueHistory(History):
    """Its rules change the queues."""

    @rule(
        queue_id=queue_ids,
        max_attempts=st.integers(1, 4),
        max_in_flight=st.sampled_from([2, 5, 50]),
        from_the_beginning=st.booleans(),
    )
    def create(
        self,
        queue_id: str,
        max_attempts: int,
        max_in_flight: int,
        from_the_beginning: bool = False,
    ) -> None:
        if queue_id in self.shard.queues:
            return
        self.sweep_attempts(queue_id)
        assert self.shard.epoch_is_free(queue_id) == (queue_id not in self.full_circle())
        if not self.shard.epoch_is_free(queue_id):
            return
        self.tick()
        asked = QueueSettings("", max_attempts=max_attempts, max_in_flight=max_in_flight)
        past = sorted(self.shard.cursors.items()) if from_the_beginning else []
        replay = tuple(ReplayRange(log, 0, 0, end) for log, end in past if end)
        self.shard.create_queue(queue_id, asked, replay)
        self.model.revision += 1
        self.model.queues[queue_id] = ModelQueue(
            max_attempts, max_in_flight, self.model.revision, max_attempts
        )
        self.model.queues[queue_id].replays = {one.ingest_shard: (0, one.end) for one in replay}

    def full_circle(self) -> set[str]:
        return {
            queue_id
            for queue_id, state in self.shard.deleted.items()
            if len(state.garbage_epochs) > 31
        }

    @rule(queue_id=queue_ids, max_attempts=st.integers(1, 4), max_in_flight=st.integers(1, 9))
    def update(self, queue_id: str, max_attempts: int, max_in_flight: int) -> None:
        queue = self.queue(queue_id)
        if queue is None:
            return
        changed = queue.settings.changed(max_attempts=max_attempts, max_in_flight=max_in_flight)
        self.shard.update_queue(queue, changed)
        self.model.revision += 1
        expected = self.model.queues[queue_id]
        expected.max_attempts, expected.max_in_flight = max_attempts, max_in_flight
        expected.lowest_max_attempts = min(expected.lowest_max_attempts, max_attempts)

    @rule(
        queue_id=queue_ids,
        backoff_ms=st.sampled_from([0, 50, 300]),
        total_lease_ms=st.sampled_from([40, 600, 43_200_000]),
    )
    def update_retries(self, queue_id: str, backoff_ms: int, total_lease_ms: int) -> None:
        queue = self.queue(queue_id)
        if queue is None:
            return
        backoff = Backoff(BackoffKind.LINEAR, backoff_ms) if backoff_ms else None
        changed = queue.settings.changed(backoff=backoff, max_total_lease_ms=total_lease_ms)
        self.shard.update_queue(queue, changed)
        self.model.revision += 1
        expected = self.model.queues[queue_id]
        expected.backoff_ms, expected.total_lease_ms = backoff_ms, total_lease_ms

    @rule(queue_id=queue_ids, sure=st.integers(0, 5), times=st.sampled_from([1, 1, 1, 34]))
    def delete(self, queue_id: str, sure: int, times: int) -> None:
        for _ in range(times if sure == 0 else 0):
            self.tick()
            queue = self.queue(queue_id)
            if queue is not None:
                self.shard.delete_queue(queue)
                self.model.revision += 1
                self.former[queue_id] |= self.model.queues.pop(queue_id).entries.keys()
                self.unswept.add(queue_id)
            if times > 1:
                self.sweep(queue_id)
                self.create(queue_id, 2, 5)

    def sweep_attempts(self, queue_id: str) -> None:
        """As the sweeper: before a queue of this name is made again."""
        if queue_id not in self.unswept:
            return
        self.commit()
        while self.written:
            self.durable()
        keys = [key for key in self.store.rows if is_attempt_in(queue_id, key)]
        self.shard.write_rows((key, None) for key in keys)
        self.unswept.discard(queue_id)

    @rule(queue_id=queue_ids)
    def sweep(self, queue_id: str) -> None:
        self.sweep_attempts(queue_id)
        rows = self.store.rows
        queue = self.queue(queue_id)
        before = self.shard.deleted.get(queue_id)
        epochs = queue.garbage_epochs if queue else before.garbage_epochs if before else ()
        for epoch in epochs:
            self.shard.write_rows((key, None) for key in garbage_rows(rows, queue_id, epoch))
            self.shard.swept(queue_id, epoch)
        if queue is None:
            return
        for epoch in queue.waiting.garbage_epochs:
            self.shard.write_rows(
                (key, None) for key in garbage_rows(rows, queue_id, epoch, lanes_only=True)
            )
            queue.waiting.note_swept(epoch)
        for finished, keys in garbage_lists(rows, queue):
            half = keys[: (len(keys) + 1) // 2]  # the rest is for the next time, or after a crash
            self.shard.write_rows((key, None) for key, _ in half)
            last = half[-1][1] if half and half != keys else finished.garbage.last
            finished.note_swept(last)


def is_attempt_in(queue_id: str, key: bytes) -> bool:
    """Whether this is the key of an attempts record of this queue."""
    return record_type_of(key) is RecordType.ATTEMPTS and parse_attempts_key(key)[0] == queue_id
