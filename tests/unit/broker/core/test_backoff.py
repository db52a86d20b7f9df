"""How long a message waits after a failed attempt."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.broker.core.lease_table import random_blocks
from services.broker.core.settings import (
    BACKOFF_MS_MAX,
    MULTIPLIER_MAX,
    Backoff,
    BackoffKind,
    QueueSettings,
)
from services.broker.core.shard import Finish, Nack
from tests.unit.broker.core.shards import Rig

TOKENS = st.integers(1, (1 << 64) - 1)
ATTEMPTS = st.integers(1, 65_535)


@st.composite
def backoffs(draw: st.DrawFn) -> Backoff:
    initial_ms = draw(st.integers(1, BACKOFF_MS_MAX))
    return Backoff(
        draw(st.sampled_from(BackoffKind)),
        initial_ms,
        draw(st.integers(initial_ms, BACKOFF_MS_MAX)),
        draw(st.floats(1, MULTIPLIER_MAX)),
        draw(st.floats(0, 1)),
    )


def sure(backoff: Backoff) -> Backoff:
    """The same without jitter."""
    return Backoff(backoff.kind, backoff.initial_ms, backoff.max_ms, backoff.multiplier)


@given(backoffs(), ATTEMPTS, TOKENS)
def test_a_wait_lies_between_its_part_without_chance_and_the_whole(
    backoff: Backoff, attempts: int, token: int
) -> None:
    whole_ms = sure(backoff).wait_ms(attempts, token)
    assert backoff.initial_ms <= whole_ms <= backoff.max_ms
    wait_ms = backoff.wait_ms(attempts, token)
    assert int(whole_ms * (1 - backoff.jitter)) <= wait_ms <= whole_ms
    assert backoff.wait_ms(attempts, token) == wait_ms, "the same lease, the same chance"


@given(backoffs(), st.integers(1, 65_534), TOKENS)
def test_a_later_attempt_waits_no_less(backoff: Backoff, attempts: int, token: int) -> None:
    assert backoff.wait_ms(attempts, token) <= backoff.wait_ms(attempts + 1, token)


@settings(deadline=None)
@given(backoffs())
def test_jitter_uses_its_whole_range(backoff: Backoff) -> None:
    whole_ms = sure(backoff).wait_ms(1, 0)
    blocks = random_blocks()
    # Whatever the place of a lease in its claim: most claims are of one message.
    for place in (0, 1, 249):
        waits = {backoff.wait_ms(1, next(blocks) << 8 | place) for _ in range(5000)}
        assert whole_ms * (1 - backoff.jitter * 0.01) <= max(waits) <= whole_ms
        assert min(waits) <= whole_ms * (1 - backoff.jitter * 0.99) + 1


async def test_claims_of_one_message_each_do_not_all_wait_for_as_long() -> None:
    rig = await rig_with(backoff=Backoff(BackoffKind.FIXED, 60_000, jitter=1.0))
    rig.shard.leases._blocks = iter(range(1000, 2000))
    await rig.route(range(1, 201))
    waits = set()
    for _ in range(200):
        (lease,) = await rig.claim(1)
        waits.add(lease.queue.settings.backoff_ms(1, lease.token))
    assert len(waits) > 100


@given(backoffs())
def test_a_rule_is_read_as_it_was_stored(backoff: Backoff) -> None:
    settings = QueueSettings("true", backoff=backoff, paused=True, default_delay_ms=7)
    assert QueueSettings.from_record(settings.record()) == settings


def test_settings_are_stored_as_text_and_only_where_they_differ_from_the_default() -> None:
    assert dict(QueueSettings("true").record().settings) == {"lease_ms": "30000"}
    settings = QueueSettings(
        "true",
        default_delay_ms=5,
        backoff=Backoff(BackoffKind.EXPONENTIAL, 100, 60_000, 1.5, 0.1),
        fallback_priority=0,
        max_total_lease_ms=99_000,
        failed_retention_s=7,
        paused=True,
    )
    assert dict(settings.record().settings) == {
        "lease_ms": "30000",
        "default_delay_ms": "5",
        "backoff": "exponential 100 60000 1.5 0.1",
        "fallback_priority": "0",
        "max_total_lease_ms": "99000",
        "failed_retention_s": "7",
        "paused": "1",
    }


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (BackoffKind.FIXED, [100, 100, 100, 100, 100]),
        (BackoffKind.LINEAR, [100, 200, 300, 400, 450]),
        (BackoffKind.EXPONENTIAL, [100, 150, 225, 337, 450]),
    ],
)
def test_waits_grow_up_to_the_cap(kind: BackoffKind, expected: list[int]) -> None:
    backoff = Backoff(kind, 100, 450, 1.5)
    assert [backoff.wait_ms(attempts, 0) for attempts in range(1, 6)] == expected


async def rig_with(**settings: object) -> Rig:
    rig = Rig()
    queue = rig.create()
    rig.shard.update_queue(queue, queue.settings.changed(**settings))
    return rig


LINEAR = Backoff(BackoffKind.LINEAR, 1000)


async def test_a_failed_attempt_waits_longer_each_time_however_it_failed() -> None:
    rig = await rig_with(backoff=LINEAR)
    await rig.route([1])
    for attempt in (1, 2, 3, 4):
        (lease,) = await rig.claim(1, lease_ms=5000)
        assert lease.attempts == attempt
        if attempt % 2:
            await rig.nack(Nack(lease.token, "no"))
        else:
            rig.now_ms += 5000
            await rig.expire()
        rig.now_ms += attempt * 1000 - 1
        assert await rig.claim(1) == []
        rig.now_ms += 1
    (last,) = await rig.claim(1)
    await rig.nack(Nack(last.token, "no"))
    assert rig.queue().failed.count == 1, "the last attempt waits for nothing"


async def test_a_delay_of_its_own_wins_over_the_backoff_also_none_at_all() -> None:
    rig = await rig_with(backoff=LINEAR)
    await rig.route([1])
    (lease,) = await rig.claim(1)
    await rig.nack(Nack(lease.token, "no", delay_ms=0))
    (lease,) = await rig.claim(1)
    await rig.nack(Nack(lease.token, "no", delay_ms=10))
    rig.now_ms += 10
    assert len(await rig.claim(1)) == 1


async def test_a_release_neither_waits_nor_counts() -> None:
    rig = await rig_with(backoff=LINEAR, max_attempts=1)
    await rig.route([1])
    (lease,) = await rig.claim(1)
    assert await rig.nack(Nack(lease.token, release=True)) == [Finish.OK]
    (again,) = await rig.claim(1)
    assert again.attempts == 1
    assert rig.queue().nacked_count == 0


async def test_a_backoff_survives_a_restart_in_the_middle_of_a_wait() -> None:
    rig = await rig_with(backoff=LINEAR)
    await rig.route([1])
    (lease,) = await rig.claim(1)
    await rig.nack(Nack(lease.token, "no"))
    rig.commit()
    await rig.restart(away_ms=999)
    assert await rig.claim(1) == []
    rig.now_ms += 1
    assert await rig.ids(1) == [1]


async def test_no_extension_goes_beyond_the_longest_total_lease() -> None:
    rig = await rig_with(max_total_lease_ms=50_000)
    await rig.route([1])
    (lease,) = await rig.claim(1, lease_ms=30_000)
    start_ms = rig.now_ms
    rig.now_ms += 25_000
    assert rig.shard.leases.extend([lease.token], 0, rig.now_ms) == [(Finish.OK, start_ms + 50_000)]
    rig.now_ms += 20_000
    assert rig.shard.leases.extend([lease.token], 0, rig.now_ms) == [(Finish.OK, start_ms + 50_000)]
    assert rig.shard.leases.extend([lease.token], 1000, rig.now_ms) == [
        (Finish.OK, start_ms + 46_000)
    ]
    rig.now_ms = start_ms + 46_000
    assert len(await rig.expire()) == 1


async def test_a_lower_total_lease_takes_nothing_from_an_end_that_holds() -> None:
    rig = await rig_with()
    await rig.route([1])
    (lease,) = await rig.claim(1, lease_ms=60_000)
    start_ms = rig.now_ms
    queue = rig.queue()
    rig.shard.update_queue(
        queue, queue.settings.changed(max_total_lease_ms=5000, max_lease_ms=5000)
    )
    rig.now_ms += 10_000
    assert rig.shard.leases.extend([lease.token], 0, rig.now_ms) == [(Finish.OK, start_ms + 15_000)]
    assert rig.shard.leases.extend([lease.token], 0, rig.now_ms) == [(Finish.OK, start_ms + 15_000)]


async def test_a_claim_is_capped_by_the_longest_lease_of_now() -> None:
    rig = await rig_with(max_lease_ms=2000)
    await rig.route([1])
    (lease,) = await rig.claim(1, lease_ms=60_000)
    assert (lease.length_ms, lease.deadline_ms - rig.now_ms) == (2000, 2000)


async def test_what_fails_together_waits_in_few_buckets() -> None:
    rig = await rig_with(backoff=Backoff(BackoffKind.FIXED, 60_000, jitter=1.0))
    await rig.route(range(1, 2001))
    leases = await rig.claim(2000)
    rig.commit()
    before = len(rig.store.rows)
    await rig.nack(*(Nack(lease.token) for lease in leases))
    attempts = 2000
    rig.commit()
    assert len(rig.store.rows) - before < attempts + 300
