"""Acks by blocks of tokens: as if each token were looked up by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, pairwise, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.storage.records.states import LeaseOutcome
from services.broker.core import lease_table, leases
from services.broker.core import lease_table as shard_leases
from services.broker.core.commands import Finish, Nack
from services.broker.core.lease_table import FinishedLeases, LeaseIndex
from services.broker.core.waiting.scan import Choice
from tests.unit.broker.core.shards import Each, Rig

CLAIMS = (4, 1, 7, 3, 10, 5)
"""Messages of each claim; a bucket has 5 here, and those of 3 or more are columns."""

PRINCIPALS = ("shop", "shop", "ops", "ops", "", "shop")
"""Who makes each claim: some small ones of both come in one commit."""

ACKS = st.lists(
    st.one_of(
        st.tuples(st.just("block"), st.integers(0, 7)),
        st.tuples(st.just("token"), st.integers(0, 29)),
        st.tuples(st.just("unknown"), st.integers(0, 1 << 60)),
    ),
    max_size=40,
)


def _next_of(choices: Iterator[Choice], _: object) -> Choice:
    return next(choices)


async def rig_with_leases() -> tuple[Rig, list[int], list[Sequence[int]]]:
    """All tokens, and those of each part of a claim."""
    rig = Rig()
    rig.create()
    rig.shard.leases._blocks = iter(range(1, 100))
    await rig.route(range(1, sum(CLAIMS) + 1))
    tokens: list[int] = []
    parts: list[Sequence[int]] = []
    for count, principal in zip(CLAIMS, PRINCIPALS, strict=True):
        choices = chain(repeat(Choice.TAKE, count), repeat(Choice.STOP))
        selector = Each(partial(_next_of, choices))
        claimed = rig.shard.leases.claim(
            rig.queue(), selector, 30_000, "worker", rig.now_ms, principal
        )
        tokens += claimed.tokens
        parts += [claimed.tokens[first:end] for _, first, end in claimed.parts]
    assert len(rig.shard.leases._running) == len(tokens) == len(set(tokens)) == sum(CLAIMS)
    return rig, tokens, parts


def held_of(tokens: Sequence[int], running: Iterable[int]) -> Counter[str]:
    """How many of the running leases each principal has."""
    claimed_by = dict(zip(tokens, chain(*map(repeat, PRINCIPALS, CLAIMS)), strict=True))
    return Counter(claimed_by[token] for token in running)


@given(rounds=st.lists(st.tuples(ACKS, st.lists(st.integers(0, 29), max_size=3)), max_size=4))
async def test_acks_in_any_order_and_number(
    rounds: list[tuple[list[tuple[str, int]], list[int]]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "PACKED_MIN", 3)
        patch.setattr(leases, "IN_FLIGHT_BUCKET_MAX", 5)
        rig, tokens, parts = await rig_with_leases()
        expected: dict[int, LeaseOutcome] = {}
        for acks, nacks in rounds:
            asked: list[int] = []
            for kind, at in acks:
                if kind == "block":
                    asked += parts[at % len(parts)]
                else:
                    asked.append(tokens[at] if kind == "token" else at << 16)
            wanted = []
            for token in asked:
                if token in tokens:
                    outcome = expected.setdefault(token, LeaseOutcome.ACKED)
                    wanted.append(Finish.OK if outcome is LeaseOutcome.ACKED else Finish.ENDED)
                else:
                    wanted.append(Finish.UNKNOWN)
            assert rig.shard.leases.ack(asked, rig.now_ms) == wanted
            for at in nacks:
                outcome = expected.setdefault(tokens[at], LeaseOutcome.NACKED)
                nack = await rig.nack(Nack(tokens[at], "no", 60_000))
                assert nack == [Finish.OK if outcome is LeaseOutcome.NACKED else Finish.ENDED]

            running = [token for token in tokens if token not in expected]
            assert sorted(one.token for one in rig.queue().leases) == sorted(running)
            assert len(rig.shard.leases._running) == len(running)
            assert rig.shard.leases._running._held == held_of(tokens, running)
            for token in tokens:
                assert (rig.shard.leases.running(token) is None) == (token in expected)
                assert rig.shard.leases.finished.outcome(token) == expected.get(token)
            acked = [one for one, how in expected.items() if how is LeaseOutcome.ACKED]
            # Each message is done under the lease that it had.
            done = {one[5]: one[0] for one in rig.queue().done._new}
            assert done == {token: tokens.index(token) + 1 for token in acked}
        rig.commit()
        await rig.restart()
        # Who has claimed is not stored
        left_count = len(tokens) - len(expected)
        assert rig.shard.leases._running._held == Counter({"": left_count} if left_count else {})
        for token in tokens:
            assert (rig.shard.leases.running(token) is None) == (token in expected)
            assert rig.shard.leases.finished.outcome(token) == expected.get(token)


def test_a_block_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([True, True, False])
    monkeypatch.setattr(LeaseIndex, "is_free", lambda self, block: not next(taken))
    shard = Rig().shard
    shard.leases._blocks = iter((7, 8, 9))
    assert shard.leases._free_block() == 9


def test_no_block_reveals_another_and_none_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given blocks in the order of their claims, and those of a second start
    blocks = shard_leases.random_blocks()
    made = [*islice(blocks, 1000), *islice(shard_leases.random_blocks(), 1000)]

    # Then none comes twice, neither does a step between two, and no bit hangs on that of before
    assert len(set(made)) == len(made)
    steps = [later - earlier for earlier, later in pairwise(made)]
    assert len(set(steps)) == len(steps)
    assert len({later - earlier for earlier, later in pairwise(steps)}) == len(steps) - 1
    for bit in range(56):
        bits = [block >> bit & 1 for block in made]
        flips = sum(earlier != later for earlier, later in pairwise(bits))
        # Half of 2,000, with a standard deviation of 22: beyond 10 of these in one of 10^21 runs.
        assert 776 < sum(bits) < 1224
        assert 776 < flips < 1224
    assert max(made) < 1 << 56
    monkeypatch.setattr("secrets.randbits", lambda bits: 0)
    assert next(blocks) == 1


def test_blocks_are_forgotten_with_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_table, "FINISHED_SLOTS", 4)
    finished = FinishedLeases()
    for block in range(1, 10):
        finished.add(
            tuple(range(block << 8, (block << 8) + 100)), LeaseOutcome.ACKED, whole_block=True
        )
        finished.add([block], LeaseOutcome.NACKED)
        assert [slot for slot, _ in finished.drain()] == [(block - 1) % 4]
    assert [block for block in range(1, 10) if finished.outcome(block << 8)] == [7, 8, 9]
    assert [block for block in range(1, 10) if finished.outcome(block)] == [7, 8, 9]
    assert finished.outcome((9 << 8) + 99) is LeaseOutcome.ACKED
    assert finished.outcome((9 << 8) + 100) is None
    assert (len(finished._blocks), len(finished._outcomes), finished._count) == (3, 3, 303)
