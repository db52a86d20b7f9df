"""Random histories, the part about removals: what is over goes, what is archived comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from libs.storage.layout.keys import (
    BucketKey,
    RecordType,
    parse_done_key,
)
from libs.storage.layout.own_keys import parse_archived_key
from libs.storage.records.archived_records import ArchivedMessage, decode_archived
from libs.storage.records.queues import FailedMessage, decode_done
from services.broker.core.batches.remove import (
    DeadLetter,
    Outcome,
    StoredRow,
    archive,
    done_row,
    drop_waiting,
    prune_done,
    redrive_archived,
    take_dead_letters,
)
from services.broker.core.lists.attempts import attempts_at
from services.broker.core.lists.finished_lists import FinishedList
from services.broker.core.queue import Queue
from services.broker.core.waiting.bucket import Place
from tests.unit.broker.core.histories.execute_histories import INGEST, ExecuteHistory
from tests.unit.broker.core.histories.histories import queue_ids, slowly
from tests.unit.broker.core.histories.model import Archived, ModelQueue
from tests.unit.broker.core.stored import stored_attempts
from tests.unit.storage.oracles import record_type_of

some = st.lists(st.booleans(), min_size=1, max_size=5)
long_ago_ms = st.sampled_from([0, 0, 30, 200, 5000])


class RemovalHistory(ExecuteHistory):
    """Its rules do what the servicer does: wait, read a row, take out of it what may go."""

    # --- What waits ---------------------------------------------------------

    @rule(queue_id=queue_ids, chosen=st.integers(0, 40), grace_ms=long_ago_ms, slow=slowly)
    def drop_over(self, queue_id: str, chosen: int, grace_ms: int, slow: bool) -> None:
        found = self.pick(queue_id, chosen)
        if found is not None:
            queue, place, message_id = found
            self.run(lambda now: self.drop_over_now(queue, place, message_id, now - grace_ms), slow)

    def drop_over_now(self, queue: Queue, place: Place, message_id: int, until_ms: int) -> None:
        if self.queue(queue.queue_id) is not queue:
            return
        there = queue.waiting.find(place, message_id) is not None
        first, again = drop_waiting(queue, {place: [message_id] * 2}, until_ms)[place]

        expected = self.model.queues[queue.queue_id]
        entry = expected.waiting().get(message_id)
        if not there:
            assert (first, again) == (Outcome.GONE, Outcome.GONE)
            return
        assert entry is not None, "what was not there was found"
        if 0 < entry.deadline_ms <= until_ms:
            assert (first, again) == (Outcome.REMOVED, Outcome.GONE)
            expected.expire(message_id)
        else:
            assert (first, again) == (Outcome.NOT_EXPIRED, Outcome.NOT_EXPIRED)

    # --- Done ---------------------------------------------------------------

    @rule(queue_id=queue_ids, ago_ms=long_ago_ms, limit=st.integers(1, 4))
    def prune(self, queue_id: str, ago_ms: int, limit: int) -> None:
        queue = self.settled(queue_id)
        if queue is None:
            return
        before_ms = self.now_ms - ago_ms
        stored = self.rows_of(queue, queue.done, RecordType.DONE, parse_done_key, decode_done)
        tried = {m for m in self.model.queues[queue_id].done() if self.has_history(queue, m)}
        rows = [done_row(order, messages, before_ms, tried) for order, messages in stored[:limit]]
        gone = [
            one for _, messages in stored[:limit] for one in messages if one.done_at_ms < before_ms
        ]
        removed = prune_done(self.shard, queue, [row for row in rows if row is not None])

        assert removed == len(gone)
        expected = self.model.queues[queue_id]
        for one in gone:
            assert one.message_id in expected.done()
            del expected.entries[one.message_id]
            if not one.transferred_to:
                expected.attempts.pop(one.message_id, None)

    def has_history(self, queue: Queue, message_id: int) -> bool:
        """Whether a message has a record of attempts, as `Histories` finds it."""
        in_memory = self.shard.attempts.get(attempts_at(queue, message_id))
        return bool(in_memory or stored_attempts(self.store.rows, queue.queue_id, message_id))

    # --- Failed and archived ------------------------------------------------

    @rule(queue_id=queue_ids, chosen=some, wrong=st.integers(0, 5), ago_ms=long_ago_ms)
    def remove_letters(self, queue_id: str, chosen: list[bool], wrong: int, ago_ms: int) -> None:
        self.take(queue_id, chosen, wrong, self.now_ms - ago_ms)

    @rule(queue_id=queue_ids, chosen=some, wrong=st.integers(0, 5))
    def archive(self, queue_id: str, chosen: list[bool], wrong: int) -> None:
        self.take(queue_id, chosen, wrong, None)

    def take(self, queue_id: str, chosen: list[bool], wrong: int, by_ms: int | None) -> None:
        """Archives letters, or (`by_ms`) removes those that failed by then."""
        queue = self.settled(queue_id)
        row = self.first_row(queue) if queue is not None else None
        if queue is None or row is None:
            return
        order, dead_letters = row
        wanted = [
            dead_letter
            for place, dead_letter in enumerate(dead_letters)
            if chosen[place % len(chosen)]
        ]
        asked = [
            DeadLetter(one.message_id, one.failed_at_ms + (n == wrong))
            for n, one in enumerate(wanted)
        ]
        row_wanted = StoredRow(order, dead_letters, [*asked, *asked])
        (outcomes,), taken = take_dead_letters(self.shard, queue, [row_wanted], failed_by_ms=by_ms)

        goes = [
            n != wrong and (by_ms is None or o.failed_at_ms <= by_ms) for n, o in enumerate(wanted)
        ]
        assert [one for one, go in zip(wanted, goes, strict=True) if go] == sorted(
            taken, key=wanted.index
        )
        for number, go in enumerate(goes):
            twice = outcomes[number], outcomes[len(asked) + number]
            if go:
                assert twice == (Outcome.REMOVED, Outcome.GONE)
            else:
                assert set(twice) == {Outcome.GONE if number == wrong else Outcome.NOT_EXPIRED}
        if by_ms is None:
            archive(queue, taken, f"run{order % 2}", self.now_ms)
        self.taken(self.model.queues[queue_id], taken, archived=by_ms is None)

    def taken(
        self, expected: ModelQueue, dead_letters: list[FailedMessage], *, archived: bool
    ) -> None:
        for dead_letter in dead_letters:
            assert dead_letter.message_id in expected.failed()
            del expected.entries[dead_letter.message_id]
            expected.attempts.pop(dead_letter.message_id, None)
            if archived:
                expected.entries[dead_letter.message_id] = Archived(
                    dead_letter.attempts,
                    dead_letter.failed_at_ms,
                    dead_letter.retention_deadline_ms,
                )

    @rule(queue_id=queue_ids, chosen=some, wrong=st.integers(0, 5))
    def come_back(self, queue_id: str, chosen: list[bool], wrong: int) -> None:
        queue = self.settled(queue_id)
        if queue is None:
            return
        rows = self.rows_of(
            queue, queue.archived, RecordType.ARCHIVED, parse_archived_key, decode_archived
        )
        if not rows:
            return
        order, stored = rows[0]
        wanted = [one for place, one in enumerate(stored) if chosen[place % len(chosen)]]
        asked = [
            DeadLetter(one.message_id, one.failed_at_ms, one.run + "x" * (n == wrong))
            for n, one in enumerate(wanted)
        ]
        pushes = {}
        for number in range(len(asked)):
            self.pushed_count += 1
            pushes[number] = b"%d" % self.pushed_count
        row = StoredRow(order, stored, [*asked, *asked])
        outcomes = redrive_archived(self.shard, queue, row, pushes, INGEST, self.now_ms)

        expected = self.model.queues[queue_id]
        for number, one in enumerate(wanted):
            outcome = self.expected_outcome(one, is_wrong=number == wrong)
            assert outcomes[number] is outcome
            again = Outcome.GONE if outcome is Outcome.REMOVED else outcome
            assert outcomes[len(asked) + number] is again
            if outcome is Outcome.REMOVED:
                del expected.entries[one.message_id]
        gone = [n for n in range(len(asked)) if outcomes[n] is Outcome.REMOVED]
        self.model.pushes += tuple(pushes[number] for number in gone)

    def expected_outcome(self, one: ArchivedMessage, *, is_wrong: bool) -> Outcome:
        if is_wrong:
            return Outcome.GONE
        is_over = 0 < one.retention_deadline_ms <= self.now_ms
        return Outcome.EXPIRED if is_over else Outcome.REMOVED

    # --- What is stored -----------------------------------------------------

    def settled(self, queue_id: str) -> Queue | None:
        """The queue, when all is durable."""
        queue = self.queue(queue_id)
        if queue is not None:
            self.commit()
            while self.written:
                self.durable()
            self.tick()
        return queue

    def rows_of(
        self,
        queue: Queue,
        finished: FinishedList[Any],
        kind: RecordType,
        parse: Callable[[bytes], BucketKey],
        decode: Callable[[bytes], list[Any]],
    ) -> list[tuple[int, list[Any]]]:
        """The living rows of a list, as they are stored."""
        found = {}
        for key, value in self.store.rows.items():
            if record_type_of(key) is kind:
                parsed = parse(key)
                is_alive = 0 < finished.oldest_order <= parsed.bucket
                if parsed.queue == queue.queue_id and is_alive:
                    found[parsed.bucket] = decode(value)
        return sorted(found.items())
