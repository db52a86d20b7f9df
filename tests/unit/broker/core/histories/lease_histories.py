"""Random histories, the part about leases: how they end, and how they go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import rule

from services.broker.core.lease_table import GRACE_MS, LeaseGrace
from services.broker.core.leases import Lease
from services.broker.core.shard import Finish, Nack
from tests.unit.broker.core.histories.histories import QUEUES, slowly
from tests.unit.broker.core.histories.model import Done, Failed
from tests.unit.broker.core.histories.removal_histories import RemovalHistory

picks = st.lists(st.integers(0, 40), min_size=1, max_size=6)


class LeaseHistory(RemovalHistory):
    """Its rules finish, extend and end leases."""

    def expected_finish(self, token: int, outcome: str) -> set[Finish]:
        found = self.model.finished.get(token)
        if found is None:
            return {Finish.UNKNOWN}
        ok = Finish.OK if found == outcome else Finish.ENDED
        return {ok} if self.model.surely_remembered(token) else {ok, Finish.UNKNOWN}

    @rule(chosen=picks)
    def ack(self, chosen: list[int]) -> None:
        self.tick()
        tokens = self.tokens(chosen)
        results = self.shard.leases.ack(tokens, self.now_ms)
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
        arrived_ms = self.now_ms
        self.run(lambda now_ms: self.nack_now(nacks, now_ms, arrived_ms), slow)

    def nack_now(self, nacks: list[Nack], now_ms: int, arrived_ms: int) -> None:
        tokens = [nack.token for nack in nacks]
        release, delay_ms = nacks[0].release, nacks[0].delay_ms
        results = self.shard.leases.nack(nacks, now_ms, arrived_ms)
        for token, result in zip(tokens, results, strict=True):
            holder = self.model.holder(token)
            if holder is None:
                assert result in self.expected_finish(token, "nacked")
                continue
            assert result is Finish.OK
            queue, _, held = holder
            backoff_ms = 0 if release else queue.backoff_ms * held.attempts
            wait_ms = backoff_ms if delay_ms is None else delay_ms
            visible_at_ms = wait_ms and arrived_ms + wait_ms
            self.returned(holder, "" if release else "nack: no", visible_at_ms, now_ms)
            self.model.finished[token] = "nacked"

    @rule(chosen=picks, lease_ms=st.sampled_from([0, 30, 500]))
    def extend(self, chosen: list[int], lease_ms: int) -> None:
        self.tick()
        tokens = self.tokens(chosen)
        results = self.shard.leases.extend(tokens, lease_ms, self.now_ms)
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
        leases = self.shard.leases.deadlines.ended(until_ms, limit)
        waiting = {
            name: sum(held.deadline_ms <= until_ms for held in queue.held().values())
            for name, queue in self.model.queues.items()
        }
        named = Counter(lease.queue.queue_id for lease in leases)
        share = limit // len(QUEUES)
        assert len(leases) <= limit
        assert all(named[name] >= min(count, share) for name, count in waiting.items())
        self.run(lambda _: self.expire_now(leases, until_ms), slow)

    def expire_now(self, leases: Sequence[Lease], now_ms: int) -> None:
        due = {
            held.token
            for queue in self.model.queues.values()
            for held in queue.held().values()
            if held.deadline_ms <= now_ms
        }
        chosen = {lease.token for lease in leases}
        self.shard.leases.expire(leases, now_ms)
        running = {lease.token: lease for lease in self.leases()}
        ended = [token for token in self.held_tokens() if token not in running]
        assert set(ended) <= due, "a lease ended early"
        assert set(ended) == due & chosen, "a lease did not end"
        for token in self.in_order_of_return(ended):
            holder = self.model.holder(token)
            assert holder is not None
            queue, _, held = holder
            wait_ms = queue.backoff_ms * held.attempts
            self.returned(holder, "lease expired", wait_ms and now_ms + wait_ms, now_ms)
            self.model.finished[token] = "ended"
        next_ms = self.shard.leases.deadlines.next_ms()
        left = [lease.deadline_ms for lease in running.values()]
        assert (next_ms is None) == (not left)
        assert next_ms is None or next_ms <= min(left)

    def held_tokens(self) -> list[int]:
        return [
            held.token for queue in self.model.queues.values() for held in queue.held().values()
        ]

    def in_order_of_return(self, ended: list[int]) -> list[int]:
        order = list(self.shard.leases.finished._outcomes)  # the order is free: take theirs
        return sorted(ended, key=order.index)

    @rule(asleep_ms=st.sampled_from([1500, 40_000]), sure=st.integers(0, 3))
    def stand_still(self, asleep_ms: int, sure: int) -> None:
        if sure:
            return
        since_ms = self.now_ms
        self.tick(asleep_ms)
        grace = LeaseGrace(self.shard.queues.values(), since_ms, self.now_ms)
        while not grace.is_done:
            grace.step()
        for queue in self.model.queues.values():
            for message_id, held in queue.held().items():
                grace_ms = self.now_ms + min(held.length_ms, GRACE_MS)
                if held.deadline_ms > since_ms:
                    deadline_ms = max(held.deadline_ms, grace_ms)
                    queue.entries[message_id] = replace(held, deadline_ms=deadline_ms)

    @rule(chosen=picks, slow=slowly)
    def release(self, chosen: list[int], slow: bool) -> None:
        wanted = set(self.tokens(chosen))
        mine = [one for one in self.leases() if one.token in wanted and one.origin]
        self.tick()
        self.shard.leases.release([lease.token for lease in (*mine, *mine[:1])])
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
            mine = [one for one in queue.leases if one.token in wanted]
            self.shard.leases.fail(mine, "gone", self.now_ms)
            for lease in mine:
                expected = self.model.queues[queue.queue_id]
                held = expected.held()[lease.message_id]
                expected.entries[lease.message_id] = Failed(held.attempts - 1, "gone")
