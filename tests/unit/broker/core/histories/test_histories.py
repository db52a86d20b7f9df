"""Random histories of a shard against the model: crashes, slow reads, late commits, tiny limits.

`--hypothesis-profile=thorough` runs it for hours. What the core could break of the invariants in
the design, and the rule after which it would show:

1. Never lost, once per queue: `assign` (ranges that come twice, late or too early), `backfill` into
   queues made again, `crash`; `nothing_is_lost_in_the_end` claims all that is left.
2. One valid lease: `claim` gives only what waits, under a token never given out before; `ack`,
   `nack`, `extend` and `execute` with tokens that are over, or that no one had; `crash` and
   `stand_still`, where leases go on.
3. One list each: `commit` reads all rows again, which must tell of every entry once, and as the
   model; attempts never above what was allowed at the claim (`update`, then `claim`). Second
   entries, by `execute`, `redrive` or `backfill`, go to queues that do not list the message: where
   they do, test_executions tells the story.
4. Visible, most urgent, oldest first: what `claim` and `peek` give, and pass over; `browse`.
5. An answered ack holds: `durable` keeps the model that `crash` goes back to at most.
6. All or nothing: `execute` with bad commands at any place, slow reads in between, and `crash`;
   once, too: `execute_again`, `forget`, and `send` for what is pushed.
8. Refused calls change nothing: after those of `execute`, rows and model are compared as ever.
9. No failure of ours costs an attempt: `release`, what cannot be had in `claim`, `crash`, and
   `fail`, which takes the attempt back.

Retention is part of 1 and 4: nothing is handed out after it, and nothing goes before. What needs
more than a core (7: two processes; a store or an ingest that is down) is in tests/integration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    rule,
)

from libs.storage.records.queues import AvailableMessage
from services.broker.core.leases import Terms
from services.broker.core.queue import Choice, Queue, Selector
from services.broker.core.settings import DEFAULT_PRIORITY
from services.broker.core.shard import Assignment, Range
from tests.forms import examples
from tests.unit.broker.core.applied import assign_all
from tests.unit.broker.core.histories.histories import QUEUES, queue_ids, slowly
from tests.unit.broker.core.histories.lease_histories import LeaseHistory
from tests.unit.broker.core.histories.model import (
    Held,
)
from tests.unit.broker.core.shards import Each

FEW = 3  # messages which cannot be had, beyond which a claim does not look: half of CACHED_MAX

message_kinds = st.tuples(
    queue_ids,
    st.sampled_from([DEFAULT_PRIORITY, DEFAULT_PRIORITY, 0, 7]),
    st.sampled_from([0, 0, 0, 50, 100, 100, 100, 100, 400, 3000]),  # visible after
    st.sampled_from([0, 0, 0, 0, 60, 500]),  # retention
)


class Choosing(Selector):
    """Chooses the first messages of all ingest shards but one, all at once or one by one."""

    def __init__(self, limit: int, away: int | None) -> None:
        self.left = limit
        self.away = away

    def capacity(self) -> int:
        return self.left

    def offer(self, items: Sequence[AvailableMessage]) -> bool:
        if any(item.message_id % 2 == self.away for item in items):
            return False
        self.left -= len(items)
        return True

    def choose(self, item: AvailableMessage) -> Choice:
        if not self.left:
            return Choice.STOP
        if item.message_id % 2 == self.away:
            return Choice.SKIP
        self.left -= 1
        return Choice.TAKE


def _as_sent(piece: Range) -> Range:
    """As routers send it: without columns that tell nothing."""
    return replace(piece, assignments=[_without_defaults(one) for one in piece.assignments])


def _without_defaults(assignment: Assignment) -> Assignment:
    return assignment._replace(
        priorities=assignment.priorities
        if set(assignment.priorities) != {DEFAULT_PRIORITY}
        else (),
        retention_deadlines_ms=assignment[3] if any(assignment.retention_deadlines_ms) else (),
        visible_at_ms=assignment.visible_at_ms if any(assignment.visible_at_ms) else (),
    )


class Histories(LeaseHistory):
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
        early=st.booleans(),
    )
    def assign(
        self,
        log: int,
        back: int,
        kinds: list[tuple[str, int, int, int]],
        twice: bool,
        slow: bool,
        early: bool = False,
    ) -> None:
        previous = max(0, self.model.cursors.get(log, 0) - back)
        self.log_ends[log] += 10
        piece = Range(log, previous, self.log_ends[log], self.assignments(kinds))
        # A second router, which judged the same range, may come in the same call or later.
        pieces = [piece, piece] if twice else [piece]
        self.run(lambda now_ms: self.assign_now(pieces, now_ms), slow)
        if early:  # as after a step of a range that has more
            queues = [one for name in QUEUES if (one := self.queue(name)) is not None]
            self.shard.drain_early(queues, self.now_ms)

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
        applied = assign_all(self.shard, list(map(_as_sent, pieces)), now_ms)

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

    # --- Claims -------------------------------------------------------------

    @rule(
        queue_id=queue_ids,
        limit=st.integers(1, 12),
        lease_ms=st.sampled_from([20, 200, 2000, 60_000]),
        away=st.sampled_from([None, None, 0, 1]),
        slow=slowly,
        at_once=st.booleans(),
    )
    def claim(
        self,
        queue_id: str,
        limit: int,
        lease_ms: int,
        away: int | None,
        slow: bool,
        at_once: bool = True,
    ) -> None:
        queue = self.queue(queue_id)
        if queue is not None:
            self.run(lambda now: self.claim_now(queue, limit, lease_ms, away, now, at_once), slow)

    def claim_now(
        self,
        queue: Queue,
        limit: int,
        lease_ms: int,
        shard: int | None,
        now_ms: int,
        at_once: bool,
    ) -> None:
        if self.shard.queues.get(queue.queue_id) is not queue:
            return
        self.walk(queue, now_ms)
        choosing = Choosing(limit, shard)
        selector = choosing if at_once else Each(choosing.choose)
        given = self.shard.leases.claim(queue, selector, lease_ms, f"c{limit}", now_ms)

        expected = self.model.queues[queue.queue_id]
        in_flight = len(expected.held())
        reachable = {m for m in expected.entries if m % 2 != shard}
        ids = [item.message_id for item in given.items]
        assert len(ids) <= limit
        assert not ids or in_flight + len(ids) <= expected.max_in_flight
        expected.check_delivery(ids, now_ms, reachable)
        visible = expected.surely_visible(now_ms).keys()
        away = {m for m, e in expected.waiting().items() if e.visible_at_ms <= now_ms} - reachable
        if not ids and in_flight < expected.max_in_flight and len(away) <= FEW:
            assert not visible & reachable, "a claim found nothing"
        assert given.terms == Terms(queue, f"c{limit}", now_ms, now_ms + lease_ms, lease_ms)
        for item, token in zip(given.items, given.tokens, strict=True):
            before = expected.waiting()[item.message_id]
            assert item.attempts == before.attempts
            assert item.priority == before.priority
            assert token not in self.given_out
            self.given_out.add(token)
            expected.entries[item.message_id] = Held(
                token,
                given.terms.consumer,
                now_ms,
                now_ms + lease_ms,
                lease_ms,
                item.attempts + 1,
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
            ids = queue.peek(limit, lambda ids: [one for one in ids if one % 2 != away], now_ms)
            expected = self.model.queues[queue_id]
            assert len(ids) <= limit
            expected.check_delivery(ids, now_ms, {m for m in expected.entries if m % 2 != away})

        self.run(look)

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
        max_examples=examples(150),
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
