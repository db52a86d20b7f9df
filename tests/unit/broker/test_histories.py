"""Random histories of a shard against the model: crashes, slow reads, late commits, tiny limits.

`--hypothesis-profile=thorough` runs it for hours.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    rule,
)

from libs.storage.queues import AvailableMessage
from services.broker.leases import Lease
from services.broker.queue_machine import Choice, Queue
from services.broker.shard_machine import Assignment, Finish, Nack, Range
from tests.unit.broker.execute_histories import ExecuteHistory
from tests.unit.broker.histories import QUEUES, queue_ids, slowly
from tests.unit.broker.model import (
    Done,
    Failed,
    Held,
)

FEW = 3  # messages which cannot be had, beyond which a claim does not look: half of CACHED_MAX

picks = st.lists(st.integers(0, 40), min_size=1, max_size=6)
message_kinds = st.tuples(
    queue_ids,
    st.sampled_from([0, 0, 0, 7]),  # priority
    st.sampled_from([0, 0, 0, 50, 100, 100, 100, 100, 400, 3000]),  # visible after
    st.sampled_from([0, 0, 0, 0, 60, 500]),  # retention
)


class Histories(ExecuteHistory):
    def teardown(self) -> None:
        try:
            self.nothing_is_lost_in_the_end()
            self.everything_pushed_arrives_once()
        finally:
            self.close()

    @initialize(
        max_attempts=st.integers(1, 4),
        max_in_flight=st.sampled_from([2, 50]),
        kinds=st.lists(message_kinds, min_size=4, max_size=20),
    )
    def begin(
        self, max_attempts: int, max_in_flight: int, kinds: list[tuple[str, int, int, int]]
    ) -> None:
        for queue_id in QUEUES:
            self.create(queue_id, max_attempts, max_in_flight)
        self.assign(1, 0, kinds, False, False)
        self.commit()

    # --- Routing ------------------------------------------------------------

    @rule(
        log=st.sampled_from([1, 2]),
        back=st.sampled_from([0, 0, 0, 0, 1, -1]),
        kinds=st.lists(message_kinds, max_size=12),
        twice=st.booleans(),
        slow=slowly,
    )
    def assign(
        self,
        log: int,
        back: int,
        kinds: list[tuple[str, int, int, int]],
        twice: bool,
        slow: bool,
    ) -> None:
        previous = max(0, self.model.cursors.get(log, 0) - back)
        self.log_ends[log] += 10
        piece = Range(log, previous, self.log_ends[log], self.assignments(kinds))
        # A second router, which judged the same range, may come in the same call or later.
        pieces = [piece, piece] if twice else [piece]
        self.run(lambda now_ms: self.assign_now(pieces, now_ms), slow)

    def assignments(self, kinds: list[tuple[str, int, int, int]]) -> list[Assignment]:
        found = []
        for queue_id in QUEUES:
            mine = [kind for kind in kinds if kind[0] == queue_id]
            if mine:
                found.append(
                    Assignment(
                        queue_id,
                        [next(self.messages) for _ in mine],
                        [priority for _, priority, _, _ in mine],
                        [r and self.now_ms + r for _, _, _, r in mine],
                        [v and -(-(self.now_ms + v) // 50) * 50 for _, _, v, _ in mine],
                    )
                )
        return found

    def assign_now(self, pieces: list[Range], now_ms: int) -> None:
        # The servicer refuses what was judged by other configs.
        if any(a.queue_id not in self.shard.queues for piece in pieces for a in piece.assignments):
            return
        applied = self.shard.assign(pieces, now_ms)

        expected = []
        for piece in pieces:
            fits = self.model.cursors.get(piece.log, 0) == piece.previous < piece.last
            expected.append(fits)
            if fits:
                self.model.cursors[piece.log] = piece.last
                for assignment in piece.assignments:
                    self.routed(assignment, now_ms)
        assert applied == expected
        assert self.shard.cursors == self.model.cursors

    def routed(self, assignment: Assignment, now_ms: int) -> None:
        queue = self.model.queues[assignment.queue_id]
        for message_id, priority, deadline_ms, visible_at_ms in zip(
            assignment.message_ids,
            assignment.priorities,
            assignment.retention_deadlines_ms,
            assignment.visible_at_ms,
            strict=True,
        ):
            assert message_id not in queue.entries, "routed twice"
            if not 0 < deadline_ms <= now_ms:
                queue.entries[message_id] = self.waiting(
                    queue, priority, visible_at_ms, deadline_ms, 0, now_ms
                )

    # --- Claims -------------------------------------------------------------

    @rule(
        queue_id=queue_ids,
        limit=st.integers(1, 12),
        lease_ms=st.sampled_from([20, 200, 2000, 60_000]),
        away=st.sampled_from([None, None, 0, 1]),
        slow=slowly,
    )
    def claim(self, queue_id: str, limit: int, lease_ms: int, away: int | None, slow: bool) -> None:
        queue = self.queue(queue_id)
        if queue is not None:
            self.run(lambda now: self.claim_now(queue, limit, lease_ms, away, now), slow)

    def claim_now(
        self, queue: Queue, limit: int, lease_ms: int, shard: int | None, now_ms: int
    ) -> None:
        if self.shard.queues.get(queue.queue_id) is not queue:
            return
        self.walk(queue, now_ms)
        count = 0

        def choose(item: AvailableMessage) -> Choice:
            nonlocal count
            if count >= limit:
                return Choice.STOP
            if item.message_id % 2 == shard:
                return Choice.SKIP
            count += 1
            return Choice.TAKE

        given = self.shard.claim(queue, choose, lease_ms, f"c{limit}", now_ms)

        expected = self.model.queues[queue.queue_id]
        in_flight = len(expected.held())
        reachable = {m for m in expected.entries if m % 2 != shard}
        ids = [lease.message_id for lease in given]
        assert len(ids) <= limit
        assert not ids or in_flight + len(ids) <= expected.max_in_flight
        expected.check_delivery(ids, now_ms, reachable)
        visible = expected.surely_visible(now_ms).keys()
        away = {m for m, e in expected.waiting().items() if e.visible_at_ms <= now_ms} - reachable
        if not ids and in_flight < expected.max_in_flight and len(away) <= FEW:
            assert not visible & reachable, "a claim found nothing"
        for lease in given:
            before = expected.waiting()[lease.message_id]
            assert lease.attempts == before.attempts + 1
            assert lease.priority == before.priority
            assert lease.token not in self.given_out
            self.given_out.add(lease.token)
            expected.entries[lease.message_id] = Held(
                lease.token,
                lease.consumer,
                now_ms,
                now_ms + lease_ms,
                lease_ms,
                lease.attempts,
                before,
                expected.purges,
            )

    def walk(self, queue: Queue, now_ms: int) -> None:
        expected = self.model.queues[queue.queue_id]
        expected.walked_ms = max(expected.walked_ms, now_ms)

    @rule(queue_id=queue_ids, limit=st.integers(1, 12), away=st.sampled_from([None, 0]))
    def peek(self, queue_id: str, limit: int, away: int | None) -> None:
        queue = self.queue(queue_id)
        if queue is None:
            return

        def look(now_ms: int) -> None:
            self.walk(queue, now_ms)
            ids = queue.peek(limit, lambda message_id: message_id % 2 != away, now_ms)
            expected = self.model.queues[queue_id]
            assert len(ids) <= limit
            expected.check_delivery(ids, now_ms, {m for m in expected.entries if m % 2 != away})

        self.run(look)

    # --- Leases end ---------------------------------------------------------

    def expected_finish(self, token: int, outcome: str) -> set[Finish]:
        found = self.model.finished.get(token)
        if found is None:
            return {Finish.UNKNOWN}
        told = Finish.OK if found == outcome else Finish.ENDED
        return {told} if self.model.surely_remembered(token) else {told, Finish.UNKNOWN}

    @rule(chosen=picks)
    def ack(self, chosen: list[int]) -> None:
        self.tick()
        tokens = self.tokens(chosen)
        results = self.shard.ack(tokens, self.now_ms)
        for token, result in zip(tokens, results, strict=True):
            holder = self.model.holder(token)
            if holder is None:
                assert result in self.expected_finish(token, "acked")
                continue
            assert result is Finish.OK
            queue, message_id, held = holder
            queue.entries[message_id] = Done(token, held.attempts)
            self.model.finished[token] = "acked"

    @rule(
        chosen=picks,
        delay_ms=st.sampled_from([None, None, 0, 50, 51, 300]),
        release=st.sampled_from([False, False, True]),
        slow=slowly,
    )
    def nack(self, chosen: list[int], delay_ms: int | None, release: bool, slow: bool) -> None:
        tokens = self.tokens(chosen)
        nacks = [Nack(token, "no", delay_ms, release) for token in tokens]
        self.tick()
        came_ms = self.now_ms
        self.run(lambda now_ms: self.nack_now(nacks, now_ms, came_ms), slow)

    def nack_now(self, nacks: list[Nack], now_ms: int, came_ms: int) -> None:
        tokens = [nack.token for nack in nacks]
        release, delay_ms = nacks[0].release, nacks[0].delay_ms
        results = self.shard.nack(nacks, now_ms, came_ms)
        for token, result in zip(tokens, results, strict=True):
            holder = self.model.holder(token)
            if holder is None:
                assert result in self.expected_finish(token, "nacked")
                continue
            assert result is Finish.OK
            queue, _, held = holder
            backoff_ms = 0 if release else queue.backoff_ms * held.attempts
            wait_ms = backoff_ms if delay_ms is None else delay_ms
            visible_at_ms = wait_ms and came_ms + wait_ms
            self.returned(holder, "" if release else "nack: no", visible_at_ms, now_ms)
            self.model.finished[token] = "nacked"

    @rule(chosen=picks, lease_ms=st.sampled_from([0, 30, 500]))
    def extend(self, chosen: list[int], lease_ms: int) -> None:
        self.tick()
        tokens = self.tokens(chosen)
        results = self.shard.extend(tokens, lease_ms, self.now_ms)
        for token, (result, deadline_ms) in zip(tokens, results, strict=True):
            holder = self.model.holder(token)
            if holder is None:
                known = token in self.model.finished
                sure = self.model.surely_remembered(token)
                assert result is Finish.ENDED if sure else result is not Finish.OK
                assert known or result is Finish.UNKNOWN
                continue
            queue, message_id, held = holder
            assert result is Finish.OK
            assert deadline_ms == queue.end_of_extension(held, lease_ms, self.now_ms)
            queue.entries[message_id] = replace(held, deadline_ms=deadline_ms)

    @rule(limit=st.integers(1, 9), slow=slowly)
    def expire(self, limit: int, slow: bool) -> None:
        self.tick()
        until_ms = self.now_ms
        self.run(lambda _: self.expire_now(limit, until_ms), slow)

    def expire_now(self, limit: int, now_ms: int) -> None:
        due = {
            held.token
            for queue in self.model.queues.values()
            for held in queue.held().values()
            if held.deadline_ms <= now_ms
        }
        self.shard.expire(now_ms, limit)
        running = {
            lease.token: lease for queue in self.shard.queues.values() for lease in queue.leases()
        }
        ended = [token for token in self.held_tokens() if token not in running]
        assert set(ended) <= due, "a lease ended early"
        assert len(ended) >= min(limit, len(due)), "a lease did not end"
        for token in self.in_order_of_return(ended):
            holder = self.model.holder(token)
            assert holder is not None
            queue, _, held = holder
            wait_ms = queue.backoff_ms * held.attempts
            self.returned(holder, "lease expired", wait_ms and now_ms + wait_ms, now_ms)
            self.model.finished[token] = "ended"
        next_ms = self.shard.deadlines.next_ms()
        left = [lease.deadline_ms for lease in running.values()]
        assert (next_ms is None) == (not left)
        assert next_ms is None or next_ms <= min(left)

    def held_tokens(self) -> list[int]:
        return [
            held.token for queue in self.model.queues.values() for held in queue.held().values()
        ]

    def in_order_of_return(self, ended: list[int]) -> list[int]:
        order = list(self.shard.finished._outcomes)  # the order is free: take theirs
        return sorted(ended, key=order.index)

    @rule(chosen=picks, slow=slowly)
    def release(self, chosen: list[int], slow: bool) -> None:
        mine: list[Lease] = []
        wanted = set(self.tokens(chosen))
        for queue in self.shard.queues.values():
            mine += [one for one in queue.leases() if one.token in wanted and one.origin]
        self.tick()
        self.shard.release([*mine, *mine[:1]])
        for lease in mine:
            holder = self.model.holder(lease.token)
            assert holder is not None
            expected, message_id, held = holder
            assert held.releasable
            self.released(expected, message_id, held)

    @rule(chosen=picks)
    def fail(self, chosen: list[int]) -> None:
        wanted = set(self.tokens(chosen[:1]))
        for queue in self.shard.queues.values():
            mine = [one for one in queue.leases() if one.token in wanted]
            self.shard.fail(mine, "gone", self.now_ms)
            for lease in mine:
                expected = self.model.queues[queue.queue_id]
                held = expected.held()[lease.message_id]
                expected.entries[lease.message_id] = Failed(held.attempts - 1, "gone")

    # Rules are drawn evenly: what happens often has several.

    @rule(queue_id=queue_ids, limit=st.integers(1, 12))
    def plain_claim(self, queue_id: str, limit: int) -> None:
        self.claim(queue_id, limit, 2000, None, False)

    @rule(log=st.sampled_from([1, 2]), kinds=st.lists(message_kinds, min_size=1, max_size=20))
    def plain_assign(self, log: int, kinds: list[tuple[str, int, int, int]]) -> None:
        self.assign(log, 0, kinds, False, False)

    @rule(times=st.integers(1, 3))
    def plain_commit(self, times: int) -> None:
        self.commit()
        for _ in range(times):
            if self.written:
                self.durable()

    def nothing_is_lost_in_the_end(self) -> None:
        """Everything that waits can be had, after a last restart."""
        for _ in range(6):
            self.answer()
        self.commit()
        while self.written:
            self.durable()
        self.crash(0, 0)
        for _ in range(2):
            for queue_id in list(self.model.queues):
                self.update(queue_id, 4, 10_000)
                for _ in range(200):
                    before = len(self.model.queues[queue_id].held())
                    self.claim(queue_id, 12, 60_000, None, False)
                    if len(self.model.queues[queue_id].held()) == before:
                        break
            self.tick(5000)
        self.commit()
        for queue in self.model.queues.values():
            assert queue.waiting() == {}


TestHistories = Histories.TestCase
if settings.get_current_profile_name() != "thorough":
    TestHistories.settings = settings(
        max_examples=150,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
