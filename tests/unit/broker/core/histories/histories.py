"""A shard under test beside its model: running commands, commits, crashes, and what must hold."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libs.storage.records.queues import FailedAttempt
from services.broker.core import lease_table, leases
from services.broker.core import lease_table as shard_leases
from services.broker.core.lease_table import GRACE_MS, LeaseGrace
from services.broker.core.leases import Lease
from services.broker.core.lists import attempts, finished_lists
from services.broker.core.queue import ATTEMPTS_USED_UP, NeedsLane, Queue
from services.broker.core.shard import Needs, Shard
from services.broker.core.waiting import available, lane_budget
from services.broker.core.waiting import lane as lanes
from services.broker.shard import loading
from services.broker.shard.loading import Loader, last_clock_ms, load_shard
from tests.unit.broker.core.histories.model import Failed, Held, Model, ModelQueue, Waiting
from tests.unit.broker.core.stored import stored_attempts, stored_queue
from tests.unit.broker.core.stores import DictStore

START_MS = 1_767_225_600_000
QUEUES = ("a", "b")
queue_ids = st.sampled_from(QUEUES)
slowly = st.sampled_from([False, False, True])
LIMITS = [
    (available, "READY_BUCKET_MAX", 3),
    (available, "TIMED_BUCKET_MAX", 2),
    (lanes, "CACHED_MAX", 6),
    (lanes, "PINNED_MAX", 2),
    (lane_budget, "BYTES_MAX", 2500),
    (lane_budget, "COUNTED_FROM", 1),
    (lane_budget, "SPARED", 1),
    (finished_lists, "LIST_ROW_MAX", 3),
    (loading, "LOAD_MESSAGES", 4),
    (loading, "LOAD_ROWS", 3),
    (leases, "IN_FLIGHT_BUCKET_MAX", 3),
    (leases, "PACKED_MIN", 2),
    (lease_table, "FINISHED_SLOTS", 64),
    (lease_table, "FINISHED_SLOT_MIN", 2),
    (lease_table, "FINISHED_MAX", 130),
    (attempts, "BYTES_MAX", 1000),
]


def blocks_from(first: int) -> Callable[[], Iterator[int]]:
    counter = itertools.count(first)
    return lambda: iter(counter)


class History(RuleBasedStateMachine):
    """Its rules let time pass; those of test_histories are the commands."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for module, name, value in LIMITS:
            self.patch.setattr(module, name, value)
        self.patch.setattr(shard_leases, "random_blocks", blocks_from(1))
        self.loop = asyncio.new_event_loop()
        self.now_ms = START_MS
        self.store = DictStore()
        self.shard = Shard()
        self.loader = Loader(self.store, self.shard)
        self.model = Model()
        self.durable_model = Model()
        self.written: list[Model] = []
        self.messages = itertools.count(1)
        self.log_ends = {1: 0, 2: 0}
        self.pending: list[tuple[Callable[[int], None], asyncio.Task[None]]] = []
        self.given_out: set[int] = set()
        self.restarts = 0
        self.former: dict[str, set[int]] = {queue_id: set() for queue_id in QUEUES}
        self.unswept: set[str] = set()  # deleted queues whose attempts records are still there

    def close(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.spin()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
        self.patch.undo()

    def spin(self) -> None:
        for _ in range(6):
            self.loop.run_until_complete(asyncio.sleep(0))

    def tick(self, by_ms: int = 1) -> None:
        self.now_ms += by_ms

    # --- Running commands, now or when what they need has been read ----------

    def run(self, command: Callable[[int], None], slow: bool = False) -> None:
        self.tick()
        self.attempt(command, slow)

    def attempt(self, command: Callable[[int], None], slow: bool) -> None:
        for _ in range(200):
            try:
                command(self.now_ms)
            except (NeedsLane, Needs) as need:
                self.store.slow = slow
                task = self.loop.create_task(self.loader.answer(need))
                if slow:
                    self.spin()
                    self.pending.append((command, task))
                    return
                while not task.done():
                    self.store.slow = False
                    self.store.open_gates()
                    self.spin()
                task.result()
            else:
                return
        raise AssertionError("a command never got what it needs")

    def queue(self, queue_id: str) -> Queue | None:
        return self.shard.queues.get(queue_id)

    def released(self, queue: ModelQueue, message_id: int, held: Held) -> None:
        before = held.before
        if held.purges != queue.purges:
            before = replace(
                before,
                timed=False,
                arrival=self.model.arrivals,  # those of one call: in any order
                came_from_ms=held.claimed_at_ms,
                came_until_ms=self.now_ms,
            )
        queue.entries[message_id] = before

    # --- What the model expects ---

    def waiting(
        self,
        queue: ModelQueue,
        priority: int,
        visible_at_ms: int,
        deadline_ms: int,
        attempts: int,
        now_ms: int,
    ) -> Waiting:
        timed = visible_at_ms > max(now_ms, queue.walked_ms)
        came = (now_ms, self.now_ms)
        if timed:
            came = (visible_at_ms, max(visible_at_ms, self.now_ms))
        return Waiting(
            priority, visible_at_ms, deadline_ms, attempts, timed, self.model.arrival(), *came
        )

    def returned(
        self, holder: tuple[ModelQueue, int, Held], outcome: str, visible_at_ms: int, now_ms: int
    ) -> None:
        queue, message_id, held = holder
        before = held.before
        # Without an outcome no one worked on it: the attempt does not count.
        attempts = held.attempts if outcome else before.attempts
        if outcome and attempts >= queue.max_attempts:
            queue.entries[message_id] = Failed(attempts, outcome)
        elif before.expired(max(now_ms, queue.walked_ms)):
            del queue.entries[message_id]
            if attempts:
                queue.attempts.pop(message_id, None)
            return
        else:
            if visible_at_ms <= max(now_ms, queue.walked_ms):
                visible_at_ms = 0
            queue.entries[message_id] = self.waiting(
                queue, before.priority, visible_at_ms, before.deadline_ms, attempts, now_ms
            )
        if outcome:
            attempt = FailedAttempt(held.consumer, held.claimed_at_ms, outcome)
            queue.attempts[message_id] = (*queue.attempts.get(message_id, ()), attempt)

    def tokens(self, chosen: list[int]) -> list[int]:
        """Leases that run, that are finished, and that no one ever had."""
        running = [
            held.token for queue in self.model.queues.values() for held in queue.held().values()
        ]
        known = sorted({*running, *list(self.model.finished)[-8:], 10**15})
        running.sort()
        return [
            (
                running[pick // 4 % len(running)]
                if pick % 4 and running
                else known[pick % len(known)]
            )
            for pick in chosen
        ]

    # --- Time, commits, crashes ---------------------------------------------

    @rule(by_ms=st.sampled_from([5, 30, 60, 200, 1000]))
    def wait(self, by_ms: int) -> None:
        self.tick(by_ms)

    @rule()
    def answer(self) -> None:
        """Everything that was being read slowly gets a step further."""
        self.store.slow = True
        self.store.open_gates()
        self.spin()
        pending, self.pending = self.pending, []
        for index, (command, task) in enumerate(pending):
            if not task.done():
                self.pending.append(pending[index])
                continue
            task.result()
            self.attempt(command, slow=index % 2 == 0)

    @rule(late=st.booleans())
    def commit(self, late: bool = False) -> None:
        self.tick()
        rows = self.shard.drain(self.now_ms)
        if not rows:
            assert self.shard.drain(self.now_ms) == []
            return
        self.store.write(rows, self.now_ms, late=late)
        self.rows_match()
        self.written.append(self.model.copy())

    @precondition(lambda self: self.written)
    @rule()
    def durable(self) -> None:
        self.store.make_durable()
        self.durable_model = self.written.pop(0)
        self.shard.durable()

    @rule(
        surviving=st.integers(0, 3),
        away_ms=st.sampled_from([0, 100, 1000]),
        sure=st.integers(0, 3),
    )
    def crash(self, surviving: int, away_ms: int, sure: int = 0) -> None:
        if sure:
            return
        surviving = min(surviving, len(self.written))
        self.store = self.store.crash(surviving)
        self.model = self.written[surviving - 1] if surviving else self.durable_model
        self.durable_model, self.written = self.model.copy(), []
        self.restarts += 1
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.pending = []
        self.spin()
        self.now_ms += away_ms
        last_ms = self.loop.run_until_complete(last_clock_ms(self.store))
        self.shard = self.loop.run_until_complete(load_shard(self.store, last_ms))
        grace = LeaseGrace(self.shard.queues.values(), last_ms, self.now_ms)
        while not grace.is_done:
            grace.step()
        self.loader = Loader(self.store, self.shard)
        for queue in self.model.queues.values():
            queue.walked_ms = 0
            for message_id, held in queue.held().items():
                deadline_ms = held.deadline_ms
                if deadline_ms > last_ms:
                    grace_ms = self.now_ms + min(held.length_ms, GRACE_MS)
                    deadline_ms = max(deadline_ms, grace_ms)
                queue.entries[message_id] = replace(held, deadline_ms=deadline_ms, releasable=False)
        running = self.leases()
        assert {lease.token: lease.deadline_ms for lease in running} == {
            held.token: held.deadline_ms
            for queue in self.model.queues.values()
            for held in queue.held().values()
        }
        assert self.shard.revision == self.model.revision
        assert self.shard.cursors == self.model.cursors
        assert {
            queue_id: {one.ingest_shard: (one.cursor, one.end) for one in ranges}
            for queue_id, ranges in self.shard.replays.by_queue.items()
        } == {name: queue.replays for name, queue in self.model.queues.items() if queue.replays}
        self.unswept = {name for name, was in self.shard.deleted.items() if was.garbage_epochs}

    def leases(self) -> list[Lease]:
        """Every lease, looked at in copies: the buckets stay packed."""
        found: list[Lease] = []
        for queue in self.shard.queues.values():
            for bucket in queue.leases.buckets_from(0):
                seen = copy(bucket)
                seen._leases = dict(seen._leases)
                found += seen.leases.values()
        return found

    # --- What must hold -----------------------------------------------------

    def rows_match(self) -> None:
        """The rows say what the model says, but for what no one is told of."""
        for queue_id in QUEUES:
            stored = stored_queue(self.store.rows, queue_id)
            expected = self.model.queues.get(queue_id)
            if expected is None:
                assert stored is None
                continue
            assert stored is not None
            self.drop_what_is_over(queue_id, expected, set(stored.waiting), stored.failed)
            assert {
                m: (w.attempts, w.retention_deadline_ms) for m, w in stored.waiting.items()
            } == {m: (w.attempts, w.deadline_ms) for m, w in expected.waiting().items()}
            for message_id, entry in expected.waiting().items():
                found = stored.waiting[message_id]
                assert found.visible_at_ms == entry.visible_at_ms or not entry.timed
            assert {
                m: (h.lease, h.lease_deadline_ms, h.attempts) for m, h in stored.held.items()
            } == {m: (h.token, h.deadline_ms, h.attempts) for m, h in expected.held().items()}
            assert {m: (d.lease, d.attempts, d.transferred_to) for m, d in stored.done.items()} == {
                m: (d.token, d.attempts, d.transferred_to) for m, d in expected.done().items()
            }
            assert {m: (f.attempts, f.reason) for m, f in stored.failed.items()} == {
                m: (f.attempts, f.reason) for m, f in expected.failed().items()
            }
            assert {
                m: (a.attempts, a.failed_at_ms, a.retention_deadline_ms)
                for m, a in stored.archived.items()
            } == {
                m: (a.attempts, a.failed_at_ms, a.deadline_ms)
                for m, a in expected.archived().items()
            }
            for message_id in expected.entries:
                result = stored_attempts(self.store.rows, queue_id, message_id)
                assert result == expected.attempts.get(message_id, ())
            expected.lowest_max_attempts = expected.max_attempts

    def drop_what_is_over(
        self, queue_id: str, expected: ModelQueue, waiting: set[int], failed: Mapping[int, object]
    ) -> None:
        """A claim that comes along drops what is past its retention or out of attempts."""
        for message_id, entry in expected.waiting().items():
            if message_id in waiting:
                continue
            if message_id in failed:
                assert entry.attempts >= expected.lowest_max_attempts
                expected.entries[message_id] = Failed(entry.attempts, ATTEMPTS_USED_UP)
            else:
                assert entry.expired(expected.walked_ms), f"{message_id} is lost"
                expected.expire(message_id)

    @invariant()
    def counts_match(self) -> None:
        assert set(self.shard.queues) == set(self.model.queues)
        for queue_id, queue in self.shard.queues.items():
            expected = self.model.queues[queue_id]
            over = sum(
                entry.expired(self.model.queues[queue_id].walked_ms)
                or entry.attempts >= expected.lowest_max_attempts
                for entry in expected.waiting().values()
            )
            available = queue.waiting.ready_count + queue.waiting.timed_count
            assert len(expected.waiting()) - over <= available <= len(expected.waiting())
            assert queue.leases.count == len(expected.held())
            assert queue.done.count == len(expected.done())
            assert queue.archived.count == len(expected.archived())
            due_ms = queue.waiting.next_due_ms()
            timed = [w.visible_at_ms for w in expected.waiting().values() if w.timed]
            if queue.waiting.timed_count and timed and not over:
                assert due_ms is not None
                assert due_ms <= min(timed)
