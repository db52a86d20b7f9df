"""The grace after a standstill, given in steps between which commands come."""

from __future__ import annotations

import random
from collections.abc import Container, Sequence

import pytest

from services.broker.core import lease_table
from services.broker.core.commands import Finish, Nack, Purge
from services.broker.core.lease_table import GRACE_MS, LeaseGrace
from services.broker.core.leases import Lease
from services.broker.core.queue import Choice
from tests.unit.broker.core.shards import START_MS, Each, Rig

AWAY_MS = 40_000
LEASE_MS = 2_000
QUEUES = ("a", "b", "c")


def begin(rig: Rig, away_ms: int = AWAY_MS) -> LeaseGrace:
    """The broker stood still for so long."""
    since_ms = rig.now_ms
    rig.now_ms += away_ms
    return LeaseGrace(rig.shard.queues.values(), since_ms, rig.now_ms)


def finish(grace: LeaseGrace) -> None:
    while not grace.is_done:
        grace.step()


def running(rig: Rig) -> dict[int, Lease]:
    return {one.token: one for queue in rig.shard.queues.values() for one in queue.leases}


async def test_a_lease_that_ended_before_a_standstill_gets_no_more_time() -> None:
    rig = Rig()
    rig.create()
    await rig.route([1, 2])
    (over,) = await rig.claim(1, lease_ms=1000)
    (alive,) = await rig.claim(1, lease_ms=2000)
    rig.now_ms += 1500

    finish(begin(rig))

    assert over.deadline_ms == START_MS + 1000
    assert alive.deadline_ms == rig.now_ms + 2000


async def test_a_lease_that_reaches_beyond_the_grace_is_neither_moved_nor_written() -> None:
    rig = Rig()
    rig.create()
    await rig.route(range(1, 101))
    long = await rig.claim(50, lease_ms=500_000)
    await rig.claim(50, lease_ms=60_000)
    rig.commit()

    finish(begin(rig))

    assert {one.deadline_ms for one in long} == {START_MS + 500_000}
    ends = {lease.deadline_ms for lease in running(rig).values()}
    assert ends == {START_MS + 500_000, rig.now_ms + GRACE_MS}
    rig.commit()
    await rig.restart()
    assert {lease.deadline_ms for lease in running(rig).values()} == ends


async def claimed_at_once(count: int, lease_ms: int) -> Rig:
    """A queue whose messages are all leased; if they are many, no lease is an object yet."""
    rig = Rig()
    rig.create()
    await rig.route(range(1, count + 1))
    take = Each(lambda item: Choice.TAKE)
    rig.shard.leases.claim(rig.queue(), take, lease_ms, "worker", rig.now_ms)
    rig.commit()
    return rig


@pytest.mark.parametrize("count", [3, 100])
@pytest.mark.parametrize(
    ("lease_ms", "end_ms"),
    [
        (LEASE_MS, AWAY_MS + LEASE_MS),
        (60_000, AWAY_MS + GRACE_MS),
        (AWAY_MS + GRACE_MS - 1, AWAY_MS + GRACE_MS),
    ],
)
async def test_leases_of_small_and_of_large_claims_have_the_same_grace(
    count: int, lease_ms: int, end_ms: int
) -> None:
    rig = await claimed_at_once(count, lease_ms)

    finish(begin(rig))

    assert {lease.deadline_ms for lease in running(rig).values()} == {START_MS + end_ms}


@pytest.mark.parametrize("count", [3, 100])
@pytest.mark.parametrize("lease_ms", [AWAY_MS + GRACE_MS, 500_000])
async def test_a_grace_that_moves_no_lease_writes_nothing(count: int, lease_ms: int) -> None:
    rig = await claimed_at_once(count, lease_ms)

    grace = begin(rig)

    assert grace.step() == []
    assert grace.is_done
    assert rig.commit() == 0


async def test_no_step_looks_at_more_leases_than_its_bound_and_a_bucket() -> None:
    rig = Rig()
    rig.create()
    await rig.route(range(1, 12_001))
    while len(running(rig)) < 12_000:
        await rig.claim(5000, lease_ms=LEASE_MS)
    rig.commit()
    before = {token: lease.deadline_ms for token, lease in running(rig).items()}

    grace, steps = begin(rig), list[int]()
    while not grace.is_done:
        grace.step()
        after = {token: lease.deadline_ms for token, lease in running(rig).items()}
        steps.append(sum(after[token] != before[token] for token in after))
        before = after

    assert sum(steps) == 12_000
    assert max(steps) <= lease_table.STEP_LEASES + 250
    assert len(steps) >= 3


async def test_no_step_writes_many_records_where_each_has_one_lease() -> None:
    rig = Rig()
    rig.create()
    count = lease_table.STEP_LEASES // lease_table.BUCKET_LEASES
    await rig.route(range(1, 2 * count + 1))
    for _ in range(2 * count):
        await rig.claim(1, lease_ms=LEASE_MS)
        rig.commit()

    grace, written = begin(rig), list[int]()
    while not grace.is_done:
        changed = grace.step()
        before = len(rig.shard._rows)
        rig.shard.drain_early(changed, rig.now_ms)
        written.append(len(rig.shard._rows) - before)

    assert sum(written) >= 2 * count
    assert max(written) <= count + 1  # and the state of the queue


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_is_commanded_between_the_steps_who_was_alive_has_the_grace(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    # Given leases in small buckets and in blocks, some of them over before the standstill
    monkeypatch.setattr(lease_table, "STEP_LEASES", 40)
    chance = random.Random(seed)
    rig = Rig()
    for name in QUEUES:
        rig.create(name, max_attempts=1)
        await rig.route(range(1, 501), queue_id=name)
    for _ in range(12):
        lease_ms = chance.choice([1, LEASE_MS, 100_000])
        await rig.claim(chance.choice([1, 3, 60]), lease_ms, queue_id=chance.choice(QUEUES))
        if chance.random() < 0.5:
            rig.commit()
    rig.now_ms += 1
    held = {token: lease.deadline_ms for token, lease in running(rig).items()}
    alive = {token for token, deadline_ms in held.items() if deadline_ms > rig.now_ms}
    grace = begin(rig)

    # When leases end, are extended and made between its steps
    ended: set[int] = set()
    while not grace.is_done:
        rig.shard.drain_early(grace.step(), rig.now_ms)
        ended |= await command(rig, chance, [*running(rig).values()], alive)
        rig.now_ms += 1
        if chance.random() < 0.3:
            rig.commit()

    # Then no one who was alive can be ended by the clock, and what has ended stays so
    assert not ended & running(rig).keys()
    until_ms = rig.now_ms + LEASE_MS - 100  # the steps and commands took less
    for token, lease in running(rig).items():
        if token in alive or token not in held:
            assert lease.deadline_ms > until_ms
        else:
            assert lease.deadline_ms == held[token], "it was over before the standstill"
    due = {lease.token for lease in rig.shard.leases.deadlines.ended(until_ms, 10_000)}
    assert due == (held.keys() - alive) & running(rig).keys()
    # And it is stored so: a restart takes those for alive, and no others
    expected = {
        token: max(lease.deadline_ms, rig.now_ms + min(lease.length_ms, GRACE_MS))
        if lease.deadline_ms > rig.now_ms
        else lease.deadline_ms
        for token, lease in running(rig).items()
    }
    rig.commit()
    await rig.restart()
    assert {token: lease.deadline_ms for token, lease in running(rig).items()} == expected


async def command(
    rig: Rig, chance: random.Random, leases: Sequence[Lease], alive: Container[int]
) -> set[int]:
    """Some command; gives the tokens of the leases that it ended."""
    some = chance.sample(leases, min(len(leases), chance.randint(1, 5)))
    tokens = [lease.token for lease in some]
    name = chance.choice(sorted(rig.shard.queues))
    match chance.randrange(7):
        case 0:
            assert set(rig.shard.leases.ack(tokens, rig.now_ms)) <= {Finish.OK}
        case 1:
            await rig.nack(*(Nack(token, "no") for token in tokens))
        case 2:
            rig.shard.leases.extend([one for one in tokens if one in alive], 50_000, rig.now_ms)
            return set()
        case 3:
            await rig.claim(chance.choice([1, 60]), 100_000, queue_id=name)
            return set()
        case 4 if chance.random() < 0.2:
            tokens = [lease.token for lease in rig.queue(name).leases]
            rig.shard.purge(rig.queue(name), [Purge.IN_FLIGHT])
        case 5 if chance.random() < 0.2 and len(rig.shard.queues) > 1:
            tokens = [lease.token for lease in rig.queue(name).leases]
            rig.shard.delete_queue(rig.queue(name))
        case _:
            return set()
    return set(tokens)
